// Projections of a few rows: y (T, N) = x (T, K) @ W (N, K)^T, bound by the reading of W.
//
// A warp owns a group of four weight rows and gives each lane a unit of 32 weights of them; 8 warps share x in shared
// memory, in segments, each x already multiplied by the power of two that its weight's place asks for (formats.cuh).
// BATCH rows of x are served by one unpacking; blockIdx.y counts batches. Up to three matrices (Q, K, V) share a launch:
// a block belongs to one of them, and where types are mixed it branches to its type once.
#pragma once
#include "formats.cuh"

constexpr int PROJECT_WARPS = 8;
constexpr int PROJECT_THREADS = 32 * PROJECT_WARPS;
// Pieces of a chunk are 33 float4 apart: staging writes one unit's eight pieces at once, without a bank conflict.
constexpr int PIECE_PITCH = 33;

enum ProjectMode { PROJECT_STORE, PROJECT_ADD, PROJECT_GATE, PROJECT_SWIGLU };

M40_INLINE float silu(float x) { return x / (1.f + expf(-x)); }

// From 8 rows on, a weight is multiplied by its scale as it is unpacked: one instruction more per weight, but no second set
// of 4 * BATCH accumulators for the sums that still await their scale.
template <class F, int BATCH>
struct Scaling {
  static constexpr bool EARLY = BATCH > 4 && !F::FLOATING;
  static constexpr int X = EARLY ? 0 : X_EXPONENT, WEIGHT = EARLY ? X_EXPONENT : 0;
};

template <int BATCH>
struct Staged {
  // Chunks of 1024 columns that are in shared memory at once: 17 KB for one row, 34 KB for more.
  static constexpr int CHUNKS = BATCH == 1 ? 4 : 8 / BATCH;
  float4 x[CHUNKS][BATCH][8 * PIECE_PITCH];
  float sums[CHUNKS][BATCH][2 * 32];  // of a unit, or of its halves
};

// Columns [32 * first_unit, ...) of x rows [row, row + BATCH) into shared memory; zeros beyond x. One pass of the block
// per chunk and row: thread = (unit, piece).
template <class F, int BATCH>
M40_INLINE void stage(Staged<BATCH>& shared, const float* x, int rows, int columns, int first_unit, int chunks) {
  typedef typename F::Bits Bits;
  const int unit = threadIdx.x >> 3, piece = threadIdx.x & 7;
  constexpr int HALVES = F::Scale::HALVES;
  float place[4];
#pragma unroll
  for (int c = 0; c < 4; c++) place[c] = F::FLOATING ? 1.f : power_of_two(Scaling<F, BATCH>::X - Bits::offset(piece, c));
  // The accumulators start at -BIAS * sum; where there is a minimum, it is multiplied by the sum.
  constexpr float sum_factor = F::Scale::MINIMUM ? 1.f : -(float)F::BIAS;
#pragma unroll 1
  for (int i = 0; i < chunks * BATCH; i++) {
    const int chunk = i / BATCH, b = i % BATCH;
    const int k = (first_unit + chunk * 32 + unit) * 32 + piece * 4;
    const float* from = x + (size_t)b * columns + k;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (b < rows) {
      if (k + 3 < columns && (columns & 3) == 0) {
        v = __ldg(reinterpret_cast<const float4*>(from));
      } else {
        if (k < columns) v.x = from[0];
        if (k + 1 < columns) v.y = from[1];
        if (k + 2 < columns) v.z = from[2];
        if (k + 3 < columns) v.w = from[3];
      }
    }
    shared.x[chunk][b][piece * PIECE_PITCH + unit] = make_float4(v.x * place[0], v.y * place[1], v.z * place[2], v.w * place[3]);
    if constexpr (!F::FLOATING) {
      float sum = (v.x + v.y) + (v.z + v.w);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if constexpr (HALVES == 1) sum += __shfl_xor_sync(0xffffffffu, sum, 4);
      if ((piece & (HALVES == 1 ? 7 : 3)) == 0) {
        shared.sums[chunk][b][(HALVES == 1 ? 0 : piece >> 2) * 32 + unit] = sum * (sum_factor * power_of_two(-RESULT_EXPONENT));
      }
    }
  }
}

