// project_q5_1_q8_0_r1, _r4, _r8: matrices of both types in one launch; see project.cuh.
#include "project.cuh"

M40_PROJECT(q5_1_q8_0, 2, 1, 1, Q5_1, Q8_0)
