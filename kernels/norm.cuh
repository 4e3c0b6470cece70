// RMSNorm by rows: out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019), float32 throughout.
//
//   rmsnorm_f32      x (*, D) -> out (T, D); row t of out comes from row rows[t] of x, or from row t if `rows` is null
//   rmsnorm_add_f32  x (T, D) += delta (T, D), then out (T, D) = norm of the sum
//   rmsnorm_staged_f32  as rmsnorm_f32, but out is staged (staged.cuh) for the GGML types type0 and, unless it is -1, type1
//
// Grid: T; block: 256, one row. A row of up to 4096 columns stays in registers between the sum and the scaling, a longer
// one is read again (from L2). D that is no multiple of 4 takes the scalar instance of the same code.
// With M40LLM_LDG (module norm_ldg) x, delta and weight go through the read-only cache, where the kernel does not write
// them: an experiment, off unless a measurement on the card says otherwise.
#pragma once
#include "staged.cuh"
#include "warp.cuh"

#ifdef M40LLM_LDG
#define NORM_LOAD(pointer) __ldg(pointer)
#else
#define NORM_LOAD(pointer) (*(pointer))
#endif

#define NORM_THREADS 256  // a macro: launch bounds are read from the source
constexpr int NORM_KEPT = 4;  // vectors a thread keeps

__device__ __forceinline__ float squares(float v) { return v * v; }
__device__ __forceinline__ float squares(float4 v) { return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w); }
__device__ __forceinline__ float sum(float a, float b) { return a + b; }
__device__ __forceinline__ float4 sum(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float scaled(float v, float scale, float w) { return v * scale * w; }
__device__ __forceinline__ float4 scaled(float4 v, float scale, float4 w) {
  return make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
}

// A row of n vectors V. `first(i)` yields vector i the first time it is wanted, `again(i)` a second time; whole warps call
// `put(i, result, i < n)`.
template <class V, class First, class Again, class Put>
__device__ __forceinline__ void norm_row(First first, Again again, const V* weight, Put put, int n, int D, float eps) {
  __shared__ float slots[NORM_THREADS / 32];
  V kept[NORM_KEPT];
  float total = 0.f;
#pragma unroll
  for (int j = 0; j < NORM_KEPT; j++) {
    const int i = threadIdx.x + j * NORM_THREADS;
    if (i < n) {
      kept[j] = first(i);
      total += squares(kept[j]);
    }
  }
  for (int i = threadIdx.x + NORM_KEPT * NORM_THREADS; i < n; i += NORM_THREADS) total += squares(first(i));
  total = block_reduce(total, slots, [](float a, float b) { return a + b; });
  const float scale = 1.f / sqrtf(total / (float)D + eps);
#pragma unroll
  for (int j = 0; j < NORM_KEPT; j++) {
    const int i = threadIdx.x + j * NORM_THREADS;
    if ((i & ~31) < n) put(i, i < n ? scaled(kept[j], scale, NORM_LOAD(weight + i)) : V(), i < n);
  }
  for (int i = threadIdx.x + NORM_KEPT * NORM_THREADS; (i & ~31) < n; i += NORM_THREADS)
    put(i, i < n ? scaled(again(i), scale, NORM_LOAD(weight + i)) : V(), i < n);
}

// Stores vectors as they are.
template <class V>
struct PlainPut {
  V* out;
  __device__ __forceinline__ void operator()(int i, V value, bool inside) const {
    if (inside) out[i] = value;
  }
};

template <class V>
__device__ __forceinline__ void norm_plain(const float* x, const int* rows, const float* weight, float* out, int D, float eps) {
  const int row = rows ? rows[blockIdx.x] : blockIdx.x;
  const V* from = reinterpret_cast<const V*>(x + (size_t)row * D);
  const auto load = [=](int i) { return NORM_LOAD(from + i); };
  const PlainPut<V> put{reinterpret_cast<V*>(out + (size_t)blockIdx.x * D)};
  norm_row(load, load, reinterpret_cast<const V*>(weight), put, D / (int)(sizeof(V) / sizeof(float)), D, eps);
}

template <class V>
__device__ __forceinline__ void norm_add(float* x, const float* delta, const float* weight, float* out, int D, float eps) {
  V* row = reinterpret_cast<V*>(x + (size_t)blockIdx.x * D);
  const V* more = reinterpret_cast<const V*>(delta + (size_t)blockIdx.x * D);
  const auto add = [=](int i) { return row[i] = sum(row[i], NORM_LOAD(more + i)); };
  const auto load = [=](int i) { return row[i]; };
  const PlainPut<V> put{reinterpret_cast<V*>(out + (size_t)blockIdx.x * D)};
  norm_row(add, load, reinterpret_cast<const V*>(weight), put, D / (int)(sizeof(V) / sizeof(float)), D, eps);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
rmsnorm_f32(const float* x, const int* rows, const float* weight, float* out, int D, float eps) {
  if (D & 3) norm_plain<float>(x, rows, weight, out, D, eps);
  else norm_plain<float4>(x, rows, weight, out, D, eps);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
rmsnorm_add_f32(float* x, const float* delta, const float* weight, float* out, int D, float eps) {
  if (D & 3) norm_add<float>(x, delta, weight, out, D, eps);
  else norm_add<float4>(x, delta, weight, out, D, eps);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
rmsnorm_staged_f32(const float* x, const int* rows, const float* weight, float* staged, int D, float eps, int batch, int type0, int type1) {
  const int row = rows ? rows[blockIdx.x] : blockIdx.x;
  const float4* from = reinterpret_cast<const float4*>(x + (size_t)row * D);
  const auto load = [=](int i) { return NORM_LOAD(from + i); };
  const StagedWriter first(staged, batch, type0), second(staged + staged_floats(D, batch), batch, type1);
  const auto put = [=](int i, float4 value, bool inside) {
    first.put4(blockIdx.x, 4 * i, value, inside);
    if (type1 >= 0) second.put4(blockIdx.x, 4 * i, value, inside);
  };
  norm_row(load, load, reinterpret_cast<const float4*>(weight), put, D / 4, D, eps);
}
