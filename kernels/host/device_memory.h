// Loads with cache hints, fences and atomics.
#pragma once
#include "device_types.h"

template <class T> EMU_INLINE T __ldg(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldca(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcg(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcs(const T* p) { return *p; }
template <class T> EMU_INLINE void __stcg(T* p, T v) { *p = v; }
template <class T> EMU_INLINE void __stcs(T* p, T v) { *p = v; }

EMU_INLINE void __threadfence_block() {}
EMU_INLINE void __threadfence() { emu_fence(); }
EMU_INLINE void __threadfence_system() { emu_fence(); }
EMU_INLINE void __trap() { emu_trap("__trap() executed"); }
EMU_INLINE void __nanosleep(unsigned) {}

// Fibers switch only at barriers and collectives, so a plain read-modify-write is atomic.
template <class T, class Update>
EMU_UNCHECKED __attribute__((noinline)) static T emu_atomic(T* p, Update update) {
  emu_atomic_access(p, sizeof(T));
  const T old = *p;
  *p = update(old);
  return old;
}
// Keeps the second argument out of template deduction: atomicAdd(float*, 1) must work as on the device.
template <class T> struct EmuIdentity { using type = T; };
template <class T> using EmuValue = typename EmuIdentity<T>::type;

template <class T> EMU_INLINE T atomicAdd(T* p, EmuValue<T> v) { return emu_atomic(p, [=](T old) EMU_UNCHECKED { return (T)(old + v); }); }
template <class T> EMU_INLINE T atomicExch(T* p, EmuValue<T> v) { return emu_atomic(p, [=](T) EMU_UNCHECKED { return v; }); }
template <class T> EMU_INLINE T atomicOr(T* p, EmuValue<T> v) { return emu_atomic(p, [=](T old) EMU_UNCHECKED { return (T)(old | v); }); }
template <class T> EMU_INLINE T atomicAnd(T* p, EmuValue<T> v) { return emu_atomic(p, [=](T old) EMU_UNCHECKED { return (T)(old & v); }); }
template <class T> EMU_INLINE T atomicXor(T* p, EmuValue<T> v) { return emu_atomic(p, [=](T old) EMU_UNCHECKED { return (T)(old ^ v); }); }
template <class T> EMU_INLINE T atomicCAS(T* p, EmuValue<T> expected, EmuValue<T> v) {
  return emu_atomic(p, [=](T old) EMU_UNCHECKED { return old == expected ? v : old; });
}
EMU_INLINE int atomicSub(int* p, int v) { return emu_atomic(p, [=](int old) EMU_UNCHECKED { return (int)((unsigned)old - (unsigned)v); }); }
EMU_INLINE unsigned atomicSub(unsigned* p, unsigned v) { return emu_atomic(p, [=](unsigned old) EMU_UNCHECKED { return old - v; }); }
EMU_INLINE unsigned atomicInc(unsigned* p, unsigned limit) { return emu_atomic(p, [=](unsigned old) EMU_UNCHECKED { return old >= limit ? 0u : old + 1u; }); }
EMU_INLINE unsigned atomicDec(unsigned* p, unsigned limit) { return emu_atomic(p, [=](unsigned old) EMU_UNCHECKED { return old == 0 || old > limit ? limit : old - 1u; }); }
// Integers only: the device has no float atomicMax, and a kernel that uses one must not compile here either.
#define EMU_ATOMIC_MIN_MAX(T)                                                                                             \
  EMU_INLINE T atomicMax(T* p, T v) { return emu_atomic(p, [=](T old) EMU_UNCHECKED { return old < v ? v : old; }); }     \
  EMU_INLINE T atomicMin(T* p, T v) { return emu_atomic(p, [=](T old) EMU_UNCHECKED { return v < old ? v : old; }); }
EMU_ATOMIC_MIN_MAX(int)
EMU_ATOMIC_MIN_MAX(unsigned)
EMU_ATOMIC_MIN_MAX(long long)
EMU_ATOMIC_MIN_MAX(unsigned long long)
#undef EMU_ATOMIC_MIN_MAX
