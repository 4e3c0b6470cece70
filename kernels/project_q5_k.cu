// project_q5_k_r1, _r4, _r8 and gemm_q5_k; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(q5_k, 2, 2, 2, Q5_K)
M40_GEMM(q5_k, Q5_K)
