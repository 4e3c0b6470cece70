// Fibers and barriers. Every thread of the block is a fiber; fibers switch only where a thread must wait.
#pragma once
#include "context_switch.h"
#include "faults.h"
#include "runtime.h"

namespace emu {

enum class State : uint8_t { fresh, running, at_barrier, at_collective, exited };

struct Fiber {
  void* stack_pointer;
  int stack;             // index into stacks, while not fresh or exited
  State state;
  uint3 index;           // threadIdx
  const char* barrier_file;
  int barrier_line;
  // A collective's operands and result (collectives.h).
  uint8_t operation;
  int16_t source_lane;
  uint32_t mask;
  uint64_t value, result;
  uintptr_t collective_pc;
};
struct Warp {
  uint32_t waiting, exited;  // lane masks
  uint32_t epoch;            // advanced by __syncwarp: orders accesses of the warp's lanes for the checker
};

// Fibers that can run, in the order in which they became ready.
class ReadyQueue {
 public:
  void clear() { head_ = tail_ = 0; }
  void push(int fiber) { ring_[tail_++ % kSize] = (uint16_t)fiber; }
  int pop() {
    if (head_ == tail_) return -1;
    if ((Order)launch.options.order == Order::random) {
      const uint32_t other = head_ + random_bits() % (tail_ - head_);
      std::swap(ring_[head_ % kSize], ring_[other % kSize]);
    }
    return ring_[head_++ % kSize];
  }

