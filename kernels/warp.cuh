// Reductions over a warp and over a block. Every lane (thread) must take part, and every one gets the result.
#pragma once

#define M40_EVERYONE 0xffffffffu

template <class T, class Combine>
__device__ __forceinline__ T warp_reduce(T value, Combine combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value = combine(value, __shfl_xor_sync(M40_EVERYONE, value, offset));
  return value;
}

// One barrier. `slots` holds one value a warp and may be used again only behind another barrier.
template <int WARPS, class T, class Combine>
__device__ __forceinline__ T block_reduce(T value, T (&slots)[WARPS], Combine combine) {
  value = warp_reduce(value, combine);
  if ((threadIdx.x & 31) == 0) slots[threadIdx.x >> 5] = value;
  __syncthreads();
  value = slots[0];
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) value = combine(value, slots[warp]);
  return value;
}
