// Decode attention with ordinary loads; see attention_decode.cuh.
#include "attention_decode.cuh"
