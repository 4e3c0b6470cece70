// Weight formats on the device: how the bits of a tensor type lie in memory and how they become numbers.
//
// A matrix (N, K) is cut into units of 32 weights of one row and into groups of 4 rows. A group is a record of three planes
// (m40llm/ops/cuda/pack.py writes them, `Group` below reads them), filled up to a multiple of 16 bytes:
//   quants  [chunk of 32 units][step][row of 4][unit]  16 bytes of packed weights
//           behind the steps of a chunk, for 5- and 6-bit weights: [row of 4][unit]  4 or 8 more bytes
//   scales  [unit][row of 4]                           2 or 4 bytes
//   supers  [8 units][row of 4]                        2 or 4 bytes, K-quants only
// So a warp that gives each lane a unit reads 512 contiguous bytes per row, and one vector load brings a unit's scales of
// four rows. The last chunk of a row is as short as it needs to be.
//
// A unit is eight pieces of four consecutive weights. `Bits::piece` cuts out a piece with one AND per weight, leaving each
// weight n where it lay, at bit `offset`: as the bit pattern of a float that is the subnormal n * 2^(offset - 149), and
// FMA reads it as such. Whoever multiplies brings the power of two: x * 2^(96 - offset), and 2^53 at the end.
// M40_DENORMAL_WEIGHTS=0 instead ORs 2^23 on top and subtracts it again: one more addition per weight, no subnormals.
#pragma once
#include <cuda_fp16.h>

#ifndef M40_DENORMAL_WEIGHTS
#define M40_DENORMAL_WEIGHTS 1
#endif

#define M40_INLINE __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

template <int I>
struct Int {
  static constexpr int value = I;
};

// fn(Int<BEGIN>()), ..., fn(Int<END - 1>()): a loop whose index is a constant, with or without an unrolling compiler.
template <int BEGIN, int END, class Fn>
M40_INLINE void static_for(Fn fn) {
  if constexpr (BEGIN < END) {
    fn(Int<BEGIN>());
    static_for<BEGIN + 1, END>(fn);
  }
}

M40_INLINE float as_float(u32 bits) { return __uint_as_float(bits); }
M40_INLINE float half_bits(u32 bits) { return __half2float(__ushort_as_half((u16)bits)); }
M40_INLINE float power_of_two(int e) { return as_float((u32)(127 + e) << 23); }

// --- from a field in place to a factor of an FMA ---------------------------------------------------------------------

#if M40_DENORMAL_WEIGHTS
constexpr int FIELD_TOP = 24;      // bits 0..23 are linear: exponents 0 and 1 have the same unit
constexpr int X_EXPONENT = 96;     // keeps n * 2^-149 * x * 2^96 well inside the normal range
constexpr int RESULT_EXPONENT = 53;  // 149 - 96
M40_INLINE float weight_factor(u32 field) { return as_float(field); }
// -ftz=true must not flush the weight: the IEEE form keeps subnormals and costs the same instruction.
M40_INLINE float weight_fma(float x, float w, float sum) { return __fmaf_ieee_rn(x, w, sum); }
#else
constexpr int FIELD_TOP = 23;
constexpr int X_EXPONENT = 0;
constexpr int RESULT_EXPONENT = 0;
M40_INLINE float weight_factor(u32 field) { return as_float(field | 0x4B000000u) - 8388608.f; }
M40_INLINE float weight_fma(float x, float w, float sum) { return fmaf(x, w, sum); }
#endif

// Where a field of BITS bits at bit `at` ends up: moved down by 8 if the mantissa has no room for it there.
__device__ constexpr int settled(int at, int bits) { return at + bits <= FIELD_TOP ? at : at - 8; }

template <int AT, int BITS>
M40_INLINE u32 field(u32 word) {
  constexpr u32 mask = ((1u << BITS) - 1) << settled(AT, BITS);
  return (settled(AT, BITS) == AT ? word : word >> 8) & mask;
}

// --- bit layouts: words of one unit, and the four weights of piece P ---------------------------------------------------
// STEPS 16-byte loads bring a unit; EXTRA more bytes go with the only step. `words` are those of the step of piece P.

struct Bits8 {
  static constexpr int STEPS = 2, EXTRA = 0, WORDS = 4, BITS = 8;
  static constexpr bool FLOATING = false;
  M40_INLINE static int offset(int, int c) { return c == 3 ? 0 : settled(8 * c, 8); }
  template <int P>
  M40_INLINE static void piece(const u32 (&words)[WORDS], u32 (&m)[4]) {
    const u32 w = words[P & 3];
    m[0] = field<0, 8>(w), m[1] = field<8, 8>(w), m[2] = field<16, 8>(w), m[3] = w >> 24;
  }
};