// Bits of four rows' scales or supers, brought by one load.
template <int BYTES>
struct FourRows {
  uint4 v;
  M40_INLINE FourRows(const u8* at) {
    if constexpr (BYTES == 4) v = __ldg(reinterpret_cast<const uint4*>(at));
    if constexpr (BYTES == 2) {
      const uint2 pair = __ldg(reinterpret_cast<const uint2*>(at));
      v = make_uint4(pair.x, pair.y, 0u, 0u);
    }
    if constexpr (BYTES == 0) v = make_uint4(0u, 0u, 0u, 0u);
  }
  template <int ROW>
  M40_INLINE u32 row() const {
    if constexpr (BYTES == 4) return ROW == 0 ? v.x : ROW == 1 ? v.y : ROW == 2 ? v.z : v.w;
    const u32 pair = ROW < 2 ? v.x : v.y;
    return ROW & 1 ? pair >> 16 : pair & 0xffffu;
  }
};

// acc[4 * b + r] += this lane's share of row r of the group times row b of x, over the staged units [begin, end).
template <class F, int BATCH>
M40_INLINE void accumulate(const Group<F>& w, int begin, int end, const Staged<BATCH>& shared, float (&acc)[4 * BATCH]) {
  typedef typename F::Bits Bits;
  typedef typename F::Scale Scale;
  constexpr int PIECES = 8 / Bits::STEPS;
  // Low and high nibbles of a word are pieces P and P + 4: neighbours in this order, unless halves are scaled apart.
  constexpr bool EARLY = Scaling<F, BATCH>::EARLY;
  constexpr bool PAIRED = Bits::BITS == 4 && Scale::HALVES == 1;
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int unit = begin + lane; unit < end; unit += 32) {
    const int width = w.chunk_units(unit), local = (unit - begin) >> 5;
    const u8* chunk = w.chunk(unit);
    const float4* x = shared.x[local][0] + lane;
    const float* sums = shared.sums[local][0] + lane;
    const FourRows<Scale::RAW> raw(w.scales(unit));
    const FourRows<Scale::SUPER> super(w.supers(unit));
    float part[4 * BATCH], early[4];
    static_for<0, Bits::STEPS>([&](auto s) {
      constexpr int S = decltype(s)::value;
      u32 words[4][Bits::WORDS];
#pragma unroll
      for (int r = 0; r < 4; r++) load_words<F, S>(chunk, width, r, lane, words[r]);
      static_for<0, PIECES>([&](auto i) {
        constexpr int I = decltype(i)::value, P = PAIRED ? (I >> 1) + 4 * (I & 1) : S * PIECES + I;
        constexpr int HALF = Scale::HALVES == 2 ? P >> 2 : 0;
        constexpr bool FIRST = I + S == 0 || (Scale::HALVES == 2 && P == 4);
        constexpr bool LAST = I + S * PIECES == 7 || (Scale::HALVES == 2 && P == 3);
        if constexpr (FIRST && EARLY) {
          static_for<0, 4>([&](auto r) {
            constexpr int R = decltype(r)::value;
            const Affine a = Scale::affine(raw.template row<R>(), super.template row<R>(), HALF);
            early[R] = a.scale * power_of_two(Scaling<F, BATCH>::WEIGHT);
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
              acc[4 * b + R] = fmaf(Scale::MINIMUM ? a.minimum : a.scale, sums[b * 64 + HALF * 32], acc[4 * b + R]);
            }
          });
        } else if constexpr (FIRST && !F::FLOATING) {
#pragma unroll
          for (int b = 0; b < BATCH; b++) {
            const float start = Scale::MINIMUM ? 0.f : sums[b * 64 + HALF * 32];
#pragma unroll
            for (int r = 0; r < 4; r++) part[4 * b + r] = start;
          }
        }
        float weights[4][4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
          u32 m[4];
          Bits::template piece<P>(words[r], m);
#pragma unroll
          for (int c = 0; c < 4; c++) {
            weights[r][c] = F::FLOATING ? as_float(m[c]) : weight_factor(m[c]);
            if constexpr (EARLY) weights[r][c] = weight_fma(early[r], weights[r][c], 0.f);
          }
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
          const float4 v4 = x[(b * 8 + P) * PIECE_PITCH];
          const float v[4] = {v4.x, v4.y, v4.z, v4.w};
#pragma unroll
          for (int r = 0; r < 4; r++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
              if constexpr (F::FLOATING || EARLY) acc[4 * b + r] = fmaf(v[c], weights[r][c], acc[4 * b + r]);
              else part[4 * b + r] = weight_fma(v[c], weights[r][c], part[4 * b + r]);
            }
          }
        }
        if constexpr (LAST && !F::FLOATING && !EARLY) {
          static_for<0, 4>([&](auto r) {
            constexpr int R = decltype(r)::value;
            const Affine a = Scale::affine(raw.template row<R>(), super.template row<R>(), HALF);
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
              if constexpr (Scale::MINIMUM) acc[4 * b + R] = fmaf(a.minimum, sums[b * 64 + HALF * 32], acc[4 * b + R]);
              acc[4 * b + R] = fmaf(a.scale, part[4 * b + R], acc[4 * b + R]);
            }
          });
        }
      });
    });
  }
}

