// The emulator's runtime: state shared by its parts. The parts are compiled as one unit (runtime.cpp), once per compiler,
// without instrumentation, and linked into every kernel module.
//
//   context_switch.h  jump from one stack to another
//   scheduler.h       fibers: one CUDA thread each; barriers; who runs next
//   collectives.h     shuffles, votes, __syncwarp
//   checker.h         bounds, races, uninitialised shared memory
//   traffic.h         in traffic mode: bytes moved, bank conflicts
//   sanitizer_hooks.h the compiler's instrumentation calls, routed to the checker
//   faults.h          reporting; signals; the time limit
//   launch.h          the entry points that Python calls
#pragma once
#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#define EMU_HIDDEN __attribute__((visibility("hidden")))
#define EMU_EXPORT extern "C" __attribute__((visibility("default")))
enum EmuCollective : int { EMU_SHUFFLE, EMU_BALLOT, EMU_ANY, EMU_ALL, EMU_SYNCWARP, EMU_MATCH_ANY };
enum EmuReduction : int { EMU_COUNT, EMU_AND, EMU_OR };

struct uint3 {
  unsigned x, y, z;
};
extern "C" {
EMU_HIDDEN uint3 threadIdx, blockIdx, blockDim, gridDim;
// Bounds of this module in memory and of its section of shared variables; the linker defines them.
EMU_HIDDEN extern char __ehdr_start[], _end[];
EMU_HIDDEN extern char __start_emu_shared[] __attribute__((weak)), __stop_emu_shared[] __attribute__((weak));
}

// The structures that Python fills or reads (m40llm/device/emulator_module.py has the same fields in the same order).
struct EmuRange {
  uintptr_t begin, end;
  const char* name;
  uint32_t writable, reserved;
};
struct EmuRangeTraffic {
  uint64_t read, written, dram_read;  // bytes between L2 and the multiprocessors, and from DRAM
};
struct EmuPlaceTraffic {
  uint64_t pc, accesses, passes, least;  // of shared memory, by a warp
};
struct EmuTraffic {
  void* l2;
  uint64_t blocks_at_once;
  EmuRangeTraffic* ranges;  // one for each of the options' ranges, zero at the start
  EmuPlaceTraffic* places;
  uint64_t place_capacity, place_count;
  uint64_t loads, stores;            // warp accesses of device memory
  uint64_t dram_read, dram_written;  // sectors
  uint64_t shared_accesses, shared_passes, shared_least;
};
struct EmuOptions {
  uint32_t order;       // Order
  uint32_t seed;        // of Order::random
  uint32_t races;       // 1: the checker keeps a shadow of every byte
  uint32_t timeout_ms;  // 0: none
  const EmuRange* ranges;
  uint64_t range_count;
  EmuTraffic* traffic;  // null: accesses are checked, not counted
};
struct EmuReport {
  uint64_t switches, collectives, barriers, accesses;
  uint64_t fault_pc;  // 0: not known
  uint32_t block[3], thread[3];
  char source[256];  // "file:line" where the fault names a barrier, else empty
  char what[768];
};

namespace emu {

constexpr int kMaxThreads = 1024;
constexpr int kWarp = 32;
// Address space, not memory: a thread touches about two pages. The lowest page of each is a guard.
constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kGuardBytes = 4096;
constexpr uint32_t kMaxDynamicShared = 48 << 10;  // sm_52

enum class Order : uint32_t { forward, reverse, random };

struct Stacks {
  char* base = nullptr;  // kMaxThreads stacks of kStackBytes
  bool contains(uintptr_t address) const { return address - (uintptr_t)base < kMaxThreads * kStackBytes; }
};

struct Launch {
  EmuOptions options;
  EmuReport* report;
  void (*kernel)(void**);
  void** arguments;
  int threads;         // of a block
  uint32_t block_id;   // linear block index + 1
  uint64_t random_state;
  char* dynamic_shared;
  size_t dynamic_shared_bytes;
  bool failed;
  volatile sig_atomic_t in_kernel;
};

inline Stacks stacks;
inline Launch launch;

inline uint32_t random_bits() {  // xorshift64
  uint64_t& s = launch.random_state;
  s ^= s << 13, s ^= s >> 7, s ^= s << 17;
  return (uint32_t)(s >> 16);
}

}  // namespace emu
