// How the ring route lays out shared memory and how many blocks it takes: known to the chooser,
// which has to know what fits, and to the kernel.
#pragma once

#include <cstdint>

#include "gnsilu/spans.h"

namespace gnsilu {

constexpr int64_t kRingTile = kLargeGroupSpan;  // elements of x, 16 KB: what moves through the ring
constexpr int kRingTeams = 3;                   // of warps that write y, a tile each
constexpr int kRingThreads = 768;
constexpr int kRingMostInFlight = 3;
constexpr int kRingMinSlots = 4;
constexpr int kRingMaxSlots = 13;               // tiles that a block holds
constexpr int64_t kRingMaxChannels = 64;        // a group, whose scales and shifts a block holds
constexpr int64_t kRingStaticBytes = 10 << 10;  // at most: what the kernel declares besides

struct Ring {
  int blocks = 0;     // one a multiprocessor; all run at once
  int slots = 0;      // tiles of x in a block's shared memory
  int kept = 0;       // tiles of a group that a block keeps until they are applied
  int in_flight = 0;  // tiles that are on their way into shared memory at a time
};

constexpr int64_t ring_bytes(int slots) { return 2 * kRingTile * slots; }

// Tiles of a group that a block has at most.
constexpr int64_t ring_share(const Spans& spans, int blocks) {
  return (spans.count + blocks - 1) / blocks * (spans.size / kRingTile);
}

// Whether a block holds its share of a group and one span more, on its way: then everything is read
// once. The first tiles of a group that has still to be finished are in the registers of the teams
// that will write them, a tile each; the others in the slots.
constexpr bool is_read_once(const Spans& spans, const Ring& ring) {
  return ring_share(spans, ring.blocks) + spans.size / kRingTile <= ring.slots + kRingTeams;
}

// The ring for groups of these spans, on so many multiprocessors with so many bytes of shared
// memory a block. What is kept waits for its group: two slots are left for what is not, and passes
// by twice. The more loads are in flight, the longer each takes, and what the blocks tell each
// other, too: where a block waits for room rather than for data, 2 are the best (H200: x1.25
// instead of x1.29 at groups of 19 MB, but x1.18 instead of x1.11 at 8 MB); 4 are slower anywhere.
constexpr Ring ring_of(const Spans& spans, int blocks, int64_t shared_memory_per_block) {
  const int64_t room = shared_memory_per_block - kRingStaticBytes;
  const int64_t slots = room > 0 ? room / (2 * kRingTile) : 0;
  Ring ring{blocks, static_cast<int>(slots < kRingMaxSlots ? slots : kRingMaxSlots), 0, 0};
  ring.kept = ring.slots + kRingTeams - (is_read_once(spans, ring) ? 0 : 2);
  ring.in_flight =
      is_read_once(spans, ring) && ring_share(spans, blocks) >= 7 ? 2 : kRingMostInFlight;
  return ring;
}

// Whether the ring works. Who waits for a slot's next tile must know that the last one has come
// (async_copy.cuh). Of a group that is read once, a team knows it by its own tile's result. Where
// tiles are read again, a team waits as many tiles ahead as there are teams, of which as many may
// be under way, and those who sum look over all that are read again.
constexpr bool fits_ring(const Spans& spans, const Ring& ring) {
  if (ring.slots < kRingMinSlots || spans.size % kRingTile != 0) return false;
  const int64_t again = ring_share(spans, ring.blocks) - ring.kept;
  return again <= 0 || (ring.slots >= kRingTeams + kRingMostInFlight && again < ring.slots);
}

}  // namespace gnsilu
