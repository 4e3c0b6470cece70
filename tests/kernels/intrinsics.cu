// Device functions whose results tests/test_emulator_device_api.py knows. Blocks of (32, 2) threads, one block.
#include <cuda_fp16.h>
#define FULL 0xffffffffu
__device__ __forceinline__ int linear_thread() { return threadIdx.x + blockDim.x * threadIdx.y; }

// y: (12, 64)
extern "C" __global__ void __launch_bounds__(64) collectives(const int* x, int* y, int needle) {
  __shared__ int sum, largest;
  extern __shared__ __align__(16) int reversed[];
  const int t = linear_thread(), lane = t & 31, v = x[t];
  if (t == 0) sum = 0, largest = -1;
  reversed[63 - t] = v;
  __syncthreads();
  y[0 * 64 + t] = __shfl_down_sync(FULL, v, 3);
  y[1 * 64 + t] = __shfl_up_sync(FULL, v, 5);
  y[2 * 64 + t] = __shfl_sync(FULL, v, 7);
  y[3 * 64 + t] = __shfl_xor_sync(FULL, v, 4, 8);
  y[4 * 64 + t] = (int)__ballot_sync(FULL, v & 1);
  y[5 * 64 + t] = __any_sync(FULL, v == needle);
  y[6 * 64 + t] = __all_sync(FULL, v < 1000);
  y[7 * 64 + t] = __syncthreads_count(v & 1);
  atomicAdd(&sum, v);
  atomicMax(&largest, v);
  __syncthreads();
  y[8 * 64 + t] = sum;
  y[9 * 64 + t] = largest;
  if (lane < 16) y[10 * 64 + t] = __shfl_sync(0x0000ffffu, v, 3);
  else y[10 * 64 + t] = __shfl_sync(0xffff0000u, v, 19);
  y[11 * 64 + t] = reversed[t];
}

// y: (6, 64)
extern "C" __global__ void integers(const unsigned* a, const unsigned* b, unsigned* y) {
  const int t = linear_thread();
  y[0 * 64 + t] = __byte_perm(a[t], b[t], 0x7302);
  y[1 * 64 + t] = __byte_perm(a[t], b[t], 0xc18a);  // sign replication of bytes 4, 0 and 2
  y[2 * 64 + t] = __popc(a[t]) + 100 * __clz((int)a[t]) + 10000 * __ffs((int)a[t]);
  y[3 * 64 + t] = __umulhi(a[t], b[t]);
  y[4 * 64 + t] = __funnelshift_r(a[t], b[t], 9);
  y[5 * 64 + t] = (unsigned)__float2int_rn((float)(int)a[t] * 3.f) ^ __brev(b[t]);
}

// y: (5, 64). a, b, c come as bit patterns so that subnormals arrive as they are.
extern "C" __global__ void fused(const float* a, const float* b, const float* c, float* y) {
  const int t = linear_thread();
  y[0 * 64 + t] = __fmaf_ieee_rn(a[t], b[t], c[t]);
  y[1 * 64 + t] = a[t] * b[t];
  y[2 * 64 + t] = fmaf(a[t], b[t], c[t]);
  y[3 * 64 + t] = __fadd_rn(__fmul_rn(a[t], b[t]), c[t]);  // two roundings: must not be contracted
  y[4 * 64 + t] = a[t] * b[t] + c[t];                      // contracted, as nvcc does
}

// Loads of every width; h: 128 halves, packed: 64 uint4 (16-byte aligned), out: (5, 64)
extern "C" __global__ void loads(const __half* h, const uint4* packed, const float4* quads, const double* d, float* out) {
  const int t = linear_thread();
  const float2 pair = __half22float2(reinterpret_cast<const __half2*>(h)[t]);
  const uint4 words = __ldg(packed + t);
  const uint2 two = __ldg(reinterpret_cast<const uint2*>(packed) + 2 * t + 1);
  const float4 q = __ldg(quads + t);
  out[0 * 64 + t] = pair.x + 2 * pair.y;
  out[1 * 64 + t] = (float)((words.x ^ words.y ^ words.z ^ words.w) & 0xffffff);
  out[2 * 64 + t] = two.x == words.z && two.y == words.w ? 1.f : 0.f;
  out[3 * 64 + t] = q.x + 2 * q.y + 4 * q.z + 8 * q.w;
  out[4 * 64 + t] = (float)(d[t] * 0.1);
}
