// Entry points for Python. One launch runs at a time in a process (signal handlers and stacks are shared): the caller
// holds a lock.
#pragma once
#include <numeric>

#include "checker.h"

namespace emu {

constexpr size_t kDynamicMap = 64 << 10;

inline char* map_pages(size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  return (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
}

// Dynamic shared memory ends, up to its 16-byte alignment, at a guard page.
inline char* dynamic_shared_end() {
  static char* const map = [] {
    char* p = map_pages(kDynamicMap + 2 * kGuardBytes);
    mprotect(p + kDynamicMap, 2 * kGuardBytes, PROT_NONE);
    return p;
  }();
  return map + kDynamicMap;
}

// Visits the blocks forward, in reverse, or in the order of a random affine permutation.
struct BlockOrder {
  uint64_t count, factor = 1, offset = 0;
  explicit BlockOrder(uint64_t count_) : count(count_) {
    if ((Order)launch.options.order == Order::reverse) factor = count - 1, offset = count - 1;
    if ((Order)launch.options.order != Order::random || count < 3) return;
    do factor = random_bits() % count;
    while (std::gcd(factor, count) != 1);
    offset = random_bits() % count;
  }
  uint64_t operator[](uint64_t i) const { return (uint64_t)(((unsigned __int128)i * factor + offset) % count); }
};

// A message, or empty. The limits are those of every card from compute capability 5.0 on.
inline std::string refuse_configuration(const uint32_t* grid, const uint32_t* block, uint32_t shared_bytes) {
  const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  if (!threads || threads > kMaxThreads || block[2] > 64 || !grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffffu ||
      grid[1] > 65535 || grid[2] > 65535) {
    char text[160];
    snprintf(text, sizeof text, "invalid launch configuration: grid (%u,%u,%u) block (%u,%u,%u)", grid[0], grid[1], grid[2],
             block[0], block[1], block[2]);
    return text;
  }
  if (shared_bytes > kMaxDynamicShared)
    return "dynamic shared memory of " + std::to_string(shared_bytes) + " bytes: sm_52 has " +
           std::to_string(kMaxDynamicShared) + " for a block";
  return {};
}

inline void run_grid(const uint32_t* grid, const uint32_t* block) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  for (unsigned i = 0; i < (unsigned)launch.threads; i++)
    fibers[i].index = {i % block[0], i / block[0] % block[1], i / (block[0] * block[1])};
  const uint32_t before = launch.block_id;
  const BlockOrder order((uint64_t)grid[0] * grid[1] * grid[2]);
  for (uint64_t i = 0; i < order.count && !launch.failed; i++) {
    const uint64_t linear = order[i];
    const uint64_t rest = linear / grid[0];
    blockIdx = {(unsigned)(linear % grid[0]), (unsigned)(rest % grid[1]), (unsigned)(rest / grid[1])};
    launch.block_id = before + 1 + (uint32_t)linear;
    // Shared memory starts undefined: a kernel that relies on zeros must see NaN.
    for (const SharedVariable& variable : shared_variables) memset(variable.begin, 0xFF, variable.size);
    if (launch.dynamic_shared_bytes) memset(launch.dynamic_shared, 0xFF, launch.dynamic_shared_bytes);
    traffic_of_next_block();
    run_block();
    if (!launch.failed) traffic_of_block_done();
  }
  launch.block_id = before + (uint32_t)order.count;
}

}  // namespace emu

// All modules of a process share one set of stacks: the first module makes it, the others are given it.
EMU_EXPORT void* emu_create_stacks() {
  using namespace emu;
  char* base = map_pages(kMaxThreads * kStackBytes);
  if (base == MAP_FAILED) return nullptr;
  for (int i = 0; i < kMaxThreads; i++) mprotect(base + (size_t)i * kStackBytes, kGuardBytes, PROT_NONE);
  return base;
}
EMU_EXPORT void emu_use_stacks(void* base) { emu::stacks.base = (char*)base; }

// A static __shared__ variable, found by the builder in the module's symbol table.
EMU_EXPORT void emu_add_shared(void* begin, uint64_t size, const char* name) {
  emu::shared_variables.push_back({(char*)begin, (size_t)size, name, {}});
}
EMU_EXPORT uint64_t emu_shared_count() { return emu::shared_variables.size(); }
EMU_EXPORT void* emu_module_base() { return __ehdr_start; }

extern "C" EMU_HIDDEN void* emu_dynamic_shared() { return emu::launch.dynamic_shared; }

// Returns 0, or 1 with the fault in `report`. `dimensions`: grid x, y, z, block x, y, z.
EMU_EXPORT int emu_launch(void (*kernel)(void**), const uint32_t* dimensions, uint32_t shared_bytes, void** arguments,
                          const EmuOptions* options, EmuReport* report) {
  using namespace emu;
  memset(report, 0, sizeof *report);
  const uint32_t *grid = dimensions, *block = dimensions + 3;
  const std::string refusal = refuse_configuration(grid, block, shared_bytes);
  if (!refusal.empty()) {
    snprintf(report->what, sizeof report->what, "%s", refusal.c_str());
    return 1;
  }
  launch.options = *options;
  launch.report = report;
  launch.kernel = kernel;
  launch.arguments = arguments;
  launch.threads = (int)(block[0] * block[1] * block[2]);
  launch.random_state = 0x9E3779B97F4A7C15ull ^ ((uint64_t)options->seed << 17 | options->seed);
  for (int i = 0; i < 8; i++) random_bits();  // small seeds differ in a few bits only
  launch.dynamic_shared_bytes = shared_bytes;
  launch.dynamic_shared = dynamic_shared_end() - ((shared_bytes + 15) & ~15u);
  launch.failed = false;
  prepare_checker();
  prepare_traffic();
  SignalGuard signals;
  FlushMode flush(true);
  run_grid(grid, block);
  if (!launch.failed) finish_traffic();
  return launch.failed;
}
