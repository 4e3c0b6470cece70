// project_q6_k_r1, _r4, _r8 and gemm_q6_k; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q6_k, 2, 2, 1, Q6_K)
M40_GEMM(q6_k, Q6_K)
