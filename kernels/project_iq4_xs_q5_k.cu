// project_iq4_xs_q5_k_r1, _r4, _r8: matrices of both types in one launch; see project.cuh.
#include "project.cuh"

M40_PROJECT(iq4_xs_q5_k, 2, 1, 1, IQ4_XS, Q5_K)
