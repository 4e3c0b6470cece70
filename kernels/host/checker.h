// The checker: every load, store and atomic of an instrumented module passes check_access() with its address, size and
// place in the code. In traffic mode it is counted (traffic.h), and only bounds are checked.
//
// A race is two accesses of one byte, at least one of them a write, by threads whose order nothing establishes: within a
// block a barrier orders, within a warp also __syncwarp, between blocks only fence + atomic. Because order is judged and
// not observed, one run in any thread order finds the race.
#pragma once
#include "scheduler.h"
#include "traffic.h"

namespace emu {

enum class Access { read, write, atomic };

// What the last accesses of one byte were. Block ids grow over all launches, so entries of earlier launches (id at most
// first_block) and, in shared memory, of other blocks are recognised as stale: shadows are never cleared.
struct Shadow {
  uint32_t write_block, write_epoch, write_warp_epoch;
  uint32_t read_block, read_epoch, read_warp_epoch;
  uint16_t writer, reader;
  bool written_atomically;
  bool read_by_several_warps, read_by_several_lanes;
};

struct SharedVariable {
  char* begin;
  size_t size;
  std::string name;
  std::vector<Shadow> shadow;
};

// Bytes that the launch may write, overlapping ranges merged, with shadow pages given out at the first touch.
struct WritableRegion {
  uintptr_t begin, end;
  std::vector<Shadow*> pages;
};
constexpr size_t kShadowPage = 1024;  // bytes of device memory

inline std::vector<SharedVariable> shared_variables;
inline std::vector<Shadow> dynamic_shadow;
inline std::vector<WritableRegion> regions;
inline std::vector<std::unique_ptr<Shadow[]>> page_pool;
inline size_t pages_in_use;
inline uint32_t first_block;  // ids of this launch's blocks are greater

// Release and acquire between blocks, coarsely: what a block wrote before a __threadfence() is visible to a block that
// has executed an atomic on device memory. This is the "last block to arrive combines" idiom, and no more.
inline std::unordered_map<uint32_t, uint32_t> fenced_epoch;  // block id -> barrier_epoch of its last fence
inline uint32_t block_of_last_atomic;

inline void prepare_checker() {
  const EmuOptions& options = launch.options;
  first_block = launch.block_id;
  fenced_epoch.clear();
  block_of_last_atomic = 0;
  pages_in_use = 0;
  regions.clear();
  for (SharedVariable& variable : shared_variables) variable.shadow.resize(variable.size);
  if (dynamic_shadow.size() < launch.dynamic_shared_bytes) dynamic_shadow.resize(launch.dynamic_shared_bytes);
  std::vector<std::pair<uintptr_t, uintptr_t>> writable;
  for (uint64_t i = 0; i < options.range_count; i++)
    if (options.ranges[i].writable) writable.emplace_back(options.ranges[i].begin, options.ranges[i].end);
  std::sort(writable.begin(), writable.end());
  for (const auto& [begin, end] : writable) {
    if (!regions.empty() && begin <= regions.back().end)
      regions.back().end = std::max(regions.back().end, end);
    else
      regions.push_back({begin, end, {}});
  }
  for (WritableRegion& region : regions) region.pages.assign((region.end - region.begin) / kShadowPage + 1, nullptr);
}

inline Shadow& shadow_of(WritableRegion& region, uintptr_t address) {
  const size_t offset = address - region.begin;
  Shadow*& page = region.pages[offset / kShadowPage];
  if (!page) {
    if (pages_in_use == page_pool.size()) page_pool.emplace_back(new Shadow[kShadowPage]());
    page = page_pool[pages_in_use++].get();
  }
  return page[offset % kShadowPage];
}

inline bool ordered_after(uint32_t block, uint32_t epoch) {
  if (block_of_last_atomic != launch.block_id) return false;
  const auto fence = fenced_epoch.find(block);
  return fence != fenced_epoch.end() && fence->second >= epoch;
}

// Where an access lies, for the report.
struct Place {
  const char* name;
  size_t offset;
  bool shared;
};

inline bool conflicts_with_write(const Shadow& s, bool shared) {
  const int warp = current / kWarp;
  if (s.write_block != launch.block_id)
    return !shared && s.write_block > first_block && !ordered_after(s.write_block, s.write_epoch);
  if (s.write_epoch != barrier_epoch || s.writer == current) return false;
  return s.writer / kWarp != warp || s.write_warp_epoch == warps[warp].epoch;
}

inline bool conflicts_with_read(const Shadow& s, bool shared) {
  const int warp = current / kWarp;
  if (s.read_block != launch.block_id)
    return !shared && s.read_block > first_block && !ordered_after(s.read_block, s.read_epoch);
  if (s.read_epoch != barrier_epoch) return false;
  if (s.read_by_several_warps || s.reader / kWarp != warp) return true;
  return s.read_warp_epoch == warps[warp].epoch && (s.read_by_several_lanes || s.reader != current);
}

inline void record_read(Shadow& s) {
  const int warp = current / kWarp;
  if (s.read_block != launch.block_id || s.read_epoch != barrier_epoch) {
    s.read_block = launch.block_id, s.read_epoch = barrier_epoch;
    s.reader = (uint16_t)current, s.read_warp_epoch = warps[warp].epoch;
    s.read_by_several_warps = s.read_by_several_lanes = false;
  } else if (s.reader / kWarp != warp) {
    s.read_by_several_warps = true;
  } else if (s.read_warp_epoch != warps[warp].epoch) {
    s.reader = (uint16_t)current, s.read_warp_epoch = warps[warp].epoch;
    s.read_by_several_lanes = false;
  } else if (s.reader != current) {
    s.read_by_several_lanes = true;
  }
}

inline void check_order(Shadow& s, Access access, const Place& place, uintptr_t pc) {
  const char* verb = access == Access::read ? "read" : "write";
  if (conflicts_with_write(s, place.shared) && !(access == Access::atomic && s.written_atomically))
    EMU_FAIL(pc, "race: %s of %s+%zu conflicts with the write by %sthread %u in the same barrier interval", verb,
             place.name, place.offset, s.write_block != launch.block_id ? "another block's " : "", s.writer);
  if (access == Access::read) {
    if (place.shared && s.write_block != launch.block_id)
      EMU_FAIL(pc, "read of uninitialised %s+%zu", place.name, place.offset);
    record_read(s);
    return;
  }
  if (conflicts_with_read(s, place.shared))
    EMU_FAIL(pc, "race: write of %s+%zu conflicts with a read by %sthread %u in the same barrier interval", place.name,
             place.offset, s.read_block != launch.block_id ? "another block's " : "", s.reader);
  s.write_block = launch.block_id, s.write_epoch = barrier_epoch;
  s.writer = (uint16_t)current, s.write_warp_epoch = warps[current / kWarp].epoch;
  s.written_atomically = access == Access::atomic;
}

[[noreturn]] inline void fail_out_of_bounds(uintptr_t address, size_t size, const char* verb, uintptr_t pc) {
  const uintptr_t section = (uintptr_t)__start_emu_shared, section_end = (uintptr_t)__stop_emu_shared;
  if (address >= section && address < section_end)
    EMU_FAIL(pc, "out-of-bounds %s of %zu byte(s) between two __shared__ variables", verb, size);
  const uintptr_t dynamic = (uintptr_t)launch.dynamic_shared, dynamic_end = dynamic + launch.dynamic_shared_bytes;
  if (launch.dynamic_shared_bytes && address + size > dynamic && address < dynamic_end + 4096)
    EMU_FAIL(pc, "out-of-bounds %s of %zu byte(s) at offset %zu of dynamic shared memory (size %zu)", verb, size,
             (size_t)(address - dynamic), launch.dynamic_shared_bytes);
  const EmuRange* nearest = nullptr;
  uintptr_t distance = 1 << 30;
  for (uint64_t i = 0; i < launch.options.range_count; i++) {
    const EmuRange& range = launch.options.ranges[i];
    const uintptr_t d = address >= range.end ? address - range.end : address < range.begin ? range.begin - address : 0;
    if (d < distance) distance = d, nearest = &range;
  }
  if (nearest)
    EMU_FAIL(pc, "out-of-bounds %s of %zu byte(s) at offset %ld of buffer '%s' (size %zu)", verb, size,
             (long)(address - nearest->begin), nearest->name, (size_t)(nearest->end - nearest->begin));
  EMU_FAIL(pc, "wild %s at %p", verb, (void*)address);
}

// The range of a buffer that contains the access, or null.
inline const EmuRange* find_range(uintptr_t address, size_t size, bool writes) {
  static uint64_t last;
  const auto fits = [&](const EmuRange& r) {
    return address >= r.begin && address + size <= r.end && (!writes || r.writable);
  };
  const EmuRange* ranges = launch.options.ranges;
  const uint64_t count = launch.options.range_count;
  if (last < count && fits(ranges[last])) return &ranges[last];
  for (uint64_t i = 0; i < count; i++)
    if (fits(ranges[i])) return &ranges[last = i];
  return nullptr;
}

inline void check_bytes(Shadow* s, size_t size, Access access, Place place, uintptr_t pc) {
  for (size_t i = 0; i < size; i++, place.offset++) check_order(s[i], access, place, pc);
}

inline void check_access(uintptr_t address, size_t size, Access access, uintptr_t pc) {
  if (!launch.in_kernel || stacks.contains(address)) return;
  launch.report->accesses++;
  const bool races = launch.options.races, writes = access != Access::read;
  const char* verb = writes ? "write" : "read";
  for (SharedVariable& variable : shared_variables) {
    const size_t offset = address - (uintptr_t)variable.begin;
    if (offset >= variable.size) continue;
    if (offset + size > variable.size)
      EMU_FAIL(pc, "out-of-bounds %s of %zu byte(s) at offset %zu of __shared__ '%s' (size %zu)", verb, size, offset,
               variable.name.c_str(), variable.size);
    if (launch.options.traffic) record_traffic(address, size, Space::shared, 0, !writes, writes, pc);
    if (races) check_bytes(&variable.shadow[offset], size, access, {variable.name.c_str(), offset, true}, pc);
    return;
  }
  const size_t dynamic_offset = address - (uintptr_t)launch.dynamic_shared;
  if (dynamic_offset < launch.dynamic_shared_bytes && dynamic_offset + size <= launch.dynamic_shared_bytes) {
    const Place place{"dynamic shared memory", dynamic_offset, true};
    if (launch.options.traffic) record_traffic(address, size, Space::shared, 0, !writes, writes, pc);
    if (races) check_bytes(&dynamic_shadow[dynamic_offset], size, access, place, pc);
    return;
  }
  if (const EmuRange* range = find_range(address, size, writes)) {
    if (access == Access::atomic) block_of_last_atomic = launch.block_id;
    if (launch.options.traffic) {
      const size_t index = (size_t)(range - launch.options.ranges);
      record_traffic(address, size, Space::global, index, access != Access::write, writes, pc);
    }
    if (!races) return;
    for (WritableRegion& region : regions) {
      if (address < region.begin || address >= region.end) continue;
      for (size_t i = 0; i < size && address + i < region.end; i++)
        check_order(shadow_of(region, address + i), access, {range->name, address + i - range->begin, false}, pc);
      return;
    }
    return;  // nothing writes it in this launch
  }
  if (writes)
    if (const EmuRange* range = find_range(address, size, false))
      EMU_FAIL(pc, "write to read-only buffer '%s' at byte %zu", range->name, (size_t)(address - range->begin));
  const bool in_section = address >= (uintptr_t)__start_emu_shared && address < (uintptr_t)__stop_emu_shared;
  // __constant__ and __device__ variables, tables, threadIdx.
  if (!in_section && address >= (uintptr_t)__ehdr_start && address < (uintptr_t)_end) return;
  fail_out_of_bounds(address, size, verb, pc);
}

}  // namespace emu

extern "C" EMU_HIDDEN void emu_atomic_access(const volatile void* address, size_t size) {
  if (!emu::launch.options.races && !emu::launch.options.traffic) return;
  emu::check_access((uintptr_t)address, size, emu::Access::atomic, EMU_CALLER);
}
extern "C" EMU_HIDDEN void emu_fence() {
  if (emu::launch.options.races) emu::fenced_epoch[emu::launch.block_id] = emu::barrier_epoch;
}
