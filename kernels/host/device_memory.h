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

template <class T, class... Allowed> constexpr bool emu_one_of = (std::is_same<T, Allowed>::value || ...);
template <class T> constexpr bool emu_atomic_integer = emu_one_of<T, int, unsigned, unsigned long long>;
#if __CUDA_ARCH__ >= 600
template <class T> constexpr bool emu_addable = emu_atomic_integer<T> || emu_one_of<T, float, double>;
#else
template <class T> constexpr bool emu_addable = emu_atomic_integer<T> || emu_one_of<T, float>;
#endif

// Only the types that the device has: a kernel that asks for more must not compile here either.
#define EMU_ATOMIC(name, allowed, result)                                     \
  template <class T>                                                          \
  EMU_INLINE T name(T* p, EmuValue<T> v) {                                    \
    static_assert(allowed, #name ": the device does not have it for this type"); \
    return emu_atomic(p, [=](T old) EMU_UNCHECKED { return (T)(result); });   \
  }
EMU_ATOMIC(atomicAdd, emu_addable<T>, old + v)
EMU_ATOMIC(atomicSub, (emu_one_of<T, int, unsigned>), old - v)
EMU_ATOMIC(atomicExch, (emu_atomic_integer<T> || emu_one_of<T, float>), ((void)old, v))
EMU_ATOMIC(atomicOr, emu_atomic_integer<T>, old | v)
EMU_ATOMIC(atomicAnd, emu_atomic_integer<T>, old & v)
EMU_ATOMIC(atomicXor, emu_atomic_integer<T>, old ^ v)
EMU_ATOMIC(atomicMax, (emu_atomic_integer<T> || emu_one_of<T, long long>), old < v ? v : old)
EMU_ATOMIC(atomicMin, (emu_atomic_integer<T> || emu_one_of<T, long long>), v < old ? v : old)
EMU_ATOMIC(atomicInc, (emu_one_of<T, unsigned>), old >= v ? 0u : old + 1u)
EMU_ATOMIC(atomicDec, (emu_one_of<T, unsigned>), old == 0 || old > v ? v : old - 1u)
#undef EMU_ATOMIC
template <class T>
EMU_INLINE T atomicCAS(T* p, EmuValue<T> expected, EmuValue<T> v) {
  static_assert(emu_atomic_integer<T>, "atomicCAS: the device does not have it for this type");
  return emu_atomic(p, [=](T old) EMU_UNCHECKED { return old == expected ? v : old; });
}