// A word holds two pieces that follow each other: one in the low nibbles of its bytes, one in the high ones.
struct Bits4 {
  static constexpr int STEPS = 1, EXTRA = 0, WORDS = 4, BITS = 4;
  static constexpr bool FLOATING = false;
  M40_INLINE static int offset(int p, int c) { return c == 3 ? 0 : settled((p & 1) * 4 + 8 * c, 4); }
  template <int P>
  M40_INLINE static void piece(const u32 (&words)[WORDS], u32 (&m)[4]) {
    constexpr int at = (P & 1) * 4;
    const u32 w = words[P >> 1];
    m[0] = field<at, 4>(w), m[1] = field<at + 8, 4>(w), m[2] = field<at + 16, 4>(w);
    m[3] = at == 0 ? w >> 24 & 15u : w >> 28;
  }
};

// Words 0..4: a piece in bits 0..19, half a piece (5, 6, 7) in bits 20..29; bits 30 and 31 of all five words together are
// the last two weights.
struct Bits5 {
  static constexpr int STEPS = 1, EXTRA = 4, WORDS = 5, BITS = 5;
  static constexpr bool FLOATING = false;
  M40_INLINE static int offset(int p, int c) { return p < 5 ? 5 * c : 5 * (c & 1); }
  template <int P>
  M40_INLINE static void piece(const u32 (&words)[WORDS], u32 (&m)[4]) {
    if constexpr (P < 5) {
      const u32 w = words[P];
      m[0] = field<0, 5>(w), m[1] = field<5, 5>(w), m[2] = field<10, 5>(w), m[3] = field<15, 5>(w);
    } else {
      const u32 low = words[2 * P - 10] >> 20;
      u32 high;
      if constexpr (P < 7) {
        high = words[2 * P - 9] >> 20;
      } else {
        high = words[4] >> 30;
        high = __funnelshift_l(words[3], high, 2);
        high = __funnelshift_l(words[2], high, 2);
        high = __funnelshift_l(words[1], high, 2);
        high = __funnelshift_l(words[0], high, 2);
      }
      m[0] = field<0, 5>(low), m[1] = field<5, 5>(low), m[2] = field<0, 5>(high), m[3] = field<5, 5>(high);
    }
  }
};

// Three words per half unit: a piece in the low 24 bits of each; their top bytes together are the fourth.
struct Bits6 {
  static constexpr int STEPS = 1, EXTRA = 8, WORDS = 6, BITS = 6;
  static constexpr bool FLOATING = false;
  M40_INLINE static int offset(int, int c) { return settled(6 * c, 6); }
  template <int P>
  M40_INLINE static void piece(const u32 (&words)[WORDS], u32 (&m)[4]) {
    constexpr int first = (P >> 2) * 3;
    u32 w;
    if constexpr ((P & 3) < 3) {
      w = words[first + (P & 3)];
    } else {
      w = __byte_perm(__byte_perm(words[first], words[first + 1], 0x7373), words[first + 2], 0x7710);
    }
    m[0] = field<0, 6>(w), m[1] = field<6, 6>(w), m[2] = field<12, 6>(w), m[3] = field<18, 6>(w);
  }
};

// Floating types: `piece` gives the bit patterns of the weights as float32; no scales, nothing to place.
struct BitsF32 {
  static constexpr int STEPS = 8, EXTRA = 0, WORDS = 4, BITS = 32;
  static constexpr bool FLOATING = true;
  M40_INLINE static int offset(int, int) { return 0; }
  template <int P>
  M40_INLINE static void piece(const u32 (&words)[WORDS], u32 (&m)[4]) {
    m[0] = words[0], m[1] = words[1], m[2] = words[2], m[3] = words[3];
  }
};

struct BitsF16 {
  static constexpr int STEPS = 4, EXTRA = 0, WORDS = 4, BITS = 16;
  static constexpr bool FLOATING = true;
  M40_INLINE static int offset(int, int) { return 0; }
  template <int P>
  M40_INLINE static void piece(const u32 (&words)[WORDS], u32 (&m)[4]) {
    const u32 a = words[(P & 1) * 2], b = words[(P & 1) * 2 + 1];
    m[0] = __float_as_uint(half_bits(a & 0xffffu)), m[1] = __float_as_uint(half_bits(a >> 16));
    m[2] = __float_as_uint(half_bits(b & 0xffffu)), m[3] = __float_as_uint(half_bits(b >> 16));
  }
};

