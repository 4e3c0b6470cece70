// Decode attention that loads K and V through the read-only cache; see attention_decode.cuh.
#define M40LLM_LDG
#include "attention_decode.cuh"
