// project_q5_1_r1, _r4, _r8 and gemm_q5_1; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q5_1, 2, 2, 2, Q5_1)
M40_GEMM(q5_1, Q5_1)
