#pragma once
#define TYPED(T, BLOCK)                                                                                             \
  extern "C" __global__ void __launch_bounds__(BLOCK, 2)                                                            \
      typed_##T##_##BLOCK(const T* __restrict__ a, T* b, T const* __restrict__ c, float f, const double d, char k,   \
                          unsigned char l, short m, unsigned short n, int o, unsigned p, long long q,               \
                          unsigned long long r, bool s, size_t t) {}
#define FOR_EACH_TYPE(M, BLOCK) M(float, BLOCK) M(int, BLOCK)
