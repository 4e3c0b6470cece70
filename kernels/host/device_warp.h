// Warp collectives: all of them are one call of the runtime, which waits for the lanes of the mask.
#pragma once
#include "device_types.h"

EMU_INLINE int emu_lane() { return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31); }

template <class T>
EMU_INLINE T emu_shuffle(unsigned mask, T value, int source_lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2, "the device shuffles 2, 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emu_collective(mask, EMU_SHUFFLE, bits, source_lane);
  memcpy((void*)&value, &bits, sizeof(T));
  return value;
}
template <class T>
EMU_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emu_shuffle(mask, value, (emu_lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
EMU_INLINE T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = emu_lane(), source = lane ^ lane_mask;
  return emu_shuffle(mask, value, source >= (lane & ~(width - 1)) + width ? lane : source);
}
template <class T>
EMU_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emu_lane();
  return emu_shuffle(mask, value, (lane & (width - 1)) + (int)delta >= width ? lane : lane + (int)delta);
}
template <class T>
EMU_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = emu_lane();
  return emu_shuffle(mask, value, (lane & (width - 1)) < (int)delta ? lane : lane - (int)delta);
}
EMU_INLINE unsigned __ballot_sync(unsigned mask, int p) {
  return (unsigned)emu_collective(mask, EMU_BALLOT, p != 0, 0);
}
EMU_INLINE int __any_sync(unsigned mask, int p) { return (int)emu_collective(mask, EMU_ANY, p != 0, 0); }
EMU_INLINE int __all_sync(unsigned mask, int p) { return (int)emu_collective(mask, EMU_ALL, p != 0, 0); }
EMU_INLINE void __syncwarp(unsigned mask = 0xffffffffu) { emu_collective(mask, EMU_SYNCWARP, 0, 0); }
#if __CUDA_ARCH__ >= 700
template <class T>
EMU_INLINE unsigned __match_any_sync(unsigned mask, T value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return (unsigned)emu_collective(mask, EMU_MATCH_ANY, bits, 0);
}
#endif
