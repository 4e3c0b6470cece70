// project_q5_0_r1, _r4, _r8 and gemm_q5_0; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q5_0, 2, 2, 2, Q5_0)
M40_GEMM(q5_0, Q5_0)
