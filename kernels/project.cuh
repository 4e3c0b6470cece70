// Projections of a few rows: y (T, N) = x (T, K) @ W (N, K)^T, bound by the reading of W.
//
// A warp owns a group of four weight rows and gives each lane a unit of 32 weights of them; 8 warps share x in shared
// memory, in segments, each x already multiplied by the power of two that its weight's place asks for (formats.cuh).
// BATCH rows of x are served by one unpacking; blockIdx.y counts batches. Up to three matrices (Q, K, V) share a launch:
// a block belongs to one of them, and where types are mixed it branches to its type once.
#pragma once
#include "project_x.cuh"

// PROJECT_BIASED comes on top of the others, where a matrix has a bias.
enum ProjectMode { PROJECT_STORE, PROJECT_ADD, PROJECT_GATE, PROJECT_SWIGLU, PROJECT_SWIGLU_STAGED, PROJECT_BIASED = 8 };

M40_INLINE float silu(float x) { return x / (1.f + expf(-x)); }

// Before Volta a warp needs nothing to be in step, but ptxas moves no instruction across, which keeps its register count down.
M40_INLINE void scheduling_fence() {
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ < 700
  __syncwarp(__activemask());
#endif
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

// sum += x · weights. An FMA that keeps subnormals: the weights may be some.
M40_INLINE void add_piece(const float4& x, const float (&weights)[4], float& sum) {
  sum = weight_fma(x.x, weights[0], sum);
  sum = weight_fma(x.y, weights[1], sum);
  sum = weight_fma(x.z, weights[2], sum);
  sum = weight_fma(x.w, weights[3], sum);
}

// Where a lane is in a group: pointers that move on by a chunk cost fewer instructions than offsets.
template <class F>
struct Cursor {
  const u8 *chunk, *scale, *super;
  int left;  // units of a row from this chunk on

  M40_INLINE Cursor(const Group<F>& w, int lane) : chunk(w.base), scale(w.scales(lane)), super(w.supers(lane)), left(w.units) {}
  M40_INLINE void advance() {
    chunk += 32 * 4 * F::UNIT_BYTES, scale += 32 * 4 * F::Scale::RAW, super += 4 * 4 * F::Scale::SUPER;
    left -= 32;
  }
};

// acc[4 * b + r] += this lane's share of row r of the group times slot b of x, over the chunks in shared memory.
template <class F, int BATCH>
M40_INLINE void accumulate(Cursor<F>& at, const Staged<BATCH>& shared, float (&acc)[4 * BATCH]) {
  typedef typename F::Bits Bits;
  typedef typename F::Scale Scale;
  constexpr int PIECES = 8 / Bits::STEPS;
  // Low and high nibbles of a word are pieces P and P + 4: neighbours in this order, unless halves are scaled apart.
  constexpr bool EARLY = Scaling<F, BATCH>::EARLY;
  constexpr bool PAIRED = Bits::BITS == 4 && Scale::HALVES == 1;
  // Where ptxas would run out of registers for four rows of x, it may not mix the halves of a unit.
  constexpr bool EASED = BATCH == 4 && Scale::SUPER == 4 && Scale::HALVES == 1 && Bits::BITS == 4;
  const int lane = threadIdx.x & 31;
  const typename Staged<BATCH>::Chunk* chunk = shared.chunks;
  const float4* x = chunk->x[0] + lane;
  // No unit of its own in the last chunk: a lane is done.
  const int least = again(max(lane, at.left - 32 * Staged<BATCH>::CHUNKS));
#pragma unroll 1
  for (; at.left > least; at.advance(), chunk++, x += sizeof(*chunk) / sizeof(*x)) {
    const UnitPlace<F> place(at.chunk, min(32, at.left), lane);
    const FourRows<Scale::RAW> raw(at.scale);
    const FourRows<Scale::SUPER> super(at.super);
    float part[4 * BATCH], scales[4];
    static_for<0, Bits::STEPS>([&](auto s) {
      constexpr int S = decltype(s)::value;
      u32 words[4][Bits::WORDS];
#pragma unroll
      for (int r = 0; r < 4; r++) load_words<F, S>(place, r, words[r]);
      static_for<0, PIECES>([&](auto i) {
        constexpr int I = decltype(i)::value, P = S * PIECES + I;
        constexpr int HALF = Scale::HALVES == 2 ? P >> 2 : 0;
        constexpr bool FIRST = P == 0 || (Scale::HALVES == 2 && P == 4);
        constexpr bool LAST = P == 7 || (Scale::HALVES == 2 && P == 3);
        if constexpr (EASED && P == 4) scheduling_fence();
        if constexpr (FIRST && !F::FLOATING) {
          float sum[BATCH];
          if constexpr (BATCH == 4) {
            const float4 four = x[BATCH * 8 * PIECE_PITCH + HALF * 32];  // behind the values
            sum[0] = four.x, sum[1] = four.y, sum[2] = four.z, sum[3] = four.w;
          } else {
#pragma unroll
            for (int b = 0; b < BATCH; b++) sum[b] = chunk->sums[sum_at(b, HALF, lane, BATCH)];
          }
          static_for<0, 4>([&](auto r) {
            constexpr int R = decltype(r)::value;
            const Affine a = Scale::affine(raw.template row<R>(), super.template row<R>(), HALF);
            scales[R] = a.scale * power_of_two(Scaling<F, BATCH>::WEIGHT);
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
              if constexpr (EARLY || Scale::MINIMUM) {
                acc[4 * b + R] = fmaf(Scale::MINIMUM ? a.minimum : a.scale, sum[b], acc[4 * b + R]);
              }
              if constexpr (!EARLY) part[4 * b + R] = Scale::MINIMUM ? 0.f : sum[b];
            }
          });
        }
        // Two forms of one address: ptxas makes fewer instructions of the first with four rows, of the second with others.
        const auto x_of = [&](int b) { return BATCH == 4 ? x[(b * 8 + P) * PIECE_PITCH] : chunk->x[b][P * PIECE_PITCH + lane]; };
        const auto weights_of = [&](int r, float(&weights)[4]) {
          u32 m[4];
          Bits::template piece<P>(words[r], m);
#pragma unroll
          for (int c = 0; c < 4; c++) {
            weights[c] = F::FLOATING ? as_float(m[c]) : weight_factor(m[c]);
            if constexpr (EARLY) weights[c] = weight_fma(scales[r], weights[c], 0.f);
          }
        };
        // Whichever is fewer stays in registers: the weights of four rows, or x of all rows of the batch.
        if constexpr (BATCH > 4) {
          float weights[4][4];
#pragma unroll
          for (int r = 0; r < 4; r++) weights_of(r, weights[r]);
#pragma unroll
          for (int b = 0; b < BATCH; b++) {
            const float4 v = x_of(b);
#pragma unroll
            for (int r = 0; r < 4; r++) add_piece(v, weights[r], acc[4 * b + r]);
          }
        } else {
          float4 v[BATCH];
#pragma unroll
          for (int b = 0; b < BATCH; b++) v[b] = x_of(b);
#pragma unroll
          for (int r = 0; r < 4; r++) {
            float weights[4];
            weights_of(r, weights);
#pragma unroll
            for (int b = 0; b < BATCH; b++) add_piece(v[b], weights, F::FLOATING ? acc[4 * b + r] : part[4 * b + r]);
          }
        }
        if constexpr (LAST && !F::FLOATING && !EARLY) {
#pragma unroll
          for (int i = 0; i < 4 * BATCH; i++) acc[i] = fmaf(scales[i & 3], part[i], acc[i]);
        }
      });
    });
  }
}

