// project_q2_k_r1, _r4, _r8 and gemm_q2_k; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q2_k, 2, 2, 1, Q2_K)
M40_GEMM(q2_k, Q2_K)
