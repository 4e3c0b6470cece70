// Elementwise operations on n float32 values, 16-byte aligned.
//
//   swiglu_f32  out = silu(gate) * up       (Shazeer, 2020)
//   geglu_f32   out = gelu_tanh(gate) * up  (Hendrycks and Gimpel, 2016, the tanh form)
//   add_f32     x += y
//   bias_f32    y[t] = bias, or += bias  (y (T, N), bias (N,); any alignment)
//
// Grid: ceil(n / 1024); block: 256, four values each. `out` may be `gate` or `up`. bias_f32: (ceil(N / 256), T), one value each.

#define ELEMENTWISE_THREADS 256  // a macro: launch bounds are read from the source

struct Swish {
  __device__ __forceinline__ float operator()(float gate, float up) const { return gate / (1.f + expf(-gate)) * up; }
};
struct GeluTanh {
  __device__ __forceinline__ float operator()(float gate, float up) const {
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    // 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2y)), which neither cancels nor overflows
    return gate / (1.f + expf(-2.f * inner)) * up;
  }
};
struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

template <class Operation>
__device__ __forceinline__ void elementwise(Operation f, const float* a, const float* b, float* out, long long n) {
  const long long i = 4 * ((long long)blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x);
  if (i + 3 < n) {
    const float4 u = *reinterpret_cast<const float4*>(a + i), v = *reinterpret_cast<const float4*>(b + i);
    *reinterpret_cast<float4*>(out + i) = make_float4(f(u.x, v.x), f(u.y, v.y), f(u.z, v.z), f(u.w, v.w));
  } else {
    for (long long j = i; j < n; j++) out[j] = f(a[j], b[j]);
  }
}

extern "C" __global__ void __launch_bounds__(ELEMENTWISE_THREADS)
swiglu_f32(const float* gate, const float* up, float* out, long long n) {
  elementwise(Swish(), gate, up, out, n);
}
extern "C" __global__ void __launch_bounds__(ELEMENTWISE_THREADS)
geglu_f32(const float* gate, const float* up, float* out, long long n) {
  elementwise(GeluTanh(), gate, up, out, n);
}
extern "C" __global__ void __launch_bounds__(ELEMENTWISE_THREADS) add_f32(float* x, const float* y, long long n) {
  elementwise(Sum(), x, y, x, n);
}
extern "C" __global__ void __launch_bounds__(ELEMENTWISE_THREADS) bias_f32(float* y, const float* bias, int n, int add) {
  const int i = blockIdx.x * ELEMENTWISE_THREADS + threadIdx.x;
  if (i >= n) return;
  float* const at = y + (long long)blockIdx.y * n + i;
  *at = add ? *at + bias[i] : bias[i];
}