// What a launch multiplies by: rows of x as they are, or staged for its formats (staged.cuh).
struct Input {
  const float* x;
  int rows, columns, staged;
};

// This lane's dot product: of weight row 4 * group + (index & 3) with x row index >> 2, index = lane / (32 / (4 * BATCH)).
// VERSION: of the staged x. `kept`: shared memory already holds all of x for this format.
template <class F, int BATCH, int VERSION>
M40_INLINE float dot(Staged<BATCH>& shared, const u8* base, int n, const Input& in, int group, int kept) {
  const Group<F> w(base, group, in.columns);
  float acc[4 * BATCH];
#pragma unroll
  for (int i = 0; i < 4 * BATCH; i++) acc[i] = 0.f;
  Cursor<F> at(w, threadIdx.x & 31);
  at.left = again(4 * group < n ? w.units : 0);  // a warp beyond the matrix only helps to bring x
  int first = 0;  // column in shared memory
#pragma unroll 1
  for (;;) {
    if (!kept) {
      if (!F::FLOATING && in.staged) {
        copy_staged<BATCH>(shared, in.x + VERSION * staged_floats(in.columns, BATCH), in.columns, first);
      } else {
        stage<F, BATCH>(shared, in.x, in.rows, in.columns, first);
      }
      __syncthreads();
    }
    accumulate<F, BATCH>(at, shared, acc);
    first += Staged<BATCH>::CHUNKS * STAGED_CHUNK;
    if (first >= in.columns) break;
    __syncthreads();  // nobody reads the previous segment any more
  }
  spread_sum<4 * BATCH, 16, 1, BATCH>(acc, threadIdx.x);
  return F::FLOATING ? acc[0] : acc[0] * power_of_two(RESULT_EXPONENT);
}