// Sum over the warp of each of the COUNT values (a power of two up to 32). Lane l gets value l / (32 / COUNT): half of the
// values change hands at each step, so 31 shuffles add up 32 values.
template <int COUNT, int MASK = 16>
M40_INLINE float scattered_sum(float (&v)[COUNT]) {
  if constexpr (COUNT > 1) {
    const bool upper = threadIdx.x & MASK;
    float kept[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
      kept[i] = (upper ? v[i + COUNT / 2] : v[i]) + __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + COUNT / 2], MASK);
    }
    return scattered_sum<COUNT / 2, MASK / 2>(kept);
  } else {
    float sum = v[0];
#pragma unroll
    for (int mask = MASK; mask > 0; mask >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    return sum;
  }
}

// This lane's dot product: of weight row 4 * group + (index & 3) with x row index >> 2, index = lane / (32 / (4 * BATCH)).
// `staged`: shared memory already holds all of x for this format.
template <class F, int BATCH>
M40_INLINE float dot(Staged<BATCH>& shared, const u8* base, int n, const float* x, int rows, int columns, int group, bool staged) {
  const Group<F> w(base, group, columns);
  float acc[4 * BATCH];
#pragma unroll
  for (int i = 0; i < 4 * BATCH; i++) acc[i] = 0.f;
#pragma unroll 1
  for (int begin = 0; begin < w.units; begin += 32 * Staged<BATCH>::CHUNKS) {
    const int end = min(w.units, begin + 32 * Staged<BATCH>::CHUNKS);
    if (!staged) {
      __syncthreads();  // nobody reads the previous segment any more
      stage<F, BATCH>(shared, x, rows, columns, begin, (end - begin + 31) >> 5);
      __syncthreads();
    }
    if (4 * group < n) accumulate<F, BATCH>(w, begin, end, shared, acc);
  }
  const float sum = scattered_sum<4 * BATCH>(acc);
  return F::FLOATING ? sum : sum * power_of_two(RESULT_EXPONENT);
}

