// RMSNorm with ordinary loads; see norm.cuh.
#include "norm.cuh"
