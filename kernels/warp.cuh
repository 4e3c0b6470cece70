// Reductions over a warp and over a block. Every lane (thread) must take part, and every one gets the result (of spread_sum:
// its share of the results).
#pragma once

#define M40_EVERYONE 0xffffffffu

template <class T, class Combine>
__device__ __forceinline__ T warp_reduce(T value, Combine combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value = combine(value, __shfl_xor_sync(M40_EVERYONE, value, offset));
  return value;
}

// Sums each of N values over the lanes whose numbers differ only in the bits from HIGHEST down to LOWEST. A lane gives half
// of its values away at each bit, while more than one is left, so that N values cost little more than one. It keeps the
// upper half where its bit is set: the values from (its bits, read as a number) * N / (number of lanes) on. While the first
// bits share out SORTED groups of values, the half that a lane keeps already lies first with it.
template <int N, int HIGHEST, int LOWEST, int SORTED = 1>
__device__ __forceinline__ void spread_sum(float* value, int lane) {
  if constexpr (HIGHEST >= LOWEST) {
    if constexpr (N > 1) {
      const bool upper = SORTED == 1 && (lane & HIGHEST) != 0;
#pragma unroll
      for (int i = 0; i < N / 2; i++) {
        const float give = upper ? value[i] : value[i + N / 2];
        const float keep = upper ? value[i + N / 2] : value[i];
        value[i] = keep + __shfl_xor_sync(M40_EVERYONE, give, HIGHEST);
      }
    } else {
      value[0] += __shfl_xor_sync(M40_EVERYONE, value[0], HIGHEST);
    }
    spread_sum<(N > 1 ? N / 2 : 1), HIGHEST / 2, LOWEST, (SORTED > 1 ? SORTED / 2 : 1)>(value, lane);
  }
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
