// How the ring route lays out shared memory and how many blocks it takes: known to the chooser,
// which has to know what fits, and to the kernel.
#pragma once

#include <cstdint>

#include "gnsilu/spans.h"

namespace gnsilu {

constexpr int64_t kRingTile = 8192;   // elements of x, 16 KB: what moves through the ring
constexpr int64_t kRingStage = 4096;  // elements of y, 8 KB: what leaves at once
constexpr int kRingStages = 3;
constexpr int kRingMaxSlots = 12;               // tiles that a block holds
constexpr int64_t kRingMaxChannels = 64;        // a group, whose scales and shifts a block holds
constexpr int64_t kRingStaticBytes = 10 << 10;  // at most: what the kernel declares besides

struct Ring {
  int blocks = 0;  // one a multiprocessor; all run at once
  int slots = 0;   // tiles of x in a block's shared memory
};

constexpr int64_t ring_bytes(int slots) {
  return 2 * (kRingTile * slots + kRingStage * kRingStages);
}

// The ring of a GPU with so many multiprocessors and bytes of shared memory a block.
constexpr Ring ring_of(int sm_count, int64_t shared_memory_per_block) {
  const int64_t room = shared_memory_per_block - kRingStaticBytes - ring_bytes(0);
  const int64_t slots = room > 0 ? room / (2 * kRingTile) : 0;
  return {sm_count, static_cast<int>(slots < kRingMaxSlots ? slots : kRingMaxSlots)};
}

// Whether the ring holds every block's share of a group, and the next span on its way: a tile is
// given back only when its group is complete, so what does not fit would wait for ever.
constexpr bool fits_ring(const Spans& spans, const Ring& ring) {
  if (ring.blocks < 1 || spans.size % kRingTile != 0) return false;
  const int64_t share = (spans.count + ring.blocks - 1) / ring.blocks;
  return (share + 1) * (spans.size / kRingTile) <= ring.slots;
}

}  // namespace gnsilu
