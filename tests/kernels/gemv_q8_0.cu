// The emulator's parity tests run these; they are no part of the product.
#include <cuda_fp16.h>
// Q8_0 block: 34 bytes = fp16 scale + 32 int8. One row of W per block of 128 threads, or per warp.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
__device__ __forceinline__ float q8_part(const unsigned char* __restrict__ blk, const float* __restrict__ x, int part) {
  const float d = __half2float(*reinterpret_cast<const __half*>(blk));
  const unsigned short* q = reinterpret_cast<const unsigned short*>(blk + 2 + part * 8);
  const float4 x0 = *reinterpret_cast<const float4*>(x + part * 8);
  const float4 x1 = *reinterpret_cast<const float4*>(x + part * 8 + 4);
  const unsigned a = __ldg(q), b = __ldg(q + 1), c = __ldg(q + 2), e = __ldg(q + 3);
  float s = 0.f;
  s += (float)(signed char)(a & 255) * x0.x + (float)(signed char)(a >> 8) * x0.y;
  s += (float)(signed char)(b & 255) * x0.z + (float)(signed char)(b >> 8) * x0.w;
  s += (float)(signed char)(c & 255) * x1.x + (float)(signed char)(c >> 8) * x1.y;
  s += (float)(signed char)(e & 255) * x1.z + (float)(signed char)(e >> 8) * x1.w;
  return s * d;
}
extern "C" __global__ void __launch_bounds__(128)
gemv_q8_0(const unsigned char* __restrict__ W, const float* __restrict__ x, float* __restrict__ y, int K, int N) {
  __shared__ float red[4];
  const int row = blockIdx.x, nb = K >> 5;
  const unsigned char* wr = W + (size_t)row * nb * 34;
  float acc = 0.f;
  for (int i = threadIdx.x; i < nb * 4; i += 128) acc += q8_part(wr + (i >> 2) * 34, x + (i >> 2) * 32, i & 3);
  acc = warp_sum(acc);
  if ((threadIdx.x & 31) == 0) red[threadIdx.x >> 5] = acc;
  __syncthreads();
  if (threadIdx.x == 0) y[row] = red[0] + red[1] + red[2] + red[3];
}
// one row per warp, 4 rows per block: no shared memory
extern "C" __global__ void __launch_bounds__(128)
gemv_q8_0_warp(const unsigned char* __restrict__ W, const float* __restrict__ x, float* __restrict__ y, int K, int N) {
  const int row = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31, nb = K >> 5;
  if (row >= N) return;
  const unsigned char* wr = W + (size_t)row * nb * 34;
  float acc = 0.f;
  for (int i = lane; i < nb * 4; i += 32) acc += q8_part(wr + (i >> 2) * 34, x + (i >> 2) * 32, i & 3);
  acc = warp_sum(acc);
  if (lane == 0) y[row] = acc;
}
