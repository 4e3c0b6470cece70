"""Every tolerance of the test suite, one line each, with where it comes from. Loosening one is a commit of its own."""

# Attention and element-wise ops on the CPU, against float64, for inputs of standard deviation 1
ATTENTION = 4e-6  # a score is a float32 sum of HD products, off by about 1e-6, and so is every weight; measured 1.2e-6
ATTENTION_EXTREME = 3e-3  # scores near 1e4 have an ulp of 1e-3, which is a relative error of their weights
ROPE = 1e-6  # two float32 products and a sum of numbers up to 4: 3 roundings of 1.2e-7 · 4
RMSNORM = 3e-7  # relative: float64 sum, then the rounding of the factor and of two products, 6e-8 each
SWIGLU = 5e-7  # relative: exp is off by 2 ulp, then one sum, one division, one product
