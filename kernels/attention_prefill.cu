// Causal attention of segments of several query tokens over the FP16 cache (prefill), packed, grouped queries.
//
//   attention_prefill_hd<HD>  q (T, H, HD) float32, cache [slot][position][kv_head][HD] -> out (T, H, HD) float32
//
// Token i of a segment stands at position kv_len - rows + i and attends to the `window` positions up to its own (all if
// window is 0), also those of earlier steps. Segments of one row are left to the decode kernel.
//
// Grid: (ceil(longest / tokens), KH, S) with tokens = ROWS / group; block: 128. A block takes a tile of tokens with all
// query heads of one KV head, ROWS rows in all, so K and V are read once per tile of tokens and KV head; ROWS is 64 for HD
// 64 and 32 otherwise, group at most ROWS. Keys come in tiles of 32, their elements in chunks of 64 as float32 in
// shared memory, fetched one chunk ahead in registers. Thread (ty, tx) of 16 x 8 owns rows ty + 16 i: of the scores keys
// tx + 8 j, of the output elements 4 tx and 4 tx + 32 of every chunk. Softmax is online.
// Shared memory: 34.5 KB (HD 64), 29.5 KB (128), 45.5 KB (256).
#include <cuda_fp16.h>

#include "warp.cuh"

#define PREFILL_THREADS 128  // a macro: launch bounds are read from the source
constexpr int PREFILL_KEYS = 32;
constexpr int CHUNK = 64;                    // elements of a key at a time
constexpr int CHUNK_PITCH = CHUNK / 4 + 1;   // in float4: eight keys' loads meet eight different bank groups
constexpr int WEIGHT_PITCH = PREFILL_KEYS + 8;  // the four rows of a warp's store meet different banks
constexpr float NOTHING = -1e30f;

template <int HD, int ROWS>
__device__ __forceinline__ void attention_prefill(const float* q, const __half* k, const __half* v, const int* cu_seqlens_q,
                                                  const int* kv_lens, const int* slots, float* out, long long slot_stride,
                                                  int group, int window, float scale) {
  constexpr int MINE = ROWS / 16;  // rows of a thread
  constexpr int CHUNKS = HD / CHUNK;
  constexpr int FETCHES = PREFILL_KEYS * CHUNK / 4 / PREFILL_THREADS;
  __shared__ float4 queries[ROWS * HD / 4];
  __shared__ float4 chunk[PREFILL_KEYS * CHUNK_PITCH];
  __shared__ float4 weights[ROWS * WEIGHT_PITCH / 4];

  const int s = blockIdx.z, row0 = cu_seqlens_q[s], rows = cu_seqlens_q[s + 1] - row0;
  const int tokens = ROWS / group;
  const int token0 = (int)(gridDim.x - 1 - blockIdx.x) * tokens;  // the longest tiles first
  if (rows == 1 || token0 >= rows) return;
  const int kv_head = blockIdx.y, KH = gridDim.y, H = KH * group, stride = KH * HD;
  const int start = kv_lens[s] - rows;  // position of the segment's first token
  const int last = start + min(token0 + tokens, rows) - 1;
  const int oldest = window > 0 ? max(0, start + token0 - window + 1) : 0;
  const size_t base = (size_t)slots[s] * slot_stride + kv_head * HD;
  k += base;
  v += base;
  const int tid = threadIdx.x, tx = tid & 7, ty = tid >> 3;

  // exp2 instead of exp: the factor is folded into q once
  const float q_scale = scale * 1.4426950408889634f;
  for (int i = tid; i < ROWS * HD / 4; i += PREFILL_THREADS) {
    const int row = i / (HD / 4), token = min(token0 + row / group, rows - 1), head = kv_head * group + row % group;
    const float4 x = reinterpret_cast<const float4*>(q + ((size_t)(row0 + token) * H + head) * HD)[i % (HD / 4)];
    queries[i] = make_float4(x.x * q_scale, x.y * q_scale, x.z * q_scale, x.w * q_scale);
  }

  int newest[MINE];  // key that the row may see
  float maximum[MINE], total[MINE], acc[CHUNKS][MINE][8];
#pragma unroll
  for (int r = 0; r < MINE; r++) {
    newest[r] = start + token0 + (ty + 16 * r) / group;
    maximum[r] = NOTHING;
    total[r] = 0.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int i = 0; i < 8; i++) acc[c][r][i] = 0.f;
  }

  uint2 fetched[FETCHES];
  const auto fetch = [&](const __half* cache, int tile, int c) {
#pragma unroll
    for (int i = 0; i < FETCHES; i++) {
      const int index = tid + i * PREFILL_THREADS, key = min(tile + index / (CHUNK / 4), last);
      fetched[i] = *reinterpret_cast<const uint2*>(cache + (size_t)key * stride + c * CHUNK + index % (CHUNK / 4) * 4);
    }
  };
  const auto publish = [&]() {
    __syncthreads();  // nobody reads the previous chunk any more
#pragma unroll
    for (int i = 0; i < FETCHES; i++) {
      const int index = tid + i * PREFILL_THREADS;
      const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&fetched[i].x));
      const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&fetched[i].y));
      chunk[index / (CHUNK / 4) * CHUNK_PITCH + index % (CHUNK / 4)] = make_float4(low.x, low.y, high.x, high.y);
    }
    __syncthreads();
  };

  const int first_tile = oldest / PREFILL_KEYS * PREFILL_KEYS;
  fetch(k, first_tile, 0);
  for (int tile = first_tile; tile <= last; tile += PREFILL_KEYS) {
    float score[MINE][4];
#pragma unroll
    for (int r = 0; r < MINE; r++)
#pragma unroll
      for (int j = 0; j < 4; j++) score[r][j] = 0.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      publish();
      if (c + 1 < CHUNKS) fetch(k, tile, c + 1);
      else fetch(v, tile, 0);
#pragma unroll 4
      for (int d = 0; d < CHUNK / 4; d++) {
        float4 a[MINE], b[4];
#pragma unroll
        for (int r = 0; r < MINE; r++) a[r] = queries[(ty + 16 * r) * (HD / 4) + c * (CHUNK / 4) + d];
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = chunk[(tx + 8 * j) * CHUNK_PITCH + d];
#pragma unroll
        for (int r = 0; r < MINE; r++)
#pragma unroll
          for (int j = 0; j < 4; j++)
            score[r][j] += a[r].x * b[j].x + a[r].y * b[j].y + a[r].z * b[j].z + a[r].w * b[j].w;
      }
    }

