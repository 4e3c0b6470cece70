// project_q5_k_q6_k_r1, _r4, _r8: matrices of both types in one launch; see project.cuh.
#include "project.cuh"

M40_PROJECT(q5_k_q6_k, 2, 1, 1, Q5_K, Q6_K)
