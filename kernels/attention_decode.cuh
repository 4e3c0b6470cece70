// Attention of segments of one query token over the FP16 cache (decode), grouped queries, KV split over blocks.
//
//   attention_decode_hd<HD>_g<HB>  q (T, H, HD) float32, cache [slot][position][kv_head][HD] -> out (T, H, HD) float32
//
// Softmax is online (Milakov and Gimelshein, 2018), the split over keys that of Flash-Decoding (2023). A segment attends to
// its last `window` positions (all if window is 0). Segments of another length than one row are left alone.
//
// Grid: (KH * ceil(group / HB), splits, S); block: 128. A block takes a share of the keys of one KV head for up to HB query
// heads, so each key is loaded once for all of them. A lane holds 8 elements of a key, HD / 8 lanes a whole one; a warp has
// its own tile of 32 keys and its own running maximum and sum, and meets the other warps only at the end. The number of
// splits, up to 64, is fixed by the step's shape; how many have work follows from the length, which is read on the device.
// Where there are several, each leaves part_out (S, H, splits, HD) and part_stats (S, H, splits): maximum (base 2) and sum
// of the weights; the block that finishes last merges them. `done` (S, grid.x) is zero before the first launch and left so.
// With M40LLM_LDG (module attention_decode_ldg) keys and values come through the read-only cache: an experiment.
#pragma once
#include <cuda_fp16.h>

#include "staged.cuh"
#include "warp.cuh"

#ifdef M40LLM_LDG
#define KV_LOAD(pointer) __ldg(pointer)
#else
#define KV_LOAD(pointer) (*(pointer))
#endif

#define DECODE_THREADS 128  // a macro: launch bounds are read from the source
constexpr int DECODE_WARPS = DECODE_THREADS / 32;
constexpr int DECODE_TILE = 32;                             // keys of a warp at a time
constexpr int DECODE_SHARE = DECODE_WARPS * DECODE_TILE;    // a block's keys are a multiple of this
constexpr int DECODE_SPLITS = 64;                           // at most; their factors fit into what held the sums
constexpr int DECODE_AHEAD = 4;                             // 16-byte loads of a lane in flight
constexpr float NOTHING = -1e30f;                           // a score that weighs nothing; differences of two are numbers

__device__ __forceinline__ int keys_per_split(int visible, int splits) {
  const int even = (visible + splits - 1) / splits;
  return (even + DECODE_SHARE - 1) / DECODE_SHARE * DECODE_SHARE;
}

__device__ __forceinline__ void unpack(uint4 bits, float (&value)[8]) {
  const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    value[2 * i] = pair.x;
    value[2 * i + 1] = pair.y;
  }
}

