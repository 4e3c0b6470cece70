// project_iq4_xs_r1, _r4, _r8 and gemm_iq4_xs; see project.cuh and gemm.cuh.
#include "gemm.cuh"

M40_PROJECT(iq4_xs, 2, 2, 1, IQ4_XS)
M40_GEMM(iq4_xs, IQ4_XS)
