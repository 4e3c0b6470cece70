// project_q2_k_q3_k_r1, _r4, _r8: matrices of both types in one launch; see project.cuh.
#include "project.cuh"

M40_PROJECT(q2_k_q3_k, 2, 1, 1, Q2_K, Q3_K)
