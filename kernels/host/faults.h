// Faults: the first one is described in the launch's report, and control leaves the fibers for good.
#pragma once
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "context_switch.h"
#include "runtime.h"

namespace emu {

inline void* host_stack_pointer;  // of emu_launch, while fibers run
int current_fiber();
uint3 fiber_index(int fiber);

[[noreturn]] inline void leave_kernel() {
  void* abandoned;
  emu_switch(&abandoned, host_stack_pointer);
  __builtin_unreachable();
}

inline void describe_fault(int fiber, uintptr_t pc, const char* format, va_list values) {
  if (launch.failed) return;
  launch.failed = true;
  EmuReport& report = *launch.report;
  const uint3 thread = fiber_index(fiber);
  report.block[0] = blockIdx.x, report.block[1] = blockIdx.y, report.block[2] = blockIdx.z;
  report.thread[0] = thread.x, report.thread[1] = thread.y, report.thread[2] = thread.z;
  report.fault_pc = pc;
  vsnprintf(report.what, sizeof report.what, format, values);
}

// `pc`: an address inside the instruction's line, or 0.
[[noreturn]] __attribute__((format(printf, 3, 4))) inline void fail_in(int fiber, uintptr_t pc, const char* format, ...) {
  va_list values;
  va_start(values, format);
  describe_fault(fiber, pc, format, values);
  va_end(values);
  leave_kernel();
}
#define EMU_FAIL(pc, ...) emu::fail_in(emu::current_fiber(), (uintptr_t)(pc), __VA_ARGS__)
#define EMU_CALLER (uintptr_t) __builtin_return_address(0)

inline void name_source(const char* file, int line) {
  snprintf(launch.report->source, sizeof launch.report->source, "%s:%d", file, line);
}

// ---- signals -------------------------------------------------------------------------------------------------------

inline char signal_message[512];
inline pid_t launching_thread;

// Runs on a fiber stack, outside the signal handler: the handler only redirects to here.
inline void fail_after_signal() { EMU_FAIL(launch.report->fault_pc, "%s", signal_message); }

inline void describe_address(uintptr_t address) {
  int n = snprintf(signal_message, sizeof signal_message, "memory fault at %p", (void*)address);
  const size_t room = sizeof signal_message - (size_t)n;
  if (stacks.contains(address)) {
    snprintf(signal_message + n, room, ": the thread's stack of %zu KiB overflowed", kStackBytes >> 10);
    return;
  }
  const uintptr_t dynamic_end = (uintptr_t)launch.dynamic_shared + launch.dynamic_shared_bytes;
  if (launch.dynamic_shared_bytes && address >= dynamic_end && address < dynamic_end + 2 * kGuardBytes) {
    snprintf(signal_message + n, room, ": %zu byte(s) past the end of dynamic shared memory (size %zu)",
             (size_t)(address - dynamic_end), launch.dynamic_shared_bytes);
    return;
  }
  constexpr uintptr_t near = 64 << 10;
  for (uint64_t i = 0; i < launch.options.range_count; i++) {
    const EmuRange& range = launch.options.ranges[i];
    if (address + near >= range.begin && address < range.end + near) {
      snprintf(signal_message + n, room, ": byte %ld of buffer '%s' (size %zu)", (long)(address - range.begin), range.name,
               (size_t)(range.end - range.begin));
      return;
    }
  }
}

inline const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
inline struct sigaction previous_actions[4];
// Not SIGALRM, which test runners use for their own time limits.
inline int timeout_signal() { return SIGRTMIN + 7; }

inline void on_signal(int signal_number, siginfo_t* info, void* context_pointer) {
  ucontext_t* context = (ucontext_t*)context_pointer;
  const bool ours = launch.in_kernel && (pid_t)syscall(SYS_gettid) == launching_thread;
  if (!ours) {
    // Somebody else's fault: the instruction runs again under the default action. A late time-out is nothing.
    if (signal_number != timeout_signal()) signal(signal_number, SIG_DFL);
    return;
  }
#if defined(__x86_64__)
  const uintptr_t pc = (uintptr_t)context->uc_mcontext.gregs[REG_RIP];
#else
  const uintptr_t pc = (uintptr_t)context->uc_mcontext.pc;
#endif
  launch.report->fault_pc = pc + 1;  // the other reports give return addresses, one past the instruction
  if (signal_number == timeout_signal())
    snprintf(signal_message, sizeof signal_message, "ran past its time limit of %u ms (endless loop or spin-wait?)",
             launch.options.timeout_ms);
  else if (signal_number == SIGSEGV || signal_number == SIGBUS)
    describe_address((uintptr_t)info->si_addr);
  else
    snprintf(signal_message, sizeof signal_message, "%s",
             signal_number == SIGFPE ? "integer division by zero" : "illegal instruction");
  // Continue in fail_after_signal on the first fiber's stack: no fiber is ever resumed after a fault.
  const uintptr_t stack = ((uintptr_t)stacks.base + kStackBytes - 4096) & ~(uintptr_t)15;
#if defined(__x86_64__)
  context->uc_mcontext.gregs[REG_RSP] = (greg_t)(stack - 8);
  context->uc_mcontext.gregs[REG_RIP] = (greg_t)(uintptr_t)fail_after_signal;
#else
  context->uc_mcontext.sp = stack;
  context->uc_mcontext.pc = (uintptr_t)fail_after_signal;
#endif
}

// Installs the handlers for the duration of a launch, on a stack of their own, and starts the clock.
class SignalGuard {
 public:
  SignalGuard() {
    launching_thread = (pid_t)syscall(SYS_gettid);
    static char handler_stack[64 << 10];
    stack_t ours{};
    ours.ss_sp = handler_stack;
    ours.ss_size = sizeof handler_stack;
    sigaltstack(&ours, &previous_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 4; i++) sigaction(kSignals[i], &action, &previous_actions[i]);
    if (!launch.options.timeout_ms) return;
    sigaction(timeout_signal(), &action, &previous_timeout_action_);
    struct sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;  // this thread: a process-wide timer would interrupt any other
    event.sigev_signo = timeout_signal();
    event._sigev_un._tid = launching_thread;
    if (timer_create(CLOCK_MONOTONIC, &event, &timer_) != 0) return;
    has_timer_ = true;
    itimerspec limit{};
    limit.it_value.tv_sec = launch.options.timeout_ms / 1000;
    limit.it_value.tv_nsec = (long)(launch.options.timeout_ms % 1000) * 1000000;
    timer_settime(timer_, 0, &limit, nullptr);
  }
  ~SignalGuard() {
    if (has_timer_) timer_delete(timer_);
    if (launch.options.timeout_ms) sigaction(timeout_signal(), &previous_timeout_action_, nullptr);
    for (int i = 0; i < 4; i++) sigaction(kSignals[i], &previous_actions[i], nullptr);
    sigaltstack(&previous_stack_, nullptr);
  }

 private:
  stack_t previous_stack_{};
  struct sigaction previous_timeout_action_{};
  timer_t timer_{};
  bool has_timer_ = false;
};

}  // namespace emu

extern "C" EMU_HIDDEN void emu_trap(const char* what) { EMU_FAIL(EMU_CALLER, "%s", what); }
