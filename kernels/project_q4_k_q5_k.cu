// project_q4_k_q5_k_r1, _r4, _r8: matrices of both types in one launch; see project.cuh.
#include "project.cuh"

M40_PROJECT(q4_k_q5_k, 2, 1, 1, Q4_K, Q5_K)
