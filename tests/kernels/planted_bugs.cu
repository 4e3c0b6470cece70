// One bug a kernel, for the emulator to find (tests/test_emulator_faults.py), and a few kernels without one.
// x and y hold 128 floats, x[i] = i, n = 128, blocks of 128 threads.
#include <cuda_fp16.h>
#define KERNEL(name) extern "C" __global__ void name(const float* x, float* y, int n)

KERNEL(ok) {
  const int i = threadIdx.x;
  if (i < n) y[i] = x[i];
}
KERNEL(ok_atomic) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);
  __syncthreads();
  y[threadIdx.x] = (float)count;
}
KERNEL(ok_syncwarp) {
  __shared__ float s[128];
  const int i = threadIdx.x;
  s[i] = x[i];
  __syncthreads();
  if (i < 32) {
    float v = s[i] + s[i + 64];
    __syncwarp();
    s[i] = v;
    __syncwarp();
    v += s[(i + 1) & 31];
    __syncwarp();
    s[i] = v;
  }
  __syncthreads();
  y[i] = s[0];
}
// The last block to arrive adds up what the others left: ordered by fence and atomic.
extern "C" __global__ void ok_last_block(const float* x, float* partial, unsigned* arrived, float* y) {
  __shared__ unsigned ticket;
  partial[blockIdx.x] = x[blockIdx.x];
  __threadfence();
  ticket = atomicInc(arrived, gridDim.x - 1);
  if (ticket != gridDim.x - 1) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; i++) sum += partial[i];
  y[0] = sum;
}
// The same without the fence.
extern "C" __global__ void last_block_no_fence(const float* x, float* partial, unsigned* arrived, float* y) {
  partial[blockIdx.x] = x[blockIdx.x];
  if (atomicInc(arrived, gridDim.x - 1) != gridDim.x - 1) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; i++) sum += partial[i];  // BUG last_block_no_fence
  y[0] = sum;
}

