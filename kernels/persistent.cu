// Prototype: one launch that stays, and works through entries that the host posts meanwhile.
//
//   persistent_worker  entry: op, n, x, y, a → y[i] = a * x[i] + y[i] for n float32 of `area` (x, y: places in it), or stop
//
// control: [0] entries posted (host), [1] entries done (device). entries: `capacity` × 8 words, a ring: op, n, x, y, a, unused.
// arrived: `capacity` counters, zero before the start, zero again after each entry.
//
// Grid: at most the blocks that are resident at once, for all of them wait for the host; block: 256. Thread 0 polls, a block
// does its share of an entry and goes on to the next: two entries in flight must not depend on each other. All loads of what
// the host or another block writes are volatile: L1 would keep what it saw first.

#define PERSISTENT_THREADS 256
#define PERSISTENT_WORDS 8  // of an entry
#define PERSISTENT_STOP 0u
#define PERSISTENT_AXPY 1u

extern "C" __global__ void __launch_bounds__(PERSISTENT_THREADS)
persistent_worker(unsigned* control, const unsigned* entries, unsigned* arrived, float* area, int capacity) {
  for (unsigned ticket = 0;; ticket++) {
    if (threadIdx.x == 0) {
      while (*(volatile unsigned*)control == ticket) {
      }
      __threadfence();  // the entry was written before it was posted
    }
    __syncthreads();
    const unsigned place = ticket % (unsigned)capacity;
    const volatile unsigned* const entry = entries + place * PERSISTENT_WORDS;
    const unsigned op = entry[0], n = entry[1];
    if (op == PERSISTENT_AXPY) {
      const volatile float* const x = area + entry[2];
      volatile float* const y = area + entry[3];
      const float a = __uint_as_float(entry[4]);
      for (unsigned i = blockIdx.x * PERSISTENT_THREADS + threadIdx.x; i < n; i += gridDim.x * PERSISTENT_THREADS)
        y[i] = fmaf(a, x[i], y[i]);
    }
    __threadfence();
    __syncthreads();  // the block's share is done and visible, and nobody still reads the entry
    if (threadIdx.x == 0 && atomicInc(arrived + place, gridDim.x - 1) == gridDim.x - 1) {
      __threadfence();
      atomicAdd(control + 1, 1u);
    }
    if (op == PERSISTENT_STOP) return;
  }
}