#pragma unroll
    for (int r = 0; r < MINE; r++) {
      bool seen[4];
      float highest = maximum[r];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int key = tile + tx + 8 * j;
        seen[j] = key <= newest[r] && key <= last && (window <= 0 || key > newest[r] - window);
        if (seen[j]) highest = fmaxf(highest, score[r][j]);
      }
#pragma unroll
      for (int offset = 1; offset < 8; offset <<= 1)
        highest = fmaxf(highest, __shfl_xor_sync(M40_EVERYONE, highest, offset));
      const float keep = exp2f(maximum[r] - highest);
      maximum[r] = highest;
      total[r] *= keep;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < 8; i++) acc[c][r][i] *= keep;
      float* row = reinterpret_cast<float*>(weights) + (ty + 16 * r) * WEIGHT_PITCH;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float weight = seen[j] ? exp2f(score[r][j] - highest) : 0.f;
        total[r] += weight;
        row[tx + 8 * j] = weight;
      }
    }

#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      publish();  // the weights too
      if (c + 1 < CHUNKS) fetch(v, tile, c + 1);
      else if (tile + PREFILL_KEYS <= last) fetch(k, tile + PREFILL_KEYS, 0);
#pragma unroll 2
      for (int key = 0; key < PREFILL_KEYS; key += 4) {
        float4 w[MINE];
#pragma unroll
        for (int r = 0; r < MINE; r++) w[r] = weights[((ty + 16 * r) * WEIGHT_PITCH + key) / 4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float4 a = chunk[(key + j) * CHUNK_PITCH + tx], b = chunk[(key + j) * CHUNK_PITCH + tx + 8];
#pragma unroll
          for (int r = 0; r < MINE; r++) {
            const float weight = j == 0 ? w[r].x : j == 1 ? w[r].y : j == 2 ? w[r].z : w[r].w;
            acc[c][r][0] += weight * a.x;
            acc[c][r][1] += weight * a.y;
            acc[c][r][2] += weight * a.z;
            acc[c][r][3] += weight * a.w;
            acc[c][r][4] += weight * b.x;
            acc[c][r][5] += weight * b.y;
            acc[c][r][6] += weight * b.z;
            acc[c][r][7] += weight * b.w;
          }
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < MINE; r++) {
#pragma unroll
    for (int offset = 1; offset < 8; offset <<= 1) total[r] += __shfl_xor_sync(M40_EVERYONE, total[r], offset);
    const int row = ty + 16 * r, token = token0 + row / group;
    if (row >= tokens * group || token >= rows) continue;
    float4* to = reinterpret_cast<float4*>(out + ((size_t)(row0 + token) * H + kv_head * group + row % group) * HD);
    const float scale_out = 1.f / total[r];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const float* a = acc[c][r];
      to[c * (CHUNK / 4) + tx] = make_float4(a[0] * scale_out, a[1] * scale_out, a[2] * scale_out, a[3] * scale_out);
      to[c * (CHUNK / 4) + tx + 8] = make_float4(a[4] * scale_out, a[5] * scale_out, a[6] * scale_out, a[7] * scale_out);
    }
  }
}

#define ATTENTION_PREFILL(HD, ROWS)                                                                                          \
  extern "C" __global__ void __launch_bounds__(PREFILL_THREADS)                                                              \
  attention_prefill_hd##HD(const float* q, const __half* k, const __half* v, const int* cu_seqlens_q, const int* kv_lens,    \
                           const int* slots, float* out, long long slot_stride, int group, int window, float scale) {        \
    attention_prefill<HD, ROWS>(q, k, v, cu_seqlens_q, kv_lens, slots, out, slot_stride, group, window, scale);              \
  }

ATTENTION_PREFILL(64, 64)
ATTENTION_PREFILL(128, 32)
ATTENTION_PREFILL(256, 32)
