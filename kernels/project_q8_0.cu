// project_q8_0_r1, _r4, _r8 and gemm_q8_0; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q8_0, 2, 2, 1, Q8_0)
M40_GEMM(q8_0, Q8_0)
