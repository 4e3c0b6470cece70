// Arithmetic intrinsics. The runtime runs kernels with subnormal floats flushed to zero (NVRTC's -ftz=true), so plain
// float arithmetic flushes here as it does on the card; __fmaf_ieee_rn is the exception on both.
#pragma once
#include "device_types.h"

template <class To, class From>
EMU_INLINE To emu_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
EMU_INLINE int __float_as_int(float f) { return emu_bit_cast<int>(f); }
EMU_INLINE unsigned __float_as_uint(float f) { return emu_bit_cast<unsigned>(f); }
EMU_INLINE float __int_as_float(int i) { return emu_bit_cast<float>(i); }
EMU_INLINE float __uint_as_float(unsigned i) { return emu_bit_cast<float>(i); }
EMU_INLINE long long __double_as_longlong(double d) { return emu_bit_cast<long long>(d); }
EMU_INLINE double __longlong_as_double(long long i) { return emu_bit_cast<double>(i); }

// The approximate functions of the card have errors of a few ulp that nobody needs to reproduce.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)
EMU_INLINE float __fdividef(float a, float b) { return a / b; }
EMU_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
EMU_INLINE double rsqrt(double x) { return 1.0 / sqrt(x); }
EMU_INLINE float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
EMU_INLINE float __frcp_rn(float x) { return 1.0f / x; }
EMU_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
EMU_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EMU_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMU_INLINE float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x == x ? x : 0; }

// g++ contracts a*b+c to an FMA as nvcc does; the _rn forms promise not to be contracted, hence the opaque copies.
template <class T>
EMU_INLINE T emu_opaque(T x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}
EMU_INLINE float __fadd_rn(float a, float b) { return emu_opaque(a) + emu_opaque(b); }
EMU_INLINE float __fsub_rn(float a, float b) { return emu_opaque(a) - emu_opaque(b); }
EMU_INLINE float __fmul_rn(float a, float b) { return emu_opaque(a * b); }
EMU_INLINE double __dadd_rn(double a, double b) { return emu_opaque(a) + emu_opaque(b); }
EMU_INLINE double __dmul_rn(double a, double b) { return emu_opaque(a * b); }

extern "C" EMU_HIDDEN float emu_fma_without_flush(float a, float b, float c);
// FMA that keeps subnormals. Kernels feed it weights as subnormal bit patterns (n x 2^-149), so this case has a path of
// its own: both scalings are exact, one rounding remains, and the slow call that switches the FPU's mode is avoided.
EMU_INLINE float __fmaf_ieee_rn(float a, float b, float c) {
  unsigned ua = __float_as_uint(a), ub = __float_as_uint(b);
  if ((ua & 0x7f800000u) == 0) { std::swap(a, b); std::swap(ua, ub); }
  const unsigned exponent_a = ua >> 23 & 255;
  if ((ub & 0x7f800000u) == 0 && exponent_a > 77 && exponent_a < 255) {
    const float n = (float)(int)(ub & 0x7fffffu) * 0x1p-74f;
    const float sum = fmaf(a * 0x1p-75f, ub >> 31 ? -n : n, c);
    if (fabsf(sum) >= FLT_MIN && (__float_as_uint(c) << 1 == 0 || fabsf(c) >= FLT_MIN)) return sum;
  }
  return emu_fma_without_flush(a, b, c);
}

// Conversions saturate and take NaN to 0, as cvt.s32.f32 does.
EMU_INLINE int emu_saturate(float f, float rounded) {
  return f != f ? 0 : rounded >= 2147483648.f ? INT_MAX : rounded < -2147483648.f ? INT_MIN : (int)rounded;
}
EMU_INLINE int __float2int_rn(float f) { return emu_saturate(f, rintf(f)); }
EMU_INLINE int __float2int_rz(float f) { return emu_saturate(f, truncf(f)); }
EMU_INLINE int __float2int_rd(float f) { return emu_saturate(f, floorf(f)); }
EMU_INLINE int __float2int_ru(float f) { return emu_saturate(f, ceilf(f)); }
EMU_INLINE unsigned __float2uint_rn(float f) {
  const float r = rintf(f);
  return !(r > 0) ? 0u : r >= 4294967296.f ? UINT_MAX : (unsigned)r;
}
EMU_INLINE float __int2float_rn(int i) { return (float)i; }
EMU_INLINE float __uint2float_rn(unsigned i) { return (float)i; }

EMU_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMU_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMU_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
EMU_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMU_INLINE unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= ((x >> i) & 1u) << (31 - i);
  return r;
}
EMU_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
EMU_INLINE int __mulhi(int a, int b) { return (int)(((int64_t)a * b) >> 32); }
EMU_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((((uint64_t)high << 32) | low) << (shift & 31)) >> 32);
}
EMU_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((((uint64_t)high << 32) | low) >> (shift & 31));
}
// PTX prmt, default mode: selector bit 3 replicates the byte's sign.
EMU_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = ((uint64_t)y << 32) | x;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned s = selector >> (4 * i) & 15;
    unsigned byte = bytes >> (8 * (s & 7)) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << (8 * i);
  }
  return r;
}
EMU_INLINE int __vsubss4(int a, int b) {
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    const int d = (int8_t)(a >> 8 * i) - (int8_t)(b >> 8 * i);
    r |= (unsigned)((d > 127 ? 127 : d < -128 ? -128 : d) & 255) << 8 * i;
  }
  return (int)r;
}
EMU_INLINE unsigned __vsub4(unsigned a, unsigned b) {
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (((a >> 8 * i) - (b >> 8 * i)) & 255u) << 8 * i;
  return r;
}
#if __CUDA_ARCH__ >= 610
EMU_INLINE int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
  return c;
}
#endif

#define EMU_MIN_MAX(T)                                  \
  EMU_INLINE T min(T a, T b) { return b < a ? b : a; }  \
  EMU_INLINE T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
EMU_INLINE unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
EMU_INLINE unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
EMU_INLINE unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
EMU_INLINE unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
EMU_INLINE float min(float a, float b) { return fminf(a, b); }
EMU_INLINE float max(float a, float b) { return fmaxf(a, b); }
EMU_INLINE double min(double a, double b) { return fmin(a, b); }
EMU_INLINE double max(double a, double b) { return fmax(a, b); }
