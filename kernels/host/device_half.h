// fp16 as storage: conversions, the pair type and their bit views. sm_52 has no half arithmetic, so none is offered.
#pragma once
#include "device_types.h"

#if defined(__aarch64__)
using EmuHalf = __fp16;  // g++ has _Float16 in C++ on Arm from version 13 only
#else
using EmuHalf = _Float16;
#endif

struct __half_raw { unsigned short x; };
struct __half2_raw { unsigned short x, y; };
struct __align__(2) __half {
  unsigned short bits;
  __half() = default;
  __half(float f) : bits(to_bits(f)) {}
  __half(__half_raw raw) : bits(raw.x) {}
  explicit __half(int i) : bits(to_bits((float)i)) {}
  operator float() const { return to_float(bits); }
  EMU_INLINE float to_float(unsigned short h) {
    EmuHalf value;
    memcpy(&value, &h, sizeof value);
    return (float)value;
  }
  EMU_INLINE unsigned short to_bits(float f) {
    const EmuHalf value = (EmuHalf)f;
    unsigned short h;
    memcpy(&h, &value, sizeof h);
    return h;
  }
};
struct __align__(4) __half2 {
  __half x, y;
  __half2() = default;
  __half2(__half low, __half high) : x(low), y(high) {}
};
typedef __half half;
typedef __half2 half2;

EMU_INLINE float __half2float(__half h) { return __half::to_float(h.bits); }
EMU_INLINE __half __float2half(float f) { return __half(f); }
EMU_INLINE __half __float2half_rn(float f) { return __half(f); }
EMU_INLINE float2 __half22float2(__half2 h) { return make_float2((float)h.x, (float)h.y); }
EMU_INLINE __half2 __float22half2_rn(float2 f) { return __half2(__half(f.x), __half(f.y)); }
EMU_INLINE __half2 __floats2half2_rn(float low, float high) { return __half2(__half(low), __half(high)); }
EMU_INLINE __half2 __halves2half2(__half low, __half high) { return __half2(low, high); }
EMU_INLINE __half2 __half2half2(__half h) { return __half2(h, h); }
EMU_INLINE __half __low2half(__half2 h) { return h.x; }
EMU_INLINE __half __high2half(__half2 h) { return h.y; }
EMU_INLINE float __low2float(__half2 h) { return (float)h.x; }
EMU_INLINE float __high2float(__half2 h) { return (float)h.y; }
EMU_INLINE unsigned short __half_as_ushort(__half h) { return h.bits; }
EMU_INLINE short __half_as_short(__half h) { return (short)h.bits; }
EMU_INLINE __half __ushort_as_half(unsigned short u) { return __half(__half_raw{u}); }
EMU_INLINE __half __short_as_half(short s) { return __half(__half_raw{(unsigned short)s}); }
