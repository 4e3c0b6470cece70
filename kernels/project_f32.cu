// project_f32_r1, _r4, _r8 and gemm_f32; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(f32, 1, 1, 1, F32)
M40_GEMM(f32, F32)