template <int HD, int HB>
__device__ __forceinline__ void attention_decode(const float* q, const __half* k, const __half* v, const int* cu_seqlens_q,
                                                 const int* kv_lens, const int* slots, float* out, float* part_out,
                                                 float2* part_stats, unsigned* done, long long slot_stride, int KH, int group,
                                                 int window, float scale, int batch, int type) {
  constexpr int LANES = HD / 8;         // of a key
  constexpr int KEYS = 32 / LANES;      // of one load of a warp
  constexpr int STEPS = DECODE_TILE / KEYS;
  constexpr int AHEAD = STEPS < DECODE_AHEAD ? STEPS : DECODE_AHEAD;
  constexpr int LANES_PER_HEAD = 32 / HB;  // in the softmax
  __shared__ float weights[DECODE_WARPS][DECODE_TILE * HB];  // scores, then exp2 of them: [key][head]
  // Sum `e` of a warp (of 8 * HB, head by head) for part p of the key: at e * SUM_PITCH + p, and SUM_GAP further on for every
  // SHARE sums before it. So neither the lanes that write sum e of all parts and keys nor those that read all sums of a head
  // meet in a bank.
  constexpr int SHARE = HB * 8 / KEYS, SUM_PITCH = LANES + 4, SUM_GAP = (LANES + 31 * SHARE * SUM_PITCH) % 32;
  __shared__ float4 sums[DECODE_WARPS][(HB * 8 * SUM_PITCH + KEYS * SUM_GAP) / 4];
  __shared__ float maxima[DECODE_WARPS][HB], totals[DECODE_WARPS][HB];
  static_assert(sizeof(float) * DECODE_SPLITS * HB <= sizeof sums, "factors[] is laid over sums[]");

  const int s = blockIdx.z, row = cu_seqlens_q[s];
  if (cu_seqlens_q[s + 1] - row != 1) return;
  const int length = kv_lens[s], first = window > 0 ? max(0, length - window) : 0;
  const int share = keys_per_split(length - first, gridDim.y);
  const int begin = first + blockIdx.y * share, end = min(length, begin + share);
  if (begin >= end) return;

  const int head_blocks = (group + HB - 1) / HB;
  const int kv_head = blockIdx.x / head_blocks, head_in_group = blockIdx.x % head_blocks * HB;
  const int heads = min(HB, group - head_in_group), H = KH * group, head = kv_head * group + head_in_group;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = lane % LANES, key_in_step = lane / LANES;
  const int stride = KH * HD;
  const size_t base = (size_t)slots[s] * slot_stride + kv_head * HD + part * 8;
  k += base;
  v += base;

  // exp2 instead of exp: the factor is folded into q once
  const float q_scale = scale * 1.4426950408889634f;
  float query[HB][8], acc[HB * 8];
#pragma unroll
  for (int h = 0; h < HB; h++) {
    const float4* from = reinterpret_cast<const float4*>(q + ((size_t)row * H + head + min(h, heads - 1)) * HD + part * 8);
    const float4 a = from[0], b = from[1];
    const float values[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      query[h][i] = values[i] * q_scale;
      acc[h * 8 + i] = 0.f;
    }
  }
  const int soft_head = lane % HB, soft_key = lane / HB;  // this lane's head and first key in the softmax
  float maximum = NOTHING, total = 0.f;                   // of soft_head; the total is this lane's share of it
  float* own = weights[warp];

  for (int tile = begin + warp * DECODE_TILE; tile < end; tile += DECODE_SHARE) {
#pragma unroll 1
    for (int step = 0; step < STEPS; step += AHEAD) {
      uint4 loaded[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const int key = min(tile + (step + i) * KEYS + key_in_step, end - 1);  // beyond the end: any valid one
        loaded[i] = KV_LOAD(reinterpret_cast<const uint4*>(k + (size_t)key * stride));
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        float key[8], score[HB];
        unpack(loaded[i], key);
#pragma unroll
        for (int h = 0; h < HB; h++) {
          score[h] = query[h][0] * key[0];
#pragma unroll
          for (int e = 1; e < 8; e++) score[h] += query[h][e] * key[e];
        }
        spread_sum<HB, LANES / 2, 1>(score, part);
        if (part % (LANES / HB) == 0) own[((step + i) * KEYS + key_in_step) * HB + part / (LANES / HB)] = score[0];
      }
    }
    __syncwarp();

    float score[HB], highest = maximum;
#pragma unroll
    for (int j = 0; j < HB; j++) {
      const int key = soft_key + j * LANES_PER_HEAD;
      score[j] = tile + key < end ? own[key * HB + soft_head] : NOTHING;
      highest = fmaxf(highest, score[j]);
    }
#pragma unroll
    for (int offset = HB; offset < 32; offset <<= 1) highest = fmaxf(highest, __shfl_xor_sync(M40_EVERYONE, highest, offset));
    const float keep = exp2f(maximum - highest);
    maximum = highest;
    total *= keep;
#pragma unroll
    for (int j = 0; j < HB; j++) {
      const int key = soft_key + j * LANES_PER_HEAD;
      const float weight = tile + key < end ? exp2f(score[j] - highest) : 0.f;
      total += weight;
      own[key * HB + soft_head] = weight;
    }
#pragma unroll
    for (int h = 0; h < HB; h++) {
      const float factor = __shfl_sync(M40_EVERYONE, keep, h);
#pragma unroll
      for (int i = 0; i < 8; i++) acc[h * 8 + i] *= factor;
    }
    __syncwarp();

#pragma unroll 1
    for (int step = 0; step < STEPS; step += AHEAD) {
      uint4 loaded[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const int key = min(tile + (step + i) * KEYS + key_in_step, end - 1);
        loaded[i] = KV_LOAD(reinterpret_cast<const uint4*>(v + (size_t)key * stride));
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        float value[8];
        unpack(loaded[i], value);
        const float* weight = own + ((step + i) * KEYS + key_in_step) * HB;
#pragma unroll
        for (int h = 0; h < HB; h++) {
          const float w = weight[h];
#pragma unroll
          for (int e = 0; e < 8; e++) acc[h * 8 + e] += w * value[e];
        }
      }
    }
    __syncwarp();  // the next tile overwrites the weights
  }

  // Lanes of different keys hold sums of the same elements: each ends with a share of the heads' elements.
  spread_sum<HB * 8, 16, LANES>(acc, lane);
  float* my_sums = reinterpret_cast<float*>(sums[warp]) + key_in_step * (SHARE * SUM_PITCH + SUM_GAP) + part;
#pragma unroll
  for (int i = 0; i < SHARE; i++) my_sums[i * SUM_PITCH] = acc[i];
#pragma unroll
  for (int offset = HB; offset < 32; offset <<= 1) total += __shfl_xor_sync(M40_EVERYONE, total, offset);
  if (lane < HB) {
    maxima[warp][lane] = maximum;
    totals[warp][lane] = total;
  }
  __syncthreads();

  const int used = (length - first + share - 1) / share;
  const StagedWriter writer(out, batch, type);
  for (int i = threadIdx.x; i < heads * HD; i += DECODE_THREADS) {
    const int h = i / HD, e = h * 8 + i % 8, at = e * SUM_PITCH + e / SHARE * SUM_GAP + i % HD / 8;
    float top = maxima[0][h], all = 0.f, sum = 0.f;
#pragma unroll
    for (int w = 1; w < DECODE_WARPS; w++) top = fmaxf(top, maxima[w][h]);
#pragma unroll
    for (int w = 0; w < DECODE_WARPS; w++) {
      const float factor = exp2f(maxima[w][h] - top);
      all += totals[w][h] * factor;
      sum += reinterpret_cast<const float*>(sums[w])[at] * factor;
    }
    if (used == 1) {
      if (batch) writer.put1(row, head * HD + i, sum / all);
      else out[((size_t)row * H + head) * HD + i] = sum / all;
    } else {
      const size_t place = ((size_t)s * H + head + h) * gridDim.y + blockIdx.y;
      part_out[place * HD + i % HD] = sum;
      if (i % HD == 0) part_stats[place] = make_float2(top, all);
    }
  }
  if (used == 1) return;

  // The block that finishes last merges (CUDA C++ Programming Guide, "Memory Fence Functions").
  __shared__ unsigned arrived;
  __threadfence();
  __syncthreads();  // for other blocks: all of this one's results lie before its arrival
  if (threadIdx.x == 0) arrived = atomicInc(done + s * gridDim.x + blockIdx.x, used - 1);
  __syncthreads();
  if (arrived != used - 1) return;
  __threadfence();

  float* factors = reinterpret_cast<float*>(sums);  // [split][head], up to DECODE_SPLITS * HB
  const size_t place = ((size_t)s * H + head) * gridDim.y;
  if (threadIdx.x < heads) {
    const float2* stats = part_stats + place + threadIdx.x * gridDim.y;
    float top = NOTHING, all = 0.f;
#pragma unroll 4
    for (int i = 0; i < used; i++) top = fmaxf(top, __ldcg(stats + i).x);
#pragma unroll 4
    for (int i = 0; i < used; i++) {
      const float2 part = __ldcg(stats + i);
      const float factor = exp2f(part.x - top);
      all += part.y * factor;
      factors[i * HB + threadIdx.x] = factor;
    }
    maxima[0][threadIdx.x] = 1.f / all;
  }
  __syncthreads();
  for (int i = threadIdx.x; (i & ~31) < heads * (HD / 4); i += DECODE_THREADS) {  // whole warps, for their sums
    const bool inside = i < heads * (HD / 4);
    const int h = inside ? i / (HD / 4) : 0, e = i % (HD / 4);
    const float4* from = reinterpret_cast<const float4*>(part_out + (place + (size_t)h * gridDim.y) * HD) + e;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int split = 0; split < used; split++) {
      const float4 part = __ldcg(from + split * (HD / 4));
      const float factor = factors[split * HB + h];
      sum = make_float4(sum.x + part.x * factor, sum.y + part.y * factor, sum.z + part.z * factor, sum.w + part.w * factor);
    }
    const float scale_out = maxima[0][h];
    const float4 result = make_float4(sum.x * scale_out, sum.y * scale_out, sum.z * scale_out, sum.w * scale_out);
    if (batch) writer.put4(row, head * HD + 4 * i, result, inside);
    else if (inside) reinterpret_cast<float4*>(out + ((size_t)row * H + head) * HD)[i] = result;
  }
}

#define ATTENTION_DECODE(HD, HB)                                                                                             \
  extern "C" __global__ void __launch_bounds__(DECODE_THREADS)                                                               \
  attention_decode_hd##HD##_g##HB(const float* q, const __half* k, const __half* v, const int* cu_seqlens_q,                 \
                                  const int* kv_lens, const int* slots, float* out, float* part_out, float2* part_stats,     \
                                  unsigned* done, long long slot_stride, int KH, int group, int window, float scale,         \
                                  int batch, int type) {                                                                     \
    attention_decode<HD, HB>(q, k, v, cu_seqlens_q, kv_lens, slots, out, part_out, part_stats, done, slot_stride, KH, group, \
                             window, scale, batch, type);                                                                    \
  }

ATTENTION_DECODE(64, 1)
ATTENTION_DECODE(64, 4)
ATTENTION_DECODE(64, 8)
ATTENTION_DECODE(128, 1)
ATTENTION_DECODE(128, 4)
ATTENTION_DECODE(128, 8)
ATTENTION_DECODE(256, 1)
ATTENTION_DECODE(256, 4)
ATTENTION_DECODE(256, 8)