struct BitsBF16 {
  static constexpr int STEPS = 4, EXTRA = 0, WORDS = 4, BITS = 16;
  static constexpr bool FLOATING = true;
  M40_INLINE static int offset(int, int) { return 0; }
  template <int P>
  M40_INLINE static void piece(const u32 (&words)[WORDS], u32 (&m)[4]) {
    const u32 a = words[(P & 1) * 2], b = words[(P & 1) * 2 + 1];
    m[0] = a << 16, m[1] = a & 0xffff0000u, m[2] = b << 16, m[3] = b & 0xffff0000u;
  }
};

// --- scale layouts: weight = (n - BIAS) * scale + minimum, for half h of a unit ------------------------------------------
// `raw` are the RAW bytes of the unit in the scales plane, `super` the SUPER bytes of its 256 weights. The products are
// rounded as the file format's reference does, never fused.

struct Affine {
  float scale, minimum;
};

struct NoScale {
  static constexpr int RAW = 0, SUPER = 0, HALVES = 1;
  static constexpr bool MINIMUM = false;
  M40_INLINE static Affine affine(u32, u32, int) { return {1.f, 0.f}; }
};

struct Half32 {  // one float16 per 32
  static constexpr int RAW = 2, SUPER = 0, HALVES = 1;
  static constexpr bool MINIMUM = false;
  M40_INLINE static Affine affine(u32 raw, u32, int) { return {half_bits(raw), 0.f}; }
};

struct HalfPair32 {  // float16 scale and minimum per 32
  static constexpr int RAW = 4, SUPER = 0, HALVES = 1;
  static constexpr bool MINIMUM = true;
  M40_INLINE static Affine affine(u32 raw, u32, int) { return {half_bits(raw & 0xffffu), half_bits(raw >> 16)}; }
};

struct BytePair32 {  // unsigned bytes scale, minimum per 32; float16 d, dmin per 256
  static constexpr int RAW = 2, SUPER = 4, HALVES = 1;
  static constexpr bool MINIMUM = true;
  M40_INLINE static Affine affine(u32 raw, u32 super, int) {
    return {__fmul_rn(half_bits(super & 0xffffu), (float)(raw & 255u)), -__fmul_rn(half_bits(super >> 16), (float)(raw >> 8))};
  }
};

struct Byte16 {  // signed byte per 16; float16 d per 256
  static constexpr int RAW = 2, SUPER = 2, HALVES = 2;
  static constexpr bool MINIMUM = false;
  M40_INLINE static Affine affine(u32 raw, u32 super, int h) {
    return {__fmul_rn((float)(signed char)(raw >> 8 * h), half_bits(super)), 0.f};
  }
};

struct NibblePair16 {  // 4-bit scale (low) and minimum per 16; float16 d, dmin per 256
  static constexpr int RAW = 2, SUPER = 4, HALVES = 2;
  static constexpr bool MINIMUM = true;
  M40_INLINE static Affine affine(u32 raw, u32 super, int h) {
    const u32 pair = raw >> 8 * h;
    return {__fmul_rn(half_bits(super & 0xffffu), (float)(pair & 15u)), -__fmul_rn(half_bits(super >> 16), (float)(pair >> 4 & 15u))};
  }
};

// --- formats: one line per tensor type -----------------------------------------------------------------------------------

template <int ID_, class Bits_, class Scale_, int BIAS_>
struct Format {
  typedef Bits_ Bits;
  typedef Scale_ Scale;
  static constexpr int ID = ID_;  // the GGML type's number
  static constexpr int BIAS = BIAS_;
  static constexpr bool FLOATING = Bits::FLOATING;
  static constexpr int UNIT_BYTES = 16 * Bits::STEPS + Bits::EXTRA;
};

typedef Format<0, BitsF32, NoScale, 0> F32;
typedef Format<1, BitsF16, NoScale, 0> F16;
typedef Format<30, BitsBF16, NoScale, 0> BF16;
typedef Format<2, Bits4, Half32, 8> Q4_0;
typedef Format<3, Bits4, HalfPair32, 0> Q4_1;
typedef Format<6, Bits5, Half32, 16> Q5_0;
typedef Format<7, Bits5, HalfPair32, 0> Q5_1;
typedef Format<8, Bits8, Half32, 128> Q8_0;  // also IQ4_NL, whose code book has 8-bit values
typedef Format<10, Bits4, NibblePair16, 0> Q2_K;
typedef Format<11, Bits4, Byte16, 4> Q3_K;
typedef Format<12, Bits4, BytePair32, 0> Q4_K;
typedef Format<13, Bits5, BytePair32, 0> Q5_K;
typedef Format<14, Bits6, Byte16, 32> Q6_K;
typedef Format<23, Bits8, Byte16, 128> IQ4_XS;  // the same code book, scaled per 16

// --- a matrix in memory --------------------------------------------------------------------------------------------------

