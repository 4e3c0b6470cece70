// Qualifiers, vector types, thread indices, and the entry points of the runtime that device code calls.
#pragma once
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 520
#endif
// A source may test this to leave out what only a GPU has (inline PTX); it must not change what a kernel computes.
#define M40LLM_EMULATOR 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __builtin_assume(condition) ((void)0)
#define __align__(n) __attribute__((aligned(n)))
// One block runs at a time, so a function-local static *is* block-shared memory. Its own section lets the runtime tell
// shared variables from other data. `extern __shared__` is rewritten by the builder before the compiler sees it.
#define __shared__ static __attribute__((section("emu_shared"), aligned(16)))

#define EMU_HIDDEN __attribute__((visibility("hidden")))
#define EMU_INLINE static __forceinline__
// Accesses made here stand for something else (an atomic, the loading of arguments): the checker must not see them.
#define EMU_UNCHECKED __attribute__((no_sanitize("thread", "address", "undefined")))

enum EmuCollective : int { EMU_SHUFFLE, EMU_BALLOT, EMU_ANY, EMU_ALL, EMU_SYNCWARP, EMU_MATCH_ANY };
enum EmuReduction : int { EMU_COUNT, EMU_AND, EMU_OR };

extern "C" {
EMU_HIDDEN void emu_syncthreads(const char* file, int line);
EMU_HIDDEN int emu_syncthreads_reduce(const char* file, int line, int reduction, int predicate);
EMU_HIDDEN uint64_t emu_collective(uint32_t mask, int operation, uint64_t value, int source_lane);
EMU_HIDDEN void* emu_dynamic_shared();
EMU_HIDDEN void emu_atomic_access(const volatile void* address, size_t size);
EMU_HIDDEN void emu_fence();
[[noreturn]] EMU_HIDDEN void emu_trap(const char* what);
}

#define __syncthreads() emu_syncthreads(__FILE__, __LINE__)
#define __syncthreads_count(p) emu_syncthreads_reduce(__FILE__, __LINE__, EMU_COUNT, (p) != 0)
#define __syncthreads_and(p) emu_syncthreads_reduce(__FILE__, __LINE__, EMU_AND, (p) != 0)
#define __syncthreads_or(p) emu_syncthreads_reduce(__FILE__, __LINE__, EMU_OR, (p) != 0)

// Sizes and alignments are CUDA's (CUDA C++ Programming Guide, "Built-in Vector Types").
#define EMU_VECTOR(T, NAME, ALIGN2, ALIGN4)                                                              \
  struct NAME##1 { T x; };                                                                               \
  struct __align__(ALIGN2) NAME##2 { T x, y; };                                                          \
  struct NAME##3 { T x, y, z; };                                                                         \
  struct __align__(ALIGN4) NAME##4 { T x, y, z, w; };                                                    \
  EMU_INLINE NAME##1 make_##NAME##1(T x) { return NAME##1{x}; }                                          \
  EMU_INLINE NAME##2 make_##NAME##2(T x, T y) { return NAME##2{x, y}; }                                  \
  EMU_INLINE NAME##3 make_##NAME##3(T x, T y, T z) { return NAME##3{x, y, z}; }                          \
  EMU_INLINE NAME##4 make_##NAME##4(T x, T y, T z, T w) { return NAME##4{x, y, z, w}; }
EMU_VECTOR(signed char, char, 2, 4)
EMU_VECTOR(unsigned char, uchar, 2, 4)
EMU_VECTOR(short, short, 4, 8)
EMU_VECTOR(unsigned short, ushort, 4, 8)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(unsigned int, uint, 8, 16)
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(long long, longlong, 16, 16)
EMU_VECTOR(unsigned long long, ulonglong, 16, 16)
EMU_VECTOR(double, double, 16, 16)
#undef EMU_VECTOR

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// const: they never change within one fiber, so the compiler may keep them in registers and the checker does not see
// their reads; the runtime, which is compiled separately, rewrites them at every switch.
extern "C" {
EMU_HIDDEN extern const uint3 threadIdx, blockIdx, blockDim, gridDim;
}
static const int warpSize = 32;
