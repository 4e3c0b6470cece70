#pragma once
// Stands in front of CUDA's own header: the emulator's half types are in device_half.h, which every module already has.
