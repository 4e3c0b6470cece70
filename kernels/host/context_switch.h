// Saves the callee-saved registers on the running stack, stores the stack pointer, and continues on another stack.
// 10 ns; swapcontext, which also saves the signal mask by a system call, takes 220 ns.
#pragma once
#include "runtime.h"

extern "C" EMU_HIDDEN void emu_switch(void** save_stack_pointer, void* next_stack_pointer);

#if defined(__x86_64__)
asm(R"(.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
.p2align 5
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
#elif defined(__aarch64__)
// AAPCS64: x19-x28, frame pointer x29, return address x30 and the low halves of v8-v15 are the callee's to keep.
asm(R"(.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,%function
.p2align 5
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emu_switch,.-emu_switch
)");
#else
#error "the emulator switches stacks by hand: it is written for x86-64 and aarch64"
#endif

namespace emu {

// A stack pointer that, switched to, enters `entry` with the alignment that the calling convention promises.
inline void* fresh_stack(int index, void (*entry)()) {
  // Equal offsets modulo 4096 would put the frames of all fibers into the same L1 sets (36 ns a switch instead of 10).
  const size_t stagger = 64 * (size_t)((index * 7) & 63) + 64;
  char* top = stacks.base + (size_t)(index + 1) * kStackBytes - stagger;
  void** slot = (void**)((uintptr_t)top & ~(uintptr_t)63);
#if defined(__x86_64__)
  *--slot = nullptr;        // entry's return address: keeps rsp % 16 == 8, ends a debugger's backtrace
  *--slot = (void*)entry;   // popped by emu_switch's ret
  return slot - 6;
#else
  slot -= 20;               // emu_switch's frame
  memset(slot, 0, 160);
  slot[11] = (void*)entry;  // x30
  return slot;
#endif
}

// Kernels run with subnormal floats flushed on input and output, as NVRTC's -ftz=true has it. The bits stay set across
// fiber switches, which do not touch them. (Doubles flush as well, unlike on the card: below 1e-308 nobody looks.)
struct FlushMode {
  uint64_t saved;
  static uint64_t read() {
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr();
#else
    uint64_t v;
    asm volatile("mrs %0, fpcr" : "=r"(v));
    return v;
#endif
  }
  static void write(uint64_t v) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((uint32_t)v);
#else
    asm volatile("msr fpcr, %0" ::"r"(v));
#endif
  }
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 0x8040;  // FTZ | DAZ
#else
  static constexpr uint64_t kFlush = 1u << 24;  // FZ
#endif
  explicit FlushMode(bool flush) : saved(read()) { write(flush ? saved | kFlush : saved & ~kFlush); }
  ~FlushMode() { write(saved); }
};

}  // namespace emu

extern "C" EMU_HIDDEN float emu_fma_without_flush(float a, float b, float c) {
  // Memory operands: the compiler must not move the multiplication across the change of mode, or fold it.
  volatile float va = a, vb = b, vc = c, result;
  {
    emu::FlushMode keep_subnormals(false);
    result = __builtin_fmaf(va, vb, vc);
  }
  return result;
}
