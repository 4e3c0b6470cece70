// project_q4_0_r1, _r4, _r8 and gemm_q4_0; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q4_0, 2, 2, 1, Q4_0)
M40_GEMM(q4_0, Q4_0)
