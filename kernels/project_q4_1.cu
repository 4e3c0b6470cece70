// project_q4_1_r1, _r4, _r8 and gemm_q4_1; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q4_1, 2, 2, 1, Q4_1)
M40_GEMM(q4_1, Q4_1)
