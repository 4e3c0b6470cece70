// The x of a projection of a few rows in shared memory: brought there, permuted and scaled, or copied where its producer has
// staged it (staged.cuh).
#pragma once
#include "staged.cuh"

constexpr int PROJECT_WARPS = 8;
constexpr int PROJECT_THREADS = 32 * PROJECT_WARPS;
// Pieces of a chunk are 33 float4 apart: staging writes one unit's eight pieces at once, without a bank conflict.
constexpr int PIECE_PITCH = 33;

template <class F, int BATCH>
struct Scaling {
  static constexpr bool EARLY = scales_early(BATCH) && !F::FLOATING;
  static constexpr int X = EARLY ? 0 : X_EXPONENT, WEIGHT = EARLY ? X_EXPONENT : 0;
};

// The same value, but the compiler does not know: what is computed from it is computed again, instead of being kept in
// registers while weights are multiplied.
M40_INLINE int again(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <int BATCH>
struct Staged {
  // Chunks of 1024 columns that are in shared memory at once: 17 KB for one row, 34 KB for more.
  static constexpr int CHUNKS = BATCH == 1 ? 4 : 8 / BATCH;
  struct Chunk {
    float4 x[BATCH][8 * PIECE_PITCH];  // by slot (staged.cuh)
    float sums[BATCH * 2 * 32];        // of a unit, or of its halves
  } chunks[CHUNKS];
  float gate[PROJECT_THREADS];  // each thread's own: a register less while the second matrix is multiplied
};

// Columns [first_column, ...) of the x rows of batch blockIdx.y into shared memory, as many as there is room for; zeros
// beyond x. One pass of the block per chunk and row: thread = (unit, piece).
template <class F, int BATCH>
M40_INLINE void stage(Staged<BATCH>& shared, const float* x, int rows, int columns, int first_column) {
  typedef typename F::Bits Bits;
  const int thread = again(threadIdx.x), unit = thread >> 3, piece = thread & 7;
  if (BATCH == 1) {
    rows = 1;
  } else {
    const int first_row = again(blockIdx.y) * BATCH;
    rows -= first_row;
    x += (size_t)first_row * columns;
  }
  constexpr int HALVES = F::Scale::HALVES;
  float place[4];
#pragma unroll
  for (int c = 0; c < 4; c++) place[c] = F::FLOATING ? 1.f : power_of_two(Scaling<F, BATCH>::X - Bits::offset(piece, c));
  const int k = first_column + unit * 32 + piece * 4;
  const int chunks = min(staged_chunks(columns - first_column), Staged<BATCH>::CHUNKS);
  const bool whole = !F::FLOATING || (columns & 3) == 0;  // otherwise rows are not aligned to 16 bytes
  constexpr int AT_ONCE = BATCH < 4 ? BATCH : 4;  // rows: their loads are under way together
#pragma unroll(BATCH == 1 ? 4 : 1)
  for (int i = 0; i < chunks * (BATCH / AT_ONCE); i++) {
    const int chunk = i / (BATCH / AT_ONCE), first = i % (BATCH / AT_ONCE) * AT_ONCE;
    const float* from = x + (size_t)first * columns + k + chunk * 1024;
    const int left = columns - (k + chunk * 1024);
    float4 v[AT_ONCE];
    float sums[AT_ONCE];
#pragma unroll
    for (int b = 0; b < AT_ONCE; b++, from += columns) {
      v[b] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (first + b >= rows) continue;
      if (whole) {
        if (left > 0) v[b] = __ldg(reinterpret_cast<const float4*>(from));
      } else {
        if (left > 0) v[b].x = from[0];
        if (left > 1) v[b].y = from[1];
        if (left > 2) v[b].z = from[2];
        if (left > 3) v[b].w = from[3];
      }
    }
#pragma unroll
    for (int b = 0; b < AT_ONCE; b++) {
      sums[b] = (v[b].x + v[b].y) + (v[b].z + v[b].w);
      shared.chunks[chunk].x[slot_of(first + b, unit, BATCH)][piece * PIECE_PITCH + unit] =
          make_float4(v[b].x * place[0], v[b].y * place[1], v[b].z * place[2], v[b].w * place[3]);
    }
    if constexpr (!F::FLOATING) {
      // Over the lanes of a unit (or half): while a lane still has several rows, it gives half of them away.
      constexpr int LANES = 8 / HALVES;
      int row = first;
#pragma unroll
      for (int mask = LANES / 2, count = AT_ONCE; mask > 0; mask >>= 1, count = (count + 1) / 2) {
        const bool upper = piece & mask;
#pragma unroll
        for (int j = 0; j < (count + 1) / 2; j++) {
          const float sent = count == 1 || upper ? sums[j] : sums[j + count / 2];
          const float kept = count == 1 || !upper ? sums[j] : sums[j + count / 2];
          sums[j] = kept + __shfl_xor_sync(M40_EVERYONE, sent, mask);
        }
        if (count > 1 && upper) row += count / 2;
      }
      if ((piece & (LANES / AT_ONCE - 1)) == 0) {
        shared.chunks[chunk].sums[sum_at(slot_of(row, unit, BATCH), HALVES == 1 ? 0 : piece >> 2, unit, BATCH)] =
            sums[0] * (sum_factor<F>() * power_of_two(-RESULT_EXPONENT));
      }
    }
  }
}

// The same for x that its producer has staged.
template <int BATCH>
M40_INLINE void copy_staged(Staged<BATCH>& shared, const float* staged, int columns, int first_column) {
  constexpr int VALUES = BATCH * STAGED_CHUNK / 4, SUMS = BATCH * STAGED_SUMS / 4;
  const u32 thread = again(threadIdx.x);
  const float4* from = reinterpret_cast<const float4*>(staged) + (((u32)first_column >> 10) * (VALUES + SUMS) + thread);
  constexpr int PITCH = sizeof(shared.chunks[0]) / sizeof(float4);
  float4* to = shared.chunks[0].x[0] + thread + (thread >> 5) * (PIECE_PITCH - 32);
  const int left = columns - first_column;  // at least one
#pragma unroll
  for (int chunk = 0; chunk < Staged<BATCH>::CHUNKS; chunk++) {
    if (chunk > 0 && left <= chunk * STAGED_CHUNK) break;
    float4 v[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) v[b] = __ldg(from + chunk * (VALUES + SUMS) + b * 256);
#pragma unroll
    for (int b = 0; b < BATCH; b++) to[chunk * PITCH + b * 8 * PIECE_PITCH] = v[b];
  }
  const u32 chunk = thread / SUMS;
  if (chunk < Staged<BATCH>::CHUNKS && left > (int)chunk * STAGED_CHUNK) {
    reinterpret_cast<float4*>(shared.chunks[chunk].sums)[thread % SUMS] = __ldg(from + chunk * VALUES + VALUES);
  }
}
