// project_q4_k_r1, _r4, _r8 and gemm_q4_k; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q4_k, 2, 2, 1, Q4_K)
M40_GEMM(q4_k, Q4_K)