// dot() of the format whose number is `type`; with one format there is nothing to ask.
template <int BATCH, class F, class... Others>
M40_INLINE float dot_of_type(int type, Staged<BATCH>& shared, const u8* base, int n, const float* x, int rows, int columns, int group, bool staged) {
  if constexpr (sizeof...(Others) == 0) {
    return dot<F, BATCH>(shared, base, n, x, rows, columns, group, staged);
  } else {
    if (type == F::ID) return dot<F, BATCH>(shared, base, n, x, rows, columns, group, staged);
    return dot_of_type<BATCH, Others...>(type, shared, base, n, x, rows, columns, group, staged);
  }
}

M40_INLINE int project_blocks(int n) { return (n + 4 * PROJECT_WARPS - 1) / (4 * PROJECT_WARPS); }

template <int BATCH, class... Formats>
M40_INLINE void project(
    const u8* w0, const u8* w1, const u8* w2, float* y0, float* y1, float* y2, const float* bias0, const float* bias1,
    const float* bias2, int n0, int n1, int n2, int type0, int type1, int type2, const float* x, int rows, int columns, int mode) {
  __shared__ Staged<BATCH> shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int first_row = blockIdx.y * BATCH;
  x += (size_t)first_row * columns;
  rows = min(rows - first_row, BATCH);

  int block = blockIdx.x, type = type0, n = n0;
  const u8* w = w0;
  float* y = y0;
  const float* bias = bias0;
  if (mode != PROJECT_SWIGLU) {
    if (block >= project_blocks(n)) {
      block -= project_blocks(n);
      w = w1, y = y1, bias = bias1, n = n1, type = type1;
      if (block >= project_blocks(n)) {
        block -= project_blocks(n);
        w = w2, y = y2, bias = bias2, n = n2, type = type2;
      }
    }
  }
  const int group = block * PROJECT_WARPS + warp;
  // One body for gate and up: a loop keeps the code, and the registers, of the unpacking single.
  float value = 0.f, gate = 0.f;
#pragma unroll 1
  for (int pass = 0; pass < (mode == PROJECT_SWIGLU ? 2 : 1); pass++) {
    const bool staged = pass == 1 && type0 == type1 && columns <= 1024 * Staged<BATCH>::CHUNKS;
    gate = value;
    value = dot_of_type<BATCH, Formats...>(pass ? type1 : type, shared, pass ? w1 : w, n, x, rows, columns, group, staged);
  }

  constexpr int LANES = 32 / (4 * BATCH);  // that hold the same value
  const int index = lane / LANES, b = index >> 2, row = group * 4 + (index & 3);
  if (lane % LANES != 0 || row >= n || b >= rows) return;
  if (bias) value += bias[row];
  float* out = y + (size_t)(first_row + b) * n + row;
  if (mode == PROJECT_ADD) value += *out;
  if (mode == PROJECT_GATE) value *= silu(*out);
  if (mode == PROJECT_SWIGLU) value *= silu(gate);
  *out = value;
}

#define M40_PROJECT_KERNEL(NAME, BATCH, BLOCKS, ...)                                                                   \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS) project_##NAME##_r##BATCH(                                 \
      const unsigned char* __restrict__ w0, const unsigned char* __restrict__ w1, const unsigned char* __restrict__ w2, \
      float* y0, float* y1, float* y2, const float* __restrict__ bias0, const float* __restrict__ bias1,               \
      const float* __restrict__ bias2, int n0, int n1, int n2, int type0, int type1, int type2,                        \
      const float* __restrict__ x, int rows, int columns, int mode) {                                                  \
    project<BATCH, __VA_ARGS__>(w0, w1, w2, y0, y1, y2, bias0, bias1, bias2, n0, n1, n2, type0, type1, type2, x, rows, \
                                columns, mode);                                                                        \
  }

// project_<name>_r1, _r4, _r8 for matrices of the given formats.
#define M40_PROJECT(NAME, ...)                    \
  M40_PROJECT_KERNEL(NAME, 1, 3, __VA_ARGS__)     \
  M40_PROJECT_KERNEL(NAME, 4, 2, __VA_ARGS__)     \
  M40_PROJECT_KERNEL(NAME, 8, 2, __VA_ARGS__)
