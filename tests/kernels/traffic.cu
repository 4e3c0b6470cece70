// Known traffic, for the tests of the emulator's counting. One block of 64 unless said otherwise.

// out[i] = in[i], 16 bytes a thread.
extern "C" __global__ void __launch_bounds__(256) copy_f32x4(const float4* in, float4* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[i];
}

// A warp reads every `stride`-th float.
extern "C" __global__ void __launch_bounds__(256) strided_f32(const float* in, float* out, int stride) {
  out[threadIdx.x] = in[threadIdx.x * stride];
}

// Thread t reads as many values as t % 2 + 1: the second access is made by half of the lanes.
extern "C" __global__ void __launch_bounds__(256) divergent_f32(const float* in, float* out) {
  float sum = 0.f;
  for (int i = 0; i <= (threadIdx.x & 1); i++) sum += in[i * 1024 + threadIdx.x];
  out[threadIdx.x] = sum;
}

// Thread t writes word t * write_pitch of shared memory, then reads word t * read_pitch.
extern "C" __global__ void __launch_bounds__(64) shared_f32(float* out, int write_pitch, int read_pitch) {
  __shared__ float words[64 * 33];
  words[threadIdx.x * write_pitch] = (float)threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = words[threadIdx.x * read_pitch];
}

// The same with 16-byte words.
extern "C" __global__ void __launch_bounds__(64) shared_f32x4(float4* out, int write_pitch, int read_pitch) {
  __shared__ float4 words[64 * 9];
  words[threadIdx.x * write_pitch] = make_float4(1.f, 2.f, 3.f, 4.f);
  __syncthreads();
  out[threadIdx.x] = words[threadIdx.x * read_pitch];
}

extern "C" __global__ void __launch_bounds__(64) count_u32(unsigned* counter) { atomicAdd(counter, 1u); }
