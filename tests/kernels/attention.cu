// The emulator's parity tests run these; they are no part of the product.
#include <cuda_fp16.h>
// GQA decode attention, one block (128 threads) per query head, online softmax over chunks of CH positions.
// K/V cache: [n_kv][max_T][D] fp16. Dynamic shared memory: CH scores + D query floats.
template <int D>
__device__ __forceinline__ void attn(const float* __restrict__ q, const __half* __restrict__ kc, const __half* __restrict__ vc,
                                     float* __restrict__ out, int T, int maxT, int group, float scale, int CH) {
  extern __shared__ float smem[];
  __shared__ float red[4];
  float* sc = smem;
  float* qs = smem + CH;
  const int h = blockIdx.x, kvh = h / group, tid = threadIdx.x, lane = tid & 31, wid = tid >> 5;
  const __half* kb = kc + (size_t)kvh * maxT * D;
  const __half* vb = vc + (size_t)kvh * maxT * D;
  for (int i = tid; i < D; i += 128) qs[i] = q[h * D + i] * scale;
  float m = -1e30f, l = 0.f, acc = 0.f;          // acc: thread tid owns output dim tid (D <= 128)
  __syncthreads();
  for (int t0 = 0; t0 < T; t0 += CH) {
    const int n = min(CH, T - t0);
    float mx = -1e30f;
    for (int t = wid; t < n; t += 4) {           // one position per warp
      const __half2* k2 = reinterpret_cast<const __half2*>(kb + (size_t)(t0 + t) * D);
      float s = 0.f;
#pragma unroll
      for (int i = 0; i < D / 64; i++) {
        const float2 kf = __half22float2(k2[lane + 32 * i]);
        s += kf.x * qs[2 * (lane + 32 * i)] + kf.y * qs[2 * (lane + 32 * i) + 1];
      }
#pragma unroll
      for (int o = 16; o > 0; o >>= 1) s += __shfl_xor_sync(0xffffffffu, s, o);
      if (lane == 0) sc[t] = s;
      mx = fmaxf(mx, s);
    }
    if (lane == 0) red[wid] = mx;
    __syncthreads();
    const float mn = fmaxf(m, fmaxf(fmaxf(red[0], red[1]), fmaxf(red[2], red[3])));
    for (int t = tid; t < n; t += 128) sc[t] = __expf(sc[t] - mn);
    __syncthreads();
    const float corr = __expf(m - mn);
    float ls = 0.f;
    acc *= corr;
    for (int t = 0; t < n; t++) {
      const float p = sc[t];
      ls += p;
      if (tid < D) acc += p * __half2float(vb[(size_t)(t0 + t) * D + tid]);
    }
    l = l * corr + ls;
    m = mn;
    __syncthreads();
  }
  if (tid < D) out[h * D + tid] = acc / l;
}
extern "C" __global__ void __launch_bounds__(128)
attn_decode_64(const float* q, const __half* k, const __half* v, float* out, int T, int maxT, int group, float scale, int CH) { attn<64>(q, k, v, out, T, maxT, group, scale, CH); }
extern "C" __global__ void __launch_bounds__(128)
attn_decode_128(const float* q, const __half* k, const __half* v, float* out, int T, int maxT, int group, float scale, int CH) { attn<128>(q, k, v, out, T, maxT, group, scale, CH); }