 private:
  static constexpr uint32_t kSize = 2048;  // a power of two, more than kMaxThreads
  uint16_t ring_[kSize];
  uint32_t head_ = 0, tail_ = 0;
};

inline Fiber fibers[kMaxThreads];
inline Warp warps[kMaxThreads / kWarp];
inline ReadyQueue ready;
inline int current;             // the running fiber
inline int waiting_at_barrier;  // number of fibers
inline int exited;              // number of fibers
inline uint32_t barrier_epoch;  // counts barriers over all blocks: accesses with equal epochs are unordered
inline int free_stacks[kMaxThreads], free_stack_count;

inline int current_fiber() { return current; }
inline uint3 fiber_index(int fiber) { return fibers[fiber].index; }

inline const char* collective_name(int operation) {
  static const char* const names[] = {"__shfl_*_sync", "__ballot_sync", "__any_sync",
                                      "__all_sync",    "__syncwarp",    "__match_any_sync"};
  return names[operation];
}

// traffic.h: the lanes of a warp, or of all warps, have met.
inline void converged(int warp);
inline void all_converged();

[[noreturn]] inline void fail_deadlock() {
  int at_barrier = -1, at_collective = -1, gone = -1, barriers = 0, collectives = 0;
  for (int i = launch.threads - 1; i >= 0; i--) {
    if (fibers[i].state == State::at_barrier) barriers++, at_barrier = i;
    if (fibers[i].state == State::at_collective) collectives++, at_collective = i;
    if (fibers[i].state == State::exited) gone = i;
  }
  char text[512];
  int n = snprintf(text, sizeof text, "deadlock: of %d threads", launch.threads);
  const auto add = [&](auto... values) { n += snprintf(text + n, sizeof text - (size_t)n, values...); };
  if (barriers) {
    const Fiber& f = fibers[at_barrier];
    name_source(f.barrier_file, f.barrier_line);
    add(", %d wait at __syncthreads (line %d, e.g. thread %d)", barriers, f.barrier_line, at_barrier);
  }
  if (collectives) {
    const Fiber& f = fibers[at_collective];
    add(", %d wait in %s (thread %d, mask 0x%08x, arrived 0x%08x)", collectives, collective_name(f.operation),
        at_collective, f.mask, warps[at_collective / kWarp].waiting & f.mask);
  }
  if (exited) add(", %d have exited (e.g. thread %d)", exited, gone);
  fail_in(barriers ? at_barrier : at_collective, barriers ? 0 : fibers[at_collective].collective_pc, "%s", text);
}

inline void fiber_main();

inline void make_current(int fiber) {
  current = fiber;
  threadIdx = fibers[fiber].index;
}
inline void start_on_own_stack(int fiber) {
  Fiber& f = fibers[fiber];
  f.state = State::running;
  f.stack = free_stacks[--free_stack_count];
  f.stack_pointer = fresh_stack(f.stack, fiber_main);
}

// The current fiber waits: run others until somebody has made it ready and its turn has come.
inline void yield_current() {
  const int self = current, next = ready.pop();
  if (next == self) return;
  launch.report->switches++;
  if (next < 0) fail_deadlock();
  make_current(next);
  if (fibers[next].state == State::fresh) start_on_own_stack(next);
  emu_switch(&fibers[self].stack_pointer, fibers[next].stack_pointer);
}

inline void fiber_main() {
  for (;;) {
    const int stack = fibers[current].stack;
    launch.kernel(launch.arguments);
    fibers[current].state = State::exited;
    warps[current / kWarp].exited |= 1u << (current % kWarp);
    exited++;
    // A thread that leaves while others wait at a barrier: works on some cards, is undefined by the manual.
    if (waiting_at_barrier && waiting_at_barrier + exited == launch.threads) fail_deadlock();
    const int next = ready.pop();
    if (next < 0) {
      if (exited != launch.threads) fail_deadlock();
      leave_kernel();
    }
    make_current(next);
    if (fibers[next].state == State::fresh) {  // a block without barriers never switches stacks at all
      fibers[next].state = State::running;
      fibers[next].stack = stack;
      continue;
    }
    free_stacks[free_stack_count++] = stack;
    launch.report->switches++;
    void* abandoned;
    emu_switch(&abandoned, fibers[next].stack_pointer);
  }
}

inline void push_all() {
  const bool reverse = (Order)launch.options.order == Order::reverse;
  for (int i = 0; i < launch.threads; i++) ready.push(reverse ? launch.threads - 1 - i : i);
}

inline void wait_at_barrier(const char* file, int line) {
  Fiber& self = fibers[current];
  self.barrier_file = file;
  self.barrier_line = line;
  self.state = State::at_barrier;
  if (++waiting_at_barrier + exited == launch.threads) {
    if (exited) fail_deadlock();
    for (int i = 0; i < launch.threads; i++) {
      if (fibers[i].barrier_line == line) continue;
      name_source(file, line);
      EMU_FAIL(0, "divergent __syncthreads: this thread is at line %d, thread %d at line %d", line, i,
               fibers[i].barrier_line);
    }
    waiting_at_barrier = 0;
    all_converged();
    barrier_epoch++;
    launch.report->barriers++;
    for (int i = 0; i < launch.threads; i++) fibers[i].state = State::running;
    push_all();
  }
  yield_current();
}

// Runs every thread of the current block to its end.
inline void run_block() {
  waiting_at_barrier = exited = 0;
  barrier_epoch++;
  for (int i = 0; i < launch.threads; i++) fibers[i].state = State::fresh, fibers[i].barrier_line = 0;
  for (Warp& warp : warps) warp.waiting = warp.exited = 0;
  free_stack_count = 0;
  for (int i = kMaxThreads - 1; i >= 0; i--) free_stacks[free_stack_count++] = i;
  ready.clear();
  push_all();
  make_current(ready.pop());
  start_on_own_stack(current);
  launch.in_kernel = 1;
  emu_switch(&host_stack_pointer, fibers[current].stack_pointer);
  launch.in_kernel = 0;
}

}  // namespace emu

extern "C" EMU_HIDDEN void emu_syncthreads(const char* file, int line) { emu::wait_at_barrier(file, line); }

extern "C" EMU_HIDDEN int emu_syncthreads_reduce(const char* file, int line, int reduction, int predicate) {
  static int count, all, any;
  if (emu::waiting_at_barrier == 0) count = 0, all = 1, any = 0;
  count += predicate, all &= predicate, any |= predicate;
  emu::wait_at_barrier(file, line);
  const int result = reduction == EMU_COUNT ? count : reduction == EMU_AND ? all : any;
  emu::wait_at_barrier(file, line);  // nobody may start the next reduction before all have read this one
  return result;
}
