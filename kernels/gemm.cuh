// Projections of many rows: y (T, N) = x (T, K) @ W (N, K)^T in FP32, weights decoded into the tile.
//
// A block of 128 threads computes 64 rows of x times 128 weight rows, a thread 8 x 8 of them. Thread i also decodes weight
// row i of the tile: half a unit (16 columns) per step, into the buffer that nobody reads, while its loads of the next
// step are under way. Tiles lie in shared memory by column, so that both factors are read as float4 without conflicts.
#pragma once
#include "project.cuh"

constexpr int GEMM_ROWS = 64, GEMM_COLUMNS = 128, GEMM_DEPTH = 16, GEMM_THREADS = 128;

struct GemmTiles {
  float x[2][GEMM_DEPTH][GEMM_ROWS];
  float w[2][GEMM_DEPTH][GEMM_COLUMNS];
};

// A thread's 8 columns of x at `k`, zeros beyond.
M40_INLINE void load_x(const float* x, int row, int rows, int k, int columns, float (&v)[8]) {
  const float* from = x + (size_t)row * columns + k;
  if (row < rows && k + 7 < columns && (columns & 3) == 0) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = row < rows && k + i < columns ? from[i] : 0.f;
  }
}

// All words of one row's unit, its scales, and half H of its weights written to column `row` of a tile.
template <class F>
struct UnitWords {
  typedef typename F::Bits Bits;
  u32 words[Bits::STEPS][Bits::WORDS];
  u32 raw, super;

  // Only the half's own steps, where it has any; `row` is the row of the group.
  template <int H>
  M40_INLINE void load(const Group<F>& w, int row, int unit) {
    const UnitPlace<F> place(w, unit);
    constexpr int FROM = Bits::STEPS == 1 ? 0 : H * Bits::STEPS / 2, TO = Bits::STEPS == 1 ? 1 - H : (H + 1) * Bits::STEPS / 2;
    static_for<FROM, TO>([&](auto s) {
      constexpr int S = decltype(s)::value;
      load_words<F, S>(place, row, words[S]);
    });
    if (H == 0) {
      raw = load_bits<F::Scale::RAW>(w.scales(unit), row);
      super = load_bits<F::Scale::SUPER>(w.supers(unit), row);
    }
  }

  template <int H>
  M40_INLINE void store(float (*tile)[GEMM_COLUMNS], int column) const {
    const Affine a = F::Scale::affine(raw, super, F::Scale::HALVES == 2 ? H : 0);
    const float start = power_of_two(-RESULT_EXPONENT) * (F::Scale::MINIMUM ? a.minimum : -(float)F::BIAS * a.scale);
    static_for<0, 4>([&](auto i) {
      constexpr int P = H * 4 + decltype(i)::value;
      u32 m[4];
      Bits::template piece<P>(words[P * Bits::STEPS / 8], m);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float v;
        if constexpr (F::FLOATING) v = as_float(m[c]);
        else v = weight_fma(a.scale * power_of_two(X_EXPONENT - Bits::offset(P, c)), weight_factor(m[c]), start);
        tile[(P & 3) * 4 + c][column] = v;
      }
    });
  }
};

template <class F>
M40_INLINE void gemm(const u8* base, float* y, const float* bias, const float* x, int n, int rows, int columns, int mode) {
  __shared__ __align__(16) GemmTiles tiles;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  // A warp covers 8 x 4 threads: its float4 reads of w are 128 contiguous bytes, those of x four broadcasts.
  const int tx = (warp & 1) * 8 + (lane & 7), ty = (warp >> 1) * 4 + (lane >> 3);
  const int first_row = blockIdx.x * GEMM_ROWS, first_column = blockIdx.y * GEMM_COLUMNS;
  const int weight_row = min(first_column + tid, n - 1), group_row = weight_row & 3;
  const Group<F> w(base, weight_row >> 2, columns);
  const int x_row = first_row + (tid & 63), x_column = (tid >> 6) * 8;

  float acc[8][8];
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) acc[i][j] = 0.f;

  UnitWords<F> unit_words;
  float x_next[8];
  const auto store_x = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < 8; i++) tiles.x[buffer][x_column + i][tid & 63] = x_next[i];
  };
  const auto multiply = [&](int buffer) {
#pragma unroll 4
    for (int k = 0; k < GEMM_DEPTH; k++) {
      const float4* xk = reinterpret_cast<const float4*>(tiles.x[buffer][k]);
      const float4* wk = reinterpret_cast<const float4*>(tiles.w[buffer][k]);
      const float4 x0 = xk[ty], x1 = xk[8 + ty], w0 = wk[tx], w1 = wk[16 + tx];
      const float a[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
      const float b[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
    }
  };

  unit_words.template load<0>(w, group_row, 0);
  load_x(x, x_row, rows, x_column, columns, x_next);
  unit_words.template store<0>(tiles.w[0], tid);
  store_x(0);
  __syncthreads();
#pragma unroll 1
  for (int unit = 0; unit < w.units; unit++) {
    unit_words.template load<1>(w, group_row, unit);
    load_x(x, x_row, rows, unit * 32 + 16 + x_column, columns, x_next);
    multiply(0);
    unit_words.template store<1>(tiles.w[1], tid);
    store_x(1);
    __syncthreads();
    const bool more = unit + 1 < w.units;
    if (more) {
      unit_words.template load<0>(w, group_row, unit + 1);
      load_x(x, x_row, rows, unit * 32 + 32 + x_column, columns, x_next);
    }
    multiply(1);
    if (more) {
      unit_words.template store<0>(tiles.w[0], tid);
      store_x(0);
    }
    __syncthreads();
  }

#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int column = first_column + (j >> 2) * 64 + tx * 4 + (j & 3);
    if (column >= n) continue;
    const float offset = bias ? bias[column] : 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int row = first_row + (i >> 2) * 32 + ty * 4 + (i & 3);
      if (row >= rows) continue;
      float* out = y + (size_t)row * n + column;
      float value = acc[i][j] * (F::FLOATING ? 1.f : power_of_two(RESULT_EXPONENT)) + offset;
      if (mode == PROJECT_ADD) value += *out;
      if (mode == PROJECT_GATE) value *= silu(*out);
      *out = value;
    }
  }
}

// gemm_<name> for a matrix of the given format.
#define M40_GEMM(NAME, FORMAT)                                                                                          \
  extern "C" __global__ void __launch_bounds__(128, 3) gemm_##NAME(                                                     \
      const unsigned char* __restrict__ w, float* y, const float* __restrict__ bias, const float* __restrict__ x, int n, \
      int rows, int columns, int mode) {                                                                                \
    gemm<FORMAT>(w, y, bias, x, n, rows, columns, mode);                                                                \
  }
