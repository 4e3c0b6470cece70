// x as a projection of up to eight rows wants it in shared memory, written so by the kernel that produces it ("staged"):
// then every block of the projection merely copies it.
//
// For a format, a row is cut as the weights are, into chunks of 1024 columns, units of 32 and pieces of 4. A version holds
// for each chunk
//   values  [slot of batch][piece of 8][unit of 32] float4   x * 2^(exponent - place of the weight in its word)
//   sums    see sum_at()                                     of a unit or of its halves, as accumulators start with
// The batch is 1, 4 or 8; rows that the step does not have are neither written nor matter. Versions for the two formats of a
// launch follow each other.
#pragma once
#include "formats.cuh"
#include "warp.cuh"

constexpr int STAGED_CHUNK = 1024, STAGED_SUMS = 64;  // floats of a row in a chunk

// Where a chunk's sum is. Those of four rows are one vector load; eight are apart, since theirs would be two with bank
// conflicts.
M40_INLINE int sum_at(int slot, int half, int unit, int batch) {
  return batch == 4 ? (half * 32 + unit) * 4 + slot : slot * 64 + half * 32 + unit;
}

// From 8 rows on, a weight is multiplied by its scale as it is unpacked: one instruction more per weight, but no second set
// of accumulators, four a row, for the sums that still await their scale. The power of two goes into the scale then.
M40_INLINE constexpr bool scales_early(int batch) { return batch > 4; }

M40_INLINE int staged_chunks(int columns) { return (columns + STAGED_CHUNK - 1) >> 10; }

// Row of x and slot of the batch are not the same: unit u has row r in slot r ^ (u * batch / 32). A lane multiplies one unit
// of each chunk, so when lanes add up what they have, the rows that a lane keeps are in its first slots, whichever they are.
M40_INLINE int slot_of(int row, int unit, int batch) { return row ^ (unit * batch >> 5); }

M40_INLINE int staged_floats(int columns, int batch) { return staged_chunks(columns) * batch * (STAGED_CHUNK + STAGED_SUMS); }

// What accumulators start with: -BIAS * sum, or the sum itself where a minimum is multiplied by it.
template <class F>
__device__ constexpr float sum_factor() {
  return F::Scale::MINIMUM ? 1.f : -(float)F::BIAS;
}

// How x is staged for the GGML type `type`.
struct StagedAs {
  int bits = 0, halves = 1, exponent = X_EXPONENT;
  float factor = 0.f;

  template <class F>
  M40_INLINE void choose(int type) {
    if (type == F::ID) bits = F::Bits::BITS, halves = F::Scale::HALVES, factor = sum_factor<F>();
  }
  M40_INLINE StagedAs(int type, int batch) : exponent(scales_early(batch) ? 0 : X_EXPONENT) {
    choose<Q4_0>(type), choose<Q4_1>(type), choose<Q5_0>(type), choose<Q5_1>(type), choose<Q8_0>(type), choose<Q2_K>(type);
    choose<Q3_K>(type), choose<Q4_K>(type), choose<Q5_K>(type), choose<Q6_K>(type), choose<IQ4_XS>(type);
    factor *= power_of_two(-RESULT_EXPONENT);
  }
  M40_INLINE float place(int piece, int c) const {
    const int offset = bits == 8   ? Bits8::offset(piece, c)
                       : bits == 6 ? Bits6::offset(piece, c)
                       : bits == 5 ? Bits5::offset(piece, c)
                                   : Bits4::offset(piece, c);
    return power_of_two(exponent - offset);
  }
};

struct StagedWriter {
  float* buffer;
  int batch;
  StagedAs as;

  M40_INLINE StagedWriter(float* buffer, int batch, int type) : buffer(buffer), batch(batch), as(type, batch) {}

  M40_INLINE float* chunk_of(int k) const { return buffer + (k >> 10) * (batch * (STAGED_CHUNK + STAGED_SUMS)); }
  M40_INLINE float* place_of(int row, int k) const {
    return chunk_of(k) + slot_of(row, k >> 5 & 31, batch) * STAGED_CHUNK + (k >> 2 & 7) * 128 + (k >> 5 & 31) * 4 + (k & 3);
  }
  M40_INLINE void put_sum(int row, int k, int half, float sum) const {
    const int unit = k >> 5 & 31;
    chunk_of(k)[batch * STAGED_CHUNK + sum_at(slot_of(row, unit, batch), half, unit, batch)] = sum * as.factor;
  }

  // Columns k..k+3 of a row. All lanes of a warp call it, neighbours with neighbouring columns; nothing is written unless
  // `inside`.
  M40_INLINE void put4(int row, int k, float4 v, bool inside) const {
    const int piece = k >> 2 & 7;
    if (inside) {
      *reinterpret_cast<float4*>(place_of(row, k)) = make_float4(
          v.x * as.place(piece, 0), v.y * as.place(piece, 1), v.z * as.place(piece, 2), v.w * as.place(piece, 3));
    }
    float sum = (v.x + v.y) + (v.z + v.w);
    sum += __shfl_xor_sync(M40_EVERYONE, sum, 1);
    sum += __shfl_xor_sync(M40_EVERYONE, sum, 2);
    const float other = __shfl_xor_sync(M40_EVERYONE, sum, 4);
    if (as.halves == 1) sum += other;
    if (inside && (as.halves == 1 ? piece : piece & 3) == 0) put_sum(row, k, piece >> 2, sum);
  }

  // Column k of a row: a warp holds a unit, a lane a column.
  M40_INLINE void put1(int row, int k, float v) const {
    *place_of(row, k) = v * as.place(k >> 2 & 7, k & 3);
    float sum = v;
#pragma unroll
    for (int mask = 1; mask < 16; mask <<= 1) sum += __shfl_xor_sync(M40_EVERYONE, sum, mask);
    const float other = __shfl_xor_sync(M40_EVERYONE, sum, 16);
    if (as.halves == 1) sum += other;
    if ((as.halves == 1 ? k & 31 : k & 15) == 0) put_sum(row, k, k >> 4 & 1, sum);
  }
};