// One group of four rows. Offsets within it fit 32 bits: K is at most 2^24 (pack.py).
template <class F>
struct Group {
  const u8* base;
  int units;  // of a row: ceil(K / 32)

  M40_INLINE static int bytes(int units) {
    return (4 * units * (F::UNIT_BYTES + F::Scale::RAW) + 4 * (units >> 3) * F::Scale::SUPER + 15) & ~15;
  }
  M40_INLINE Group(const u8* matrix, int group, int columns) : units((columns + 31) >> 5) {
    base = matrix + (size_t)((u32)group * ((u32)bytes(units) / 16)) * 16;  // fewer instructions: up to 64 GB
  }
  M40_INLINE int chunk_units(int unit) const { return min(32, units - (unit & ~31)); }
  M40_INLINE const u8* scales(int unit) const { return base + ((u32)units * (4 * F::UNIT_BYTES) + (u32)unit * (4 * F::Scale::RAW)); }
  M40_INLINE const u8* supers(int unit) const {
    return base + ((u32)units * (4 * (F::UNIT_BYTES + F::Scale::RAW)) + ((u32)unit >> 3) * (4 * F::Scale::SUPER));
  }
};

// Where a unit's bytes of row 0 lie, and how far it is to the next row.
template <class F>
struct UnitPlace {
  const u8* main;
  u32 main_pitch;
  const u8* extra;
  u32 extra_pitch;

  M40_INLINE UnitPlace(const Group<F>& w, int unit)
      : UnitPlace(w.base + (u32)(unit & ~31) * (4 * F::UNIT_BYTES), w.chunk_units(unit), unit & 31) {}
  // Unit `lane` of a chunk of `width` units.
  M40_INLINE UnitPlace(const u8* chunk, u32 width, u32 lane) {
    main = chunk + lane * 16;
    main_pitch = width * 16;
    extra = chunk + width * (64 * F::Bits::STEPS) + lane * F::Bits::EXTRA;
    extra_pitch = width * F::Bits::EXTRA;
  }
};

// Words of one step of a unit.
template <class F, int STEP>
M40_INLINE void load_words(const UnitPlace<F>& at, int row, u32 (&words)[F::Bits::WORDS]) {
  const uint4 q = __ldg(reinterpret_cast<const uint4*>(at.main + (u32)(STEP * 4 + row) * at.main_pitch));
  words[0] = q.x, words[1] = q.y, words[2] = q.z, words[3] = q.w;
  const u8* extra = at.extra + (u32)row * at.extra_pitch;
  if constexpr (F::Bits::EXTRA == 4) words[4] = __ldg(reinterpret_cast<const u32*>(extra));
  if constexpr (F::Bits::EXTRA == 8) {
    const uint2 e = __ldg(reinterpret_cast<const uint2*>(extra));
    words[4] = e.x, words[5] = e.y;
  }
}

// Raw or super bits of one row.
template <int BYTES>
M40_INLINE u32 load_bits(const u8* of_four_rows, int row) {
  if constexpr (BYTES == 2) return __ldg(reinterpret_cast<const u16*>(of_four_rows) + row);
  if constexpr (BYTES == 4) return __ldg(reinterpret_cast<const u32*>(of_four_rows) + row);
  return 0;
}

// The 32 weights of a unit of row 0..3 of a group, exactly as the file format defines them: sink(Int<P>(), float4) for each piece.
template <class F, class Sink>
M40_INLINE void decode_unit(const Group<F>& w, int row, int unit, Sink sink) {
  typedef typename F::Bits Bits;
  const UnitPlace<F> place(w, unit);
  const u32 raw = load_bits<F::Scale::RAW>(w.scales(unit), row), super = load_bits<F::Scale::SUPER>(w.supers(unit), row);
  static_for<0, Bits::STEPS>([&](auto s) {
    constexpr int S = decltype(s)::value, PIECES = 8 / Bits::STEPS;
    u32 words[Bits::WORDS];
    load_words<F, S>(place, row, words);
    static_for<S * PIECES, (S + 1) * PIECES>([&](auto p) {
      constexpr int P = decltype(p)::value;
      u32 m[4];
      Bits::template piece<P>(words, m);
      float v[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        if constexpr (F::FLOATING) {
          v[c] = as_float(m[c]);
        } else {
          const Affine a = F::Scale::affine(raw, super, F::Scale::HALVES == 2 ? P >> 2 : 0);
          v[c] = __fmul_rn((float)((int)(m[c] >> Bits::offset(P, c)) - F::BIAS), a.scale);
          if constexpr (F::Scale::MINIMUM) v[c] = __fadd_rn(v[c], a.minimum);
        }
      }
      sink(p, make_float4(v[0], v[1], v[2], v[3]));
    });
  });
}