// dot() of the format whose number is `type`; with one format there is nothing to ask.
template <int BATCH, int VERSION, class F, class... Others>
M40_INLINE float dot_of_type(int type, Staged<BATCH>& shared, const u8* base, int n, const Input& in, int group, int kept) {
  if constexpr (sizeof...(Others) == 0) {
    return dot<F, BATCH, VERSION>(shared, base, n, in, group, kept);
  } else {
    if (type == F::ID) return dot<F, BATCH, VERSION>(shared, base, n, in, group, kept);
    return dot_of_type<BATCH, VERSION + 1, Others...>(type, shared, base, n, in, group, kept);
  }
}

// Which of the launch's matrices a block works on, and which group of its rows a warp. Blocks of the second matrix begin at
// `first1`, those of the third at `first2`; a block has 8 warps with 4 rows each.
struct Job {
  int matrix, group;

  M40_INLINE Job(int block, int warp, int first1, int first2) {
    matrix = block < first1 ? 0 : block < first2 ? 1 : 2;
    group = (block - (matrix == 0 ? 0 : matrix == 1 ? first1 : first2)) * PROJECT_WARPS + warp;
  }
};

template <class T>
M40_INLINE T pick(int matrix, T a, T b, T c) {
  return matrix == 0 ? a : matrix == 1 ? b : c;
}

