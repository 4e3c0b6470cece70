// project_f16_r1, _r4, _r8 and gemm_f16; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(f16, 2, 2, 2, F16)
M40_GEMM(f16, F16)
