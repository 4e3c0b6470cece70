// project_q3_k_r1, _r4, _r8 and gemm_q3_k; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q3_k, 2, 2, 1, Q3_K)
M40_GEMM(q3_k, Q3_K)
