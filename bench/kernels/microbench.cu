// Microbenchmarks of a card: what the predictions assume and only a card can say. Grid: any; block: 256.
//
//   copy_f32x4       out[i] = in[i], n vectors of 16 bytes: the memory's bandwidth
//   fma_rate         8 chains of `loops` fused multiply-adds with the factor `w`: normal or subnormal
//   load_rate_<bits> `loops` loads of 32, 64 or 128 bits a thread through the read-only cache, from 16 KB that stay in it

#define MICROBENCH_THREADS 256

extern "C" __global__ void __launch_bounds__(MICROBENCH_THREADS)
copy_f32x4(const float4* __restrict__ in, float4* __restrict__ out, long long n) {
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
    out[i] = in[i];
}

// The IEEE form keeps subnormal factors, as the projections' weights are.
extern "C" __global__ void __launch_bounds__(MICROBENCH_THREADS) fma_rate(float* out, float x, float w, int loops) {
  float sum[8];
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = (float)(threadIdx.x + i);
  for (int k = 0; k < loops; k++) {
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = __fmaf_ieee_rn(x, w, sum[i]);
  }
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) total += sum[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

__device__ __forceinline__ float total(float v) { return v; }
__device__ __forceinline__ float total(float2 v) { return v.x + v.y; }
__device__ __forceinline__ float total(float4 v) { return (v.x + v.y) + (v.z + v.w); }

template <class V>
__device__ __forceinline__ void load_rate(const V* in, float* out, int loops) {
  constexpr int WORDS = 16384 / sizeof(V);
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
  int at = threadIdx.x;
  for (int k = 0; k < loops; k += 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum[i] += total(__ldg(in + at % WORDS));
      at += MICROBENCH_THREADS;
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

#define LOAD_RATE(BITS, TYPE)                                                \
  extern "C" __global__ void __launch_bounds__(MICROBENCH_THREADS)           \
  load_rate_##BITS(const TYPE* __restrict__ in, float* out, int loops) {     \
    load_rate<TYPE>(in, out, loops);                                         \
  }
LOAD_RATE(32, float)
LOAD_RATE(64, float2)
LOAD_RATE(128, float4)
