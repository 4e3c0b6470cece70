// What a .cu file may use, for g++: force-included in front of every kernel module that the emulator builds.
// Only names that NVRTC offers too may be added here, with the device's meaning; anything else would let a kernel pass
// the tests and fail on the card.
#pragma once
#include "device_types.h"

#include "device_math.h"
#include "device_memory.h"
#include "device_warp.h"

#include "device_half.h"
#include "kernel_entry.h"
