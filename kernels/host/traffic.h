// Traffic: what a launch moves between multiprocessors, L2 and DRAM, and where shared memory serves a warp in several
// passes. Takes every access of an instrumented module (checker.h) in traffic mode instead of the checks.
//
// Warp accesses: the lanes of a warp execute one instruction together when their calls come from the same place in the code
// and are the same one in number since the lanes last met (at a barrier, or at a collective of the whole warp).
//
// L2: of sectors (32 bytes), fully associative, least recently used out first, written back at eviction, and a sector is not
// fetched to be written. It lasts from launch to launch. Blocks run one at a time here and many at once on the card, so the
// accesses of as many blocks as the card holds are kept and then fed in turns, one warp access of each.
//
// L1: none. What a block reads twice comes from L2 twice, also through the read-only cache, which would save some of it.
#pragma once
#include "scheduler.h"

namespace emu {

constexpr uintptr_t kSector = 32;
constexpr int kBanks = 32;

// In memory that belongs to Python (emu_l2_bytes of it), because each module has a runtime of its own.
struct L2 {
  struct Line {
    uint64_t sector;
    uint32_t newer, older;  // in the order of use, a ring through line 0
    uint32_t next;          // in the bucket; 0: the end
    uint32_t dirty;
  };
  uint32_t capacity, used, buckets, dirty;

  static uint32_t buckets_for(uint32_t capacity) {
    uint32_t n = 1;
    while (n < 2 * capacity) n *= 2;
    return n;
  }
  static size_t bytes(uint32_t capacity) {
    return sizeof(L2) + (capacity + 1) * sizeof(Line) + buckets_for(capacity) * sizeof(uint32_t);
  }
  Line* lines() { return (Line*)(this + 1); }
  uint32_t* heads() { return (uint32_t*)(lines() + capacity + 1); }
  uint32_t& head(uint64_t sector) { return heads()[(sector * 0x9E3779B97F4A7C15ull >> 32) & (buckets - 1)]; }