KERNEL(read_past_end) {
  const int i = threadIdx.x;
  if (i < n) y[i] = x[i + 1];  // BUG read_past_end
}
KERNEL(write_past_end) {
  const int i = threadIdx.x + blockIdx.x * blockDim.x;
  if (i <= n) y[i] = 1.f;  // BUG write_past_end
}
KERNEL(read_before_start) {
  const int i = threadIdx.x;
  if (i < n) y[i] = x[i - 1];  // BUG read_before_start
}
KERNEL(shared_index) {
  __shared__ float s[16][16];
  const int i = threadIdx.x;
  s[i / 16][i % 16] = x[i];
  __syncthreads();
  y[i] = s[0][(i & 15) + 1];  // BUG shared_index
}
KERNEL(shared_pointer) {
  __shared__ float s[128];
  __shared__ float t[128];
  const int i = threadIdx.x;
  s[i] = x[i];
  t[i] = 0;
  __syncthreads();
  const float* p = s;
  y[i] = p[i + (n - 126)] + t[i];  // BUG shared_pointer
}
template <int N>
__device__ void overrun(const float* x, float* y, int n) {
  __shared__ float s[N];
  __shared__ float t[N];
  const int i = threadIdx.x;
  s[i] = x[i];
  t[i] = 0;
  __syncthreads();
  const float* p = s;
  y[i] = p[i + (n - 126)] + t[i];  // BUG shared_pointer_in_template
}
KERNEL(shared_pointer_in_template) { overrun<128>(x, y, n); }
KERNEL(dynamic_shared_overrun) {
  extern __shared__ float d[];
  const int i = threadIdx.x;
  d[i] = x[i];
  __syncthreads();
  y[i] = d[i + 1];  // BUG dynamic_shared_overrun
}
KERNEL(no_barrier_before_read) {
  __shared__ float s[128];
  const int i = threadIdx.x;
  s[i] = x[i];
  y[i] = s[127 - i];  // BUG no_barrier_before_read
}
KERNEL(no_barrier_before_overwrite) {
  __shared__ float s[128];
  const int i = threadIdx.x;
  float sum = 0;
  for (int k = 0; k < 3; k++) {
    s[i] = x[i] + k;
    __syncthreads();
    sum += s[127 - i];  // BUG no_barrier_before_overwrite
  }
  y[i] = sum;
}
KERNEL(barrier_in_branch) {
  if (threadIdx.x < 64) __syncthreads();  // BUG barrier_in_branch
  y[threadIdx.x] = 1;
}
KERNEL(two_barriers) {
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    __syncthreads();  // BUG two_barriers
  }
  y[threadIdx.x] = 1;
}
KERNEL(exit_before_barrier) {
  if (threadIdx.x >= 100) return;
  __syncthreads();  // BUG exit_before_barrier
  y[threadIdx.x] = 1;
}
KERNEL(shuffle_in_branch) {
  float v = x[threadIdx.x];
  if ((threadIdx.x & 31) < 16) v += __shfl_xor_sync(0xffffffffu, v, 1);  // BUG shuffle_in_branch
  y[threadIdx.x] = v;
}
KERNEL(shuffle_with_exited) {
  if (threadIdx.x >= 120) return;
  const float v = x[threadIdx.x];
  y[threadIdx.x] = v + __shfl_down_sync(0xffffffffu, v, 1);  // BUG shuffle_with_exited
}
KERNEL(shuffle_from_outside_mask) {
  const float v = x[threadIdx.x];
  if ((threadIdx.x & 31) < 16) y[threadIdx.x] = __shfl_sync(0xffffu, v, 20);  // BUG shuffle_from_outside_mask
}
KERNEL(element_not_written) {
  if (threadIdx.x != 77) y[threadIdx.x] = x[threadIdx.x];
}
KERNEL(shared_not_written) {
  __shared__ float s[128];
  const int i = threadIdx.x;
  if (i < 64) s[i] = x[i];
  __syncthreads();
  y[i] = s[i];  // BUG shared_not_written
}
KERNEL(misaligned_float4) {
  const int i = threadIdx.x;
  if (i < 16) {
    const float4 v = *reinterpret_cast<const float4*>(x + 4 * i + 1);  // BUG misaligned_float4
    y[i] = v.x + v.w;
  }
}
// Q8_0's blocks are 34 bytes: their quants are not aligned to 4.
KERNEL(misaligned_q8_0) {
  const char* block = reinterpret_cast<const char*>(x) + 34 * (threadIdx.x & 3);
  y[threadIdx.x] = (float)*reinterpret_cast<const int*>(block + 2);  // BUG misaligned_q8_0
}
KERNEL(no_syncwarp) {
  __shared__ volatile float s[128];
  const int i = threadIdx.x;
  s[i] = x[i];
  __syncthreads();
  if (i < 32) {
    s[i] += s[i + 64];
    s[i] += s[i + 16];  // BUG no_syncwarp
  }
  __syncthreads();
  y[i] = s[0];
}
KERNEL(blocks_write_same) {
  y[threadIdx.x] = x[threadIdx.x] + blockIdx.x;  // BUG blocks_write_same
}
KERNEL(add_without_atomic) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  sum += x[threadIdx.x];  // BUG add_without_atomic
  __syncthreads();
  y[threadIdx.x] = sum;
}
KERNEL(write_to_const) {
  const_cast<float*>(x)[threadIdx.x] = 1.f;  // BUG write_to_const
}
KERNEL(endless) {
  volatile float* p = y;
  while (p[0] != 3.f) {  // BUG endless
  }
}
KERNEL(division_by_zero) {
  y[threadIdx.x] = (float)(7 / (n - 128 + (int)threadIdx.x));  // BUG division_by_zero
}
KERNEL(stack_overflow) {
  volatile float big[40000];
  for (int i = 0; i < 40000; i++) big[i] = x[i & 127];
  y[threadIdx.x] = big[n];
}
KERNEL(trap) {
  if (x[threadIdx.x] == 5.f) __trap();  // BUG trap
}
