// RMSNorm with loads through the read-only cache; see norm.cuh.
#define M40LLM_LDG
#include "norm.cuh"
