// project_q5_0_q5_1_r1, _r4, _r8: matrices of both types in one launch; see project.cuh.
#include "project.cuh"

M40_PROJECT(q5_0_q5_1, 2, 1, 1, Q5_0, Q5_1)
