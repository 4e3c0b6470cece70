// Rotary position embedding (Su et al., RoFormer, 2021), float32, from tables cos, sin (positions, pairs).
//
//   rope_<pairing>_f32         x (T, heads, HD) rotated in place
//   rope_append_<pairing>_f16  q (T, H, HD) rotated in place; K rotated and V copied into the FP16 cache at
//                              (slot, position) of one layer: [slot][position][kv_head][head_dim]
//
// Pairing "interleaved" rotates elements (2i, 2i+1), "half" (i, i + pairs); elements from 2 * pairs on are not rotated.
// Row t stands at position pos[t] of slot row_slot[t]; without arrays (null) at pos0 + t of slot0: a host that knows.
// Grid: (T, ceil(units / 128)); block: 128, one unit of four elements each. Limits: HD a multiple of 4, pairs even.
#include <cuda_fp16.h>

#define ROPE_THREADS 128  // a macro: launch bounds are read from the source

// Four elements of a head as two neighbours at `low` and two at `high`, in the order in which memory has them.
struct Unit {
  int low, high, table;  // table: first of two pairs in cos and sin; negative: not rotated
};

template <bool INTERLEAVED>
__device__ __forceinline__ Unit unit_of(int u, int pairs) {
  if (2 * u >= pairs) return {4 * u, 4 * u + 2, -1};
  return INTERLEAVED ? Unit{4 * u, 4 * u + 2, 2 * u} : Unit{2 * u, 2 * u + pairs, 2 * u};
}

template <bool INTERLEAVED>
__device__ __forceinline__ void rotate(const Unit& unit, const float* cos_row, const float* sin_row, float2& low, float2& high) {
  if (unit.table < 0) return;
  const float2 c = *reinterpret_cast<const float2*>(cos_row + unit.table);
  const float2 s = *reinterpret_cast<const float2*>(sin_row + unit.table);
  const float2 a = low, b = high;
  if (INTERLEAVED) {
    low = make_float2(a.x * c.x - a.y * s.x, a.x * s.x + a.y * c.x);
    high = make_float2(b.x * c.y - b.y * s.y, b.x * s.y + b.y * c.y);
  } else {
    low = make_float2(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
    high = make_float2(a.x * s.x + b.x * c.x, a.y * s.y + b.y * c.y);
  }
}

template <bool INTERLEAVED>
__device__ __forceinline__ void rotate_in_place(float* head, const Unit& unit, const float* cos_row, const float* sin_row) {
  if (unit.table < 0) return;
  float2* low_at = reinterpret_cast<float2*>(head + unit.low);
  float2* high_at = reinterpret_cast<float2*>(head + unit.high);
  float2 low = *low_at, high = *high_at;
  rotate<INTERLEAVED>(unit, cos_row, sin_row, low, high);
  *low_at = low;
  *high_at = high;
}

__device__ __forceinline__ void append(__half* head, const Unit& unit, float2 low, float2 high) {
  *reinterpret_cast<__half2*>(head + unit.low) = __float22half2_rn(low);
  *reinterpret_cast<__half2*>(head + unit.high) = __float22half2_rn(high);
}

template <bool INTERLEAVED>
__device__ __forceinline__ void rope(float* x, const float* cos, const float* sin, const int* pos, int pos0, int heads, int HD, int pairs) {
  const int units = HD / 4, index = blockIdx.y * ROPE_THREADS + threadIdx.x;
  if (index >= heads * units) return;
  const int t = blockIdx.x, head = index / units;
  const size_t table = (size_t)(pos ? pos[t] : pos0 + t) * pairs;
  rotate_in_place<INTERLEAVED>(x + ((size_t)t * heads + head) * HD, unit_of<INTERLEAVED>(index % units, pairs), cos + table, sin + table);
}

template <bool INTERLEAVED>
__device__ __forceinline__ void rope_append(float* q, const float* k, const float* v, const float* cos, const float* sin,
                                            const int* pos, const int* row_slot, int pos0, int slot0, __half* k_cache,
                                            __half* v_cache, long long slot_stride, int H, int KH, int HD, int pairs) {
  const int units = HD / 4, index = blockIdx.y * ROPE_THREADS + threadIdx.x;
  const int t = blockIdx.x, u = index % units;
  int head = index / units;  // of Q, then of K, then of V
  if (head >= H + 2 * KH) return;
  const int p = pos ? pos[t] : pos0 + t, slot = row_slot ? row_slot[t] : slot0;
  const float* cos_row = cos + (size_t)p * pairs;
  const float* sin_row = sin + (size_t)p * pairs;
  const Unit unit = unit_of<INTERLEAVED>(u, pairs);
  if (head < H) {
    rotate_in_place<INTERLEAVED>(q + ((size_t)t * H + head) * HD, unit, cos_row, sin_row);
    return;
  }
  head -= H;
  const bool is_key = head < KH;
  if (!is_key) head -= KH;
  const float* from = (is_key ? k : v) + ((size_t)t * KH + head) * HD;
  float2 low = *reinterpret_cast<const float2*>(from + unit.low);
  float2 high = *reinterpret_cast<const float2*>(from + unit.high);
  if (is_key) rotate<INTERLEAVED>(unit, cos_row, sin_row, low, high);
  append((is_key ? k_cache : v_cache) + slot * slot_stride + ((size_t)p * KH + head) * HD, unit, low, high);
}

#define ROPE(PAIRING, INTERLEAVED)                                                                                            \
  extern "C" __global__ void __launch_bounds__(ROPE_THREADS)                                                                  \
  rope_##PAIRING##_f32(float* x, const float* cos, const float* sin, const int* pos, int pos0, int heads, int HD, int pairs) { \
    rope<INTERLEAVED>(x, cos, sin, pos, pos0, heads, HD, pairs);                                                              \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(ROPE_THREADS)                                                                  \
  rope_append_##PAIRING##_f16(float* q, const float* k, const float* v, const float* cos, const float* sin, const int* pos,   \
                              const int* row_slot, int pos0, int slot0, __half* k_cache, __half* v_cache,                     \
                              long long slot_stride, int H, int KH, int HD, int pairs) {                                      \
    rope_append<INTERLEAVED>(q, k, v, cos, sin, pos, row_slot, pos0, slot0, k_cache, v_cache, slot_stride, H, KH, HD, pairs); \
  }

ROPE(interleaved, true)
ROPE(half, false)
