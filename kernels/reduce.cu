// What sampling needs of the logits (R, V) float32: the best token of each row, or its k best.
//
//   argmax_f32  ids (R,) int32: the largest logit's id, the lowest among equals
//   topk_f32    values (R, k) float32 descending, ids (R, k) int32; equal logits by ascending id
//
// A NaN counts as -infinity, -0 as +0. Grid: (blocks, R); block: 256. A row is cut into chunks, one block each;
// the block of a row that finishes last merges the partial results, so each is one launch. `done` (R,) uint32 must be zero
// at the first launch and is left zero. argmax: any chunk, at most 256 blocks. topk: chunks of 4096, k * blocks <= 4096,
// k <= V; 32 KB of shared memory.
#include "warp.cuh"

typedef unsigned long long u64;

#define REDUCE_THREADS 256  // a macro: launch bounds are read from the source
constexpr int REDUCE_WARPS = REDUCE_THREADS / 32;
constexpr int TOPK_CHUNK = 4096;

// Larger key: larger logit, then lower id. Never 0, which stands for "nothing".
__device__ __forceinline__ u64 key_of(float logit, int id) {
  const unsigned bits = logit != logit ? 0xff800000u : __float_as_uint(logit + 0.f);
  const unsigned ordered = bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
  return ((u64)ordered << 32) | ~(unsigned)id;
}
__device__ __forceinline__ int id_of(u64 key) { return (int)~(unsigned)key; }
__device__ __forceinline__ float logit_of(u64 key) {
  const unsigned ordered = (unsigned)(key >> 32);
  return __uint_as_float(ordered ^ ((ordered >> 31) ? 0x80000000u : 0xffffffffu));
}
__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// True in every thread of the block that arrives last of its row; what the thread 0 of the others wrote before is then
// visible to it (CUDA C++ Programming Guide, "Memory Fence Functions").
__device__ __forceinline__ bool last_of_row(unsigned* done) {
  __shared__ unsigned arrived;
  if (threadIdx.x == 0) {
    __threadfence();
    arrived = atomicInc(done + blockIdx.y, gridDim.x - 1);
    __threadfence();
  }
  __syncthreads();
  return arrived == gridDim.x - 1;
}

extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
argmax_f32(const float* logits, int* ids, u64* partial, unsigned* done, int V, int chunk) {
  __shared__ u64 slots[REDUCE_WARPS], last_slots[REDUCE_WARPS];
  const float* row = logits + (size_t)blockIdx.y * V;
  const int begin = blockIdx.x * chunk, end = min(V, begin + chunk);
  u64 best = 0;
#pragma unroll 4
  for (int i = begin + threadIdx.x; i < end; i += REDUCE_THREADS) best = larger(best, key_of(row[i], i));
  best = block_reduce(best, slots, larger);
  u64* mine = partial + (size_t)blockIdx.y * gridDim.x;
  if (threadIdx.x == 0) mine[blockIdx.x] = best;
  if (!last_of_row(done)) return;
  best = threadIdx.x < gridDim.x ? __ldcg(mine + threadIdx.x) : 0;
  best = block_reduce(best, last_slots, larger);
  if (threadIdx.x == 0) ids[blockIdx.y] = id_of(best);
}

// Calls emit(i, key) in thread 0 for the k largest of keys[0 .. TOPK_CHUNK), in order. Destroys them. Thread t owns the
// keys t, t + 256, …: only the owner of a winner looks at its keys again.
template <class Emit>
__device__ __forceinline__ void select(u64* keys, u64 (*slots)[REDUCE_WARPS], int k, Emit emit) {
  u64 own = 0;
  for (int i = threadIdx.x; i < TOPK_CHUNK; i += REDUCE_THREADS) own = larger(own, keys[i]);
  for (int i = 0; i < k; i++) {
    // two sets of slots, used in turn: one barrier a round
    const u64 best = block_reduce(own, *reinterpret_cast<u64(*)[REDUCE_WARPS]>(slots[i & 1]), larger);
    if (threadIdx.x == 0) emit(i, best);
    if (best != 0 && own == best) {
      own = 0;
      for (int j = threadIdx.x; j < TOPK_CHUNK; j += REDUCE_THREADS) {
        if (keys[j] == best) keys[j] = 0;
        own = larger(own, keys[j]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)
topk_f32(const float* logits, float* values, int* ids, u64* partial, unsigned* done, int V, int k) {
  __shared__ u64 keys[TOPK_CHUNK];
  __shared__ u64 slots[2][REDUCE_WARPS];
  const float* row = logits + (size_t)blockIdx.y * V;
  const int begin = blockIdx.x * TOPK_CHUNK;
  for (int i = threadIdx.x; i < TOPK_CHUNK; i += REDUCE_THREADS) keys[i] = begin + i < V ? key_of(row[begin + i], begin + i) : 0;
  u64* all = partial + (size_t)blockIdx.y * gridDim.x * k;
  select(keys, slots, k, [&](int i, u64 key) { all[blockIdx.x * k + i] = key; });
  if (!last_of_row(done)) return;
  const int candidates = gridDim.x * k;
  for (int i = threadIdx.x; i < TOPK_CHUNK; i += REDUCE_THREADS) keys[i] = i < candidates ? __ldcg(all + i) : 0;
  select(keys, slots, k, [&](int i, u64 key) {
    values[(size_t)blockIdx.y * k + i] = logit_of(key);
    ids[(size_t)blockIdx.y * k + i] = id_of(key);
  });
}