// With PROJECT_SWIGLU_STAGED y0 is staged for a reader of type `y_type`.
template <int BATCH, class... Formats>
M40_INLINE void project(
    const u8* w0, const u8* w1, const u8* w2, float* y0, float* y1, float* y2, const float* bias0, const float* bias1,
    const float* bias2, int n0, int n1, int n2, int first1, int first2, int type0, int type1, int type2, const Input& in, int mode,
    int y_type) {
  __shared__ Staged<BATCH> shared;
  constexpr bool MIXED = sizeof...(Formats) > 1;
  float value;
  {
    const Job job(blockIdx.x, threadIdx.x >> 5, first1, first2);
    const u8* w = pick(job.matrix, w0, w1, w2);
    const int n = pick(job.matrix, n0, n1, n2);
    int type = MIXED ? pick(job.matrix, type0, type1, type2) : 0, kept = 0;
    // One body for gate and up: a loop keeps the code, and the registers, of the unpacking single.
#pragma unroll 1
    for (int more = mode == PROJECT_SWIGLU || mode == PROJECT_SWIGLU_STAGED;; more = 0) {
      value = dot_of_type<BATCH, 0, Formats...>(type, shared, w, n, in, job.group, kept);
      if (!more) break;
      shared.gate[threadIdx.x] = value;
      w = w1;
      kept = BATCH <= 4 && (!MIXED || type == type1) && in.columns <= 1024 * Staged<BATCH>::CHUNKS;
      type = type1;
      if (!kept) __syncthreads();  // nobody reads x as the first matrix wants it any more
    }
  }

  const int thread = again(threadIdx.x), lane = thread & 31;
  constexpr int LANES = 32 / (4 * BATCH);  // that hold the same value
  const Job job(again(blockIdx.x), thread >> 5, first1, first2);
  const int matrix = job.matrix, n = pick(matrix, n0, n1, n2), row = job.group * 4 + (lane / LANES & 3);
  const int t = (BATCH == 1 ? 0 : blockIdx.y * BATCH) + lane / (4 * LANES);
  if (mode == PROJECT_SWIGLU_STAGED) {
    // The block's 32 rows are a unit of whoever reads them: they meet, and warp t writes them for row t of x.
    value *= silu(shared.gate[thread]);
    __syncthreads();
    if ((lane & (LANES - 1)) == 0) shared.gate[(lane / (4 * LANES)) * 32 + (row & 31)] = value;
    __syncthreads();
    if (thread >> 5 < in.rows) {
      StagedWriter(y0, BATCH, y_type).put1(thread >> 5, blockIdx.x * 32 + lane, shared.gate[thread]);
    }
    return;
  }
  if ((lane & (LANES - 1)) || row >= n || t >= in.rows) return;
  float* out = pick(matrix, y0, y1, y2) + ((u32)t * (u32)n + (u32)row);  // 32 rows at most
  if (mode != PROJECT_STORE) {
    if (mode & PROJECT_BIASED) {
      const float* bias = pick(matrix, bias0, bias1, bias2);
      if (bias) value += bias[row];
    }
    const int how = mode & ~PROJECT_BIASED;
    if (how == PROJECT_ADD) value += *out;
    if (how == PROJECT_GATE) value *= silu(*out);
    if (how == PROJECT_SWIGLU) value *= silu(shared.gate[thread]);
  }
  *out = value;
}

#define M40_PROJECT_KERNEL(NAME, BATCH, BLOCKS, ...)                                                                   \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS) project_##NAME##_r##BATCH(                                 \
      const unsigned char* __restrict__ w0, const unsigned char* __restrict__ w1, const unsigned char* __restrict__ w2, \
      float* y0, float* y1, float* y2, const float* __restrict__ bias0, const float* __restrict__ bias1,               \
      const float* __restrict__ bias2, int n0, int n1, int n2, int first1, int first2, int type0, int type1, int type2, \
      const float* __restrict__ x, int rows, int columns, int mode, int staged, int y_type) {                          \
    project<BATCH, __VA_ARGS__>(w0, w1, w2, y0, y1, y2, bias0, bias1, bias2, n0, n1, n2, first1, first2, type0, type1, \
                                type2, Input{x, rows, columns, staged}, mode, y_type);                                        \
  }

// project_<name>_r1, _r4, _r8 for matrices of the given formats. BLOCKS: blocks of 256 threads that an SM of Maxwell must
// be able to hold: 2 where ptxas manages with 128 registers, 1 where it would spill.
#define M40_PROJECT(NAME, BLOCKS1, BLOCKS4, BLOCKS8, ...) \
  M40_PROJECT_KERNEL(NAME, 1, BLOCKS1, __VA_ARGS__)       \
  M40_PROJECT_KERNEL(NAME, 4, BLOCKS4, __VA_ARGS__)       \
  M40_PROJECT_KERNEL(NAME, 8, BLOCKS8, __VA_ARGS__)
