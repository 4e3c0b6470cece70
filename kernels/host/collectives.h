// Warp collectives: a lane waits until every lane of its mask has arrived at the same operation with the same mask.
#pragma once
#include "scheduler.h"

namespace emu {

inline int lowest(uint32_t lanes) { return __builtin_ctz(lanes); }

// Lanes of the group for which `holds(fiber)`.
template <class Predicate>
uint32_t lanes_where(int first_fiber, uint32_t mask, Predicate holds) {
  uint32_t found = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    if (holds(fibers[first_fiber + lowest(rest)])) found |= rest & -rest;
  return found;
}

// All lanes are here: computes every lane's result.
inline void complete_collective(int first_fiber, uint32_t mask, uint32_t live, int operation, uintptr_t pc) {
  uint64_t common = 0;
  if (operation == EMU_BALLOT || operation == EMU_ANY || operation == EMU_ALL) {
    const uint32_t votes = lanes_where(first_fiber, mask, [](const Fiber& f) { return f.value != 0; });
    common = operation == EMU_BALLOT ? votes : operation == EMU_ANY ? votes != 0 : votes == mask;
  }
  // Only the whole warp's __syncwarp orders memory; a shuffle exchanges registers and promises nothing about memory.
  if (operation == EMU_SYNCWARP && mask == live) warps[first_fiber / kWarp].epoch++;
  if (mask == live) converged(first_fiber / kWarp);
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = lowest(rest);
    Fiber& fiber = fibers[first_fiber + lane];
    if (operation == EMU_SHUFFLE) {
      const int source = fiber.source_lane;
      if (source < 0 || source >= kWarp || !(mask >> source & 1))
        fail_in(first_fiber + lane, pc, "__shfl_*_sync: lane %d reads lane %d, which is not in mask 0x%08x", lane, source,
                mask);
      fiber.result = fibers[first_fiber + source].value;
    } else if (operation == EMU_MATCH_ANY) {
      fiber.result = lanes_where(first_fiber, mask, [&](const Fiber& f) { return f.value == fiber.value; });
    } else {
      fiber.result = common;
    }
    fiber.state = State::running;
  }
}

}  // namespace emu

extern "C" EMU_HIDDEN uint64_t emu_collective(uint32_t mask, int operation, uint64_t value, int source_lane) {
  using namespace emu;
  const uintptr_t pc = EMU_CALLER;
  const int lane = current % kWarp, first_fiber = current - lane, self_index = current;
  const char* name = collective_name(operation);
  if (!(mask >> lane & 1)) EMU_FAIL(pc, "%s: calling lane %d is not in mask 0x%08x", name, lane, mask);
  const int lanes = std::min(launch.threads - first_fiber, kWarp);
  const uint32_t live = lanes == kWarp ? ~0u : (1u << lanes) - 1;
  mask &= live;  // the hardware ignores lanes that do not exist
  Warp& warp = warps[current / kWarp];
  Fiber& self = fibers[current];
  self.mask = mask;
  self.operation = (uint8_t)operation;
  self.value = value;
  self.source_lane = (int16_t)source_lane;
  self.collective_pc = pc;
  self.state = State::at_collective;
  warp.waiting |= 1u << lane;
  launch.report->collectives++;
  // Compared with one lane that waits already: by induction all lanes of a group agree.
  const int peer = lowest(mask & warp.waiting);
  const Fiber& other = fibers[first_fiber + peer];
  if (other.mask != mask || other.operation != operation)
    EMU_FAIL(pc, "warp-collective mismatch: lane %d calls %s with mask 0x%08x, lane %d calls %s with mask 0x%08x", lane,
             name, mask, peer, collective_name(other.operation), other.mask);
  if ((warp.waiting & mask) != mask) {
    if (mask & warp.exited)
      EMU_FAIL(pc, "%s with mask 0x%08x names lane %d, which has exited", name, mask, lowest(mask & warp.exited));
    yield_current();
    return fibers[self_index].result;
  }
  warp.waiting &= ~mask;
  complete_collective(first_fiber, mask, live, operation, pc);
  for (uint32_t rest = mask & ~(1u << lane); rest; rest &= rest - 1) ready.push(first_fiber + lowest(rest));
  // In forward order the last arrival simply goes on; the other orders give everybody a chance to run first.
  if ((Order)launch.options.order != Order::forward) {
    ready.push(current);
    yield_current();
  }
  return fibers[self_index].result;
}
