// embed_<type>: x[t] = row ids[t] of the embedding table w (V, D), dequantised exactly; x (T, D) float32.
//
// Grid: (T, ceil(ceil(D/32) / 32)); block: 32, one thread per unit of 32 weights. An id outside 0..V-1 stops the kernel
// (the host has checked it). The table is in the packed planes of formats.cuh, so a tied output projection shares it.
#include "formats.cuh"

template <class F>
M40_INLINE void embed(const u8* base, const int* ids, float* x, int vocabulary, int columns) {
  const int unit = blockIdx.y * 32 + threadIdx.x;
  if (unit >= (columns + 31) >> 5) return;
  const int row = ids[blockIdx.x];
  if (row < 0 || row >= vocabulary) __trap();
  const Group<F> w(base, row >> 2, columns);
  float* out = x + (size_t)blockIdx.x * columns + unit * 32;
  const int count = min(32, columns - unit * 32);
  decode_unit(w, row & 3, unit, [&](auto p, float4 v) {
    const int k = decltype(p)::value * 4;
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; c++)
      if (k + c < count) out[k + c] = values[c];
  });
}

#define EMBED(NAME, FORMAT)                                                                                           \
  extern "C" __global__ void __launch_bounds__(32)                                                                    \
  embed_##NAME(const unsigned char* __restrict__ w, const int* __restrict__ ids, float* __restrict__ x, int vocabulary, int columns) { \
    embed<FORMAT>(w, ids, x, vocabulary, columns);                                                                    \
  }

EMBED(f32, F32)
EMBED(f16, F16)
EMBED(bf16, BF16)
EMBED(q8_0, Q8_0)
EMBED(q4_0, Q4_0)
EMBED(q4_1, Q4_1)
EMBED(q5_0, Q5_0)
EMBED(q5_1, Q5_1)
EMBED(q2_k, Q2_K)
EMBED(q3_k, Q3_K)
EMBED(q4_k, Q4_K)
EMBED(q5_k, Q5_K)
EMBED(q6_k, Q6_K)
EMBED(iq4_xs, IQ4_XS)