  void clear(uint32_t sectors) {
    memset((void*)this, 0, bytes(sectors));
    capacity = sectors, buckets = buckets_for(sectors);
  }
  void unlink(uint32_t i) {
    Line* l = lines();
    l[l[i].newer].older = l[i].older, l[l[i].older].newer = l[i].newer;
  }
  void make_newest(uint32_t i) {
    Line* l = lines();
    l[i].older = l[0].older, l[i].newer = 0;
    l[l[0].older].newer = i, l[0].older = i;
  }
  // Returns whether DRAM is read; adds to `written_back` if a dirty sector had to leave.
  bool access(uint64_t sector, bool write, uint64_t& written_back) {
    Line* l = lines();
    for (uint32_t i = head(sector); i; i = l[i].next) {
      if (l[i].sector != sector) continue;
      unlink(i), make_newest(i);
      if (write && !l[i].dirty) l[i].dirty = 1, dirty++;
      return false;
    }
    uint32_t i;
    if (used < capacity) {
      i = ++used;
    } else {
      i = l[0].newer;  // the ring's other end: the oldest
      unlink(i);
      uint32_t* link = &head(l[i].sector);
      while (*link != i) link = &l[*link].next;
      *link = l[i].next;
      if (l[i].dirty) written_back++, dirty--;
    }
    l[i].sector = sector, l[i].dirty = write, l[i].next = head(sector);
    head(sector) = i;
    dirty += write;
    make_newest(i);
    return !write;
  }
};

enum class Space : uint8_t { global, shared };

struct TrafficRecord {
  uintptr_t pc, address;
  uint16_t range, size;
  Space space;
  bool read, write;
};
struct Transaction {
  uint64_t sector;
  uint16_t range;
  bool write, last;  // of a warp access
};
struct WarpAccess {
  TrafficRecord first;
  int count = 0;
  uint8_t lane[kWarp];
  uintptr_t address[kWarp];
};
struct Passes {
  uint64_t accesses = 0, passes = 0, least = 0;
};

inline std::vector<TrafficRecord> traffic_log[kMaxThreads];  // since the lanes of the warp last met
inline std::vector<std::vector<Transaction>> resident;       // of the blocks that share the card
inline size_t resident_count;
inline std::unordered_map<uintptr_t, Passes> shared_places;

inline void prepare_traffic() {
  resident_count = 0;
  shared_places.clear();
  for (auto& log : traffic_log) log.clear();
}

inline void record_traffic(uintptr_t address, size_t size, Space space, size_t range, bool read, bool write, uintptr_t pc) {
  traffic_log[current].push_back({pc, address, (uint16_t)range, (uint16_t)size, space, read, write});
}

// A warp's 4-byte accesses are served at once, 8-byte ones by halves of the warp, 16-byte ones by quarters; each of those in
// as many passes as there are different words in one bank. Lanes that name the same word share it.
inline void count_banks(const WarpAccess& warp) {
  const int words = std::max(1, std::min(4, (int)warp.first.size / 4)), lanes = kWarp / words;
  uint64_t passes = 0, parts = 0;
  for (int at = 0; at < warp.count;) {
    const int part = warp.lane[at] / lanes;
    uintptr_t seen[kBanks][kWarp];
    int different[kBanks] = {}, most = 1;
    for (; at < warp.count && warp.lane[at] / lanes == part; at++) {
      for (int w = 0; w < words; w++) {
        const uintptr_t word = warp.address[at] / 4 + (uintptr_t)w;
        const int bank = (int)(word % kBanks);
        if (std::find(seen[bank], seen[bank] + different[bank], word) != seen[bank] + different[bank]) continue;
        seen[bank][different[bank]++] = word;
        most = std::max(most, different[bank]);
      }
    }
    passes += (uint64_t)most, parts++;
  }
  EmuTraffic& total = *launch.options.traffic;
  total.shared_accesses++, total.shared_passes += passes, total.shared_least += parts;
  Passes& place = shared_places[warp.first.pc];
  place.accesses++, place.passes += passes, place.least += parts;
}

inline void count_sectors(const WarpAccess& warp) {
  uint64_t sectors[4 * kWarp];
  int count = 0;
  bool ascending = true;
  for (int i = 0; i < warp.count; i++) {
    const uint64_t begin = warp.address[i] / kSector, end = (warp.address[i] + warp.first.size - 1) / kSector;
    for (uint64_t s = begin; s <= end && count < 4 * kWarp; s++) {
      if (count && s == sectors[count - 1]) continue;
      ascending = ascending && (!count || s > sectors[count - 1]);
      sectors[count++] = s;
    }
  }
  if (!ascending) {
    std::sort(sectors, sectors + count);
    count = (int)(std::unique(sectors, sectors + count) - sectors);
  }
  EmuTraffic& total = *launch.options.traffic;
  EmuRangeTraffic& range = total.ranges[warp.first.range];
  std::vector<Transaction>& block = resident[resident_count];
  const uint64_t bytes = (uint64_t)count * kSector;
  if (warp.first.read) total.loads++, range.read += bytes;
  if (warp.first.write) total.stores++, range.written += bytes;
  for (int i = 0; i < count; i++) {
    // an atomic is one operation in L2, which fetches the sector first
    if (warp.first.read) block.push_back({sectors[i], warp.first.range, false, i + 1 == count});
    if (warp.first.write) block.push_back({sectors[i], warp.first.range, true, i + 1 == count});
  }
}

inline void count_access(const WarpAccess& warp) {
  if (warp.first.space == Space::shared) count_banks(warp);
  else count_sectors(warp);
}

inline void add_lane(WarpAccess& warp, const TrafficRecord& record, int lane) {
  if (!warp.count) warp.first = record;
  warp.lane[warp.count] = (uint8_t)lane, warp.address[warp.count++] = record.address;
}

inline void sort_lanes(WarpAccess& warp) {
  for (int i = 1; i < warp.count; i++)
    for (int j = i; j > 0 && warp.lane[j] < warp.lane[j - 1]; j--) {
      std::swap(warp.lane[j], warp.lane[j - 1]);
      std::swap(warp.address[j], warp.address[j - 1]);
    }
}

// Every lane of the warp has come as far as the others: turns what they did since the last time into warp accesses.
inline void warp_converged(int warp) {
  const int first = warp * kWarp, lanes = std::min(kWarp, launch.threads - first);
  size_t at = 0, longest = 0;
  for (int l = 0; l < lanes; l++) longest = std::max(longest, traffic_log[first + l].size());
  for (; at < longest; at++) {  // as long as all lanes do the same
    WarpAccess access;
    bool same = true;
    for (int l = 0; l < lanes && same; l++) {
      const auto& log = traffic_log[first + l];
      if (at >= log.size()) continue;
      same = !access.count || log[at].pc == access.first.pc;
      if (same) add_lane(access, log[at], l);
    }
    if (!same) break;
    count_access(access);
  }
  if (at < longest) {
    std::vector<WarpAccess> accesses;
    std::unordered_map<uintptr_t, std::vector<size_t>> by_place;    // occurrence -> index of the access
    std::unordered_map<uintptr_t, size_t> occurrence[kWarp];
    for (; at < longest; at++) {
      for (int l = 0; l < lanes; l++) {
        const auto& log = traffic_log[first + l];
        if (at >= log.size()) continue;
        std::vector<size_t>& known = by_place[log[at].pc];
        const size_t number = occurrence[l][log[at].pc]++;
        if (number == known.size()) known.push_back(accesses.size()), accesses.emplace_back();
        add_lane(accesses[known[number]], log[at], l);
      }
    }
    for (WarpAccess& access : accesses) {
      sort_lanes(access);  // lanes that came to the place at different positions were not added in order
      count_access(access);
    }
  }
  for (int l = 0; l < lanes; l++) traffic_log[first + l].clear();
}

inline void converged(int warp) {
  if (launch.options.traffic) warp_converged(warp);
}
inline void all_converged() {
  if (!launch.options.traffic) return;
  for (int warp = 0; warp * kWarp < launch.threads; warp++) warp_converged(warp);
}

inline void feed_l2() {
  EmuTraffic& total = *launch.options.traffic;
  L2& l2 = *(L2*)total.l2;
  std::vector<size_t> at(resident_count, 0);
  for (bool more = true; more;) {
    more = false;
    for (size_t b = 0; b < resident_count; b++) {
      const std::vector<Transaction>& block = resident[b];
      while (at[b] < block.size()) {
        const Transaction& t = block[at[b]++];
        const bool fetched = l2.access(t.sector, t.write, total.dram_written);
        if (fetched) total.dram_read++, total.ranges[t.range].dram_read += kSector;
        if (t.last) break;
      }
      more |= at[b] < block.size();
    }
  }
  for (size_t b = 0; b < resident_count; b++) resident[b].clear();
  resident_count = 0;
}

// The next block's accesses go to resident[resident_count].
inline void traffic_of_next_block() {
  if (launch.options.traffic && resident.size() <= resident_count) resident.resize(resident_count + 1);
}
inline void traffic_of_block_done() {
  if (!launch.options.traffic) return;
  all_converged();
  if (++resident_count >= launch.options.traffic->blocks_at_once) feed_l2();
}
inline void finish_traffic() {
  EmuTraffic* total = launch.options.traffic;
  if (!total) return;
  feed_l2();
  total->place_count = 0;
  for (const auto& [pc, place] : shared_places) {
    if (total->place_count == total->place_capacity) break;
    total->places[total->place_count++] = {pc, place.accesses, place.passes, place.least};
  }
}

}  // namespace emu

EMU_EXPORT uint64_t emu_l2_bytes(uint32_t sectors) { return emu::L2::bytes(sectors); }
EMU_EXPORT void emu_l2_clear(void* l2, uint32_t sectors) { ((emu::L2*)l2)->clear(sectors); }
EMU_EXPORT uint64_t emu_l2_dirty(void* l2) { return ((emu::L2*)l2)->dirty; }
