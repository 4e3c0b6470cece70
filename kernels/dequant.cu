// dequant_<type>: the whole matrix w (N, K) in the packed planes of formats.cuh, as float32 or float16, row-major.
//
// One thread per unit of 32 weights. Grid: ceil(N * ceil(K/32) / 128); block: 128. `out16` is written if it is not null,
// otherwise `out`. The arithmetic is the file format's own, operation for operation: results equal m40llm.gguf.dequantize
// bit for bit (in float16: rounded once more). Limits: N * ceil(K/32) < 2^31.
#include "formats.cuh"

template <class F>
M40_INLINE void dequant(const u8* base, float* out, u16* out16, int rows, int columns) {
  const int units = (columns + 31) >> 5;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows * units) return;
  const int row = i / units, unit = i % units;
  const Group<F> w(base, row >> 2, columns);
  const size_t at = (size_t)row * columns + unit * 32;
  const int count = min(32, columns - unit * 32);
  decode_unit(w, row & 3, unit, [&](auto p, float4 v) {
    const int k = decltype(p)::value * 4;
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int c = 0; c < 4; c++) {
      if (k + c < count) {
        if (out16) out16[at + k + c] = __half_as_ushort(__float2half_rn(values[c]));
        else out[at + k + c] = values[c];
      }
    }
  });
}

#define DEQUANT(NAME, FORMAT)                                                                                         \
  extern "C" __global__ void __launch_bounds__(128)                                                                   \
  dequant_##NAME(const unsigned char* __restrict__ w, float* __restrict__ out, unsigned short* __restrict__ out16, int rows, int columns) { \
    dequant<FORMAT>(w, out, out16, rows, columns);                                                                    \
  }

DEQUANT(f32, F32)
DEQUANT(f16, F16)
DEQUANT(bf16, BF16)
DEQUANT(q8_0, Q8_0)
DEQUANT(q4_0, Q4_0)
DEQUANT(q4_1, Q4_1)
DEQUANT(q5_0, Q5_0)
DEQUANT(q5_1, Q5_1)
DEQUANT(q2_k, Q2_K)
DEQUANT(q3_k, Q3_K)
DEQUANT(q4_k, Q4_K)
DEQUANT(q5_k, Q5_K)
DEQUANT(q6_k, Q6_K)
DEQUANT(iq4_xs, IQ4_XS)
