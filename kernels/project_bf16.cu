// project_bf16_r1, _r4, _r8 and gemm_bf16; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(bf16, 2, 2, 2, BF16)
M40_GEMM(bf16, BF16)
