// What the warps of a ring block share, and how they find their way: see ring.cu.
#pragma once

#include "async_copy.cuh"
#include "gnsilu/ring.h"
#include "kernels.h"
#include "normalise.cuh"
#include "warp_moments.cuh"

namespace gnsilu {

constexpr int kSumWarps = kSpanChains;   // a chain each
constexpr int kApplyTeams = kRingTeams;  // a tile each
constexpr int kTeamWarps = 4;
constexpr int kTeamThreads = kTeamWarps * kWarp;
constexpr int kFinishWarps = 2;                  // a group each
constexpr int kServiceWarps = 2 + kFinishWarps;  // loading, publishing
constexpr int kWorkWarps = kSumWarps + kApplyTeams * kTeamWarps;
constexpr uint32_t kTileVectors = kRingTile / kVector;
constexpr uint32_t kThreadVectors = kTileVectors / kTeamThreads;  // of a tile
constexpr uint32_t kPartVectors = 2;  // that a thread turns into y at a time
constexpr int kSpanBuffers = 1;       // spans between summing and publishing
constexpr int kGroupBuffers = 8;      // groups between finishing and leaving
static_assert(kThreadVectors % kPartVectors == 0, "whole parts");
static_assert(kTileVectors == kChainStride, "a tile has a block of each of the span's chains");
static_assert(kRingTeams <= kRingMinSlots && kRingMostInFlight <= kRingMinSlots,
              "a slot comes round again only after a team, or the loading thread, has seen it");
static_assert(kGroupBuffers % kFinishWarps == 0, "a buffer is always the same warp's");
static_assert(kRingThreads == (kServiceWarps + kWorkWarps) * kWarp, "the chooser tells it");

// What the loading thread tells those who take the tile in a slot: they need not find it
// themselves.
struct alignas(16) Tile {
  uint32_t vectors;  // 0: there are no more tiles
  uint32_t start;    // the first element, within its group
  uint32_t local;    // the group, by the block's own count
  uint16_t skip;     // tiles behind this one that are not to be summed
  bool last;         // of its span
  bool one_row;      // all elements are of one channel
  uint32_t row;      // channel of the first element, within the group
  int64_t offset;    // the first element, within x and y
};

struct RingShared {
  Tile tile[kRingMaxSlots];
  Barrier full[kRingMaxSlots];   // by slot: the tile has come
  Barrier empty[kRingMaxSlots];  // by slot: summed, and read by its team
  Barrier summed[kSpanBuffers];
  Barrier taken[kSpanBuffers];
  Barrier ready[kGroupBuffers];  // scales and shifts of the group are there
  Barrier left[kGroupBuffers];   // no team needs them any more
  LaneSums sums[kSpanBuffers][kSpanChains][kWarp];
  double pivot[kSpanBuffers];
  Affine affines[kGroupBuffers][kRingMaxChannels];
  Centring centring[kGroupBuffers];
  uint32_t published;  // spans of this block
};
static_assert(sizeof(RingShared) <= kRingStaticBytes, "the chooser counts it");

struct RingGrid {
  uint32_t groups;
  uint32_t slots;
  uint32_t kept;  // tiles of a group
  uint32_t in_flight;
  uint32_t span_tiles;
  uint32_t last_span_tiles;  // of a group's last span
  uint32_t jump_groups;      // blocks = jump_groups * spans + jump_spans
  uint32_t jump_spans;
  uint32_t barrier;  // of kGridBarriers: this launch's
  Rows rows;
};

// The spans of all groups form one row. Block b of n takes spans b, b + n, … of it, one after the
// other, and goes through the tiles of each: so all blocks have equal work, and work on the same
// groups at a time.
struct Walk {
  uint32_t group;
  uint32_t span;   // within the group
  uint32_t tile;   // within the span
  uint32_t local;  // groups of this block before this one

  static __device__ __forceinline__ Walk begin(const GroupRange& range) {
    const uint32_t spans = static_cast<uint32_t>(range.spans);
    return {blockIdx.x / spans, blockIdx.x % spans, 0, 0};
  }
  // From the block's first tile of a group on: how many there are.
  __device__ __forceinline__ uint32_t tiles_of_group(const GroupRange& range,
                                                     const RingGrid& grid) const {
    uint32_t count = 0;
    for (Walk walk = *this; walk.local == local; walk.next_span(range, grid)) {
      count += walk.tiles(range, grid);
    }
    return count;
  }
  // How many groups the block has a part of.
  static __device__ __forceinline__ uint32_t groups_of_block(const GroupRange& range,
                                                             const RingGrid& grid) {
    if (grid.jump_groups == 0) return grid.groups;  // at least one span of each
    const uint32_t spans = grid.groups * static_cast<uint32_t>(range.spans);
    return (spans - min(blockIdx.x, spans) + gridDim.x - 1) / gridDim.x;
  }
  __device__ __forceinline__ bool in(const RingGrid& grid) const { return group < grid.groups; }
  __device__ __forceinline__ bool last_span(const GroupRange& range) const {
    return span + 1 == static_cast<uint32_t>(range.spans);
  }
  __device__ __forceinline__ uint32_t tiles(const GroupRange& range, const RingGrid& grid) const {
    return last_span(range) ? grid.last_span_tiles : grid.span_tiles;
  }
  __device__ __forceinline__ void next_span(const GroupRange& range, const RingGrid& grid) {
    const uint32_t before = group;
    group += grid.jump_groups;
    span += grid.jump_spans;
    if (span >= static_cast<uint32_t>(range.spans)) {
      span -= static_cast<uint32_t>(range.spans);
      ++group;
    }
    if (group != before) ++local;
  }
  __device__ __forceinline__ void next_group(const GroupRange& range, const RingGrid& grid) {
    for (const uint32_t before = local; local == before;) next_span(range, grid);
  }
  __device__ __forceinline__ void next_tile(const GroupRange& range, const RingGrid& grid) {
    if (++tile < tiles(range, grid)) return;
    tile = 0;
    next_span(range, grid);
  }
  // The tile's first element within its group, and how many it has.
  __device__ __forceinline__ uint32_t start(const GroupRange& range) const {
    return span * range.span_size + tile * static_cast<uint32_t>(kRingTile);
  }
  __device__ __forceinline__ uint32_t size(const GroupRange& range) const {
    return min(static_cast<uint32_t>(kRingTile),
               static_cast<uint32_t>(range.group_size) - start(range));
  }
  __device__ __forceinline__ int64_t offset(const GroupRange& range) const {
    return group * range.group_size + start(range);
  }
};

// A slot of the ring, and how often the ring has been gone round.
struct RingSlot {
  uint32_t slot = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance(uint32_t slots, uint32_t count = 1) {
    for (slot += count; slot >= slots; phase ^= 1) slot -= slots;
  }
};

// In which order the tiles of a group come into the ring. What a block has beyond the tiles that it
// can keep passes by twice: to be summed, and behind all that, to be applied. The teams take the
// first tiles into registers and then wait for the group; what passes by has to be behind these and
// before the others, or a tile that nobody can take yet would stand in its way.
struct GroupTiles {
  uint32_t tiles;
  uint32_t kept;

  __device__ __forceinline__ GroupTiles(uint32_t all, const RingGrid& grid)
      : tiles(all), kept(min(all, grid.kept)) {}
  // Kept, for the teams' registers.
  __device__ __forceinline__ uint32_t first() const { return min(kept, uint32_t{kApplyTeams}); }
  // Read again: as many behind the first.
  __device__ __forceinline__ uint32_t again() const { return tiles - kept; }
  __device__ __forceinline__ bool is_kept(uint32_t i) const {
    return i < first() || i >= first() + again();
  }
  // Where the i-th tile to be applied lies, from the group's first on.
  __device__ __forceinline__ uint32_t applied(uint32_t i) const {
    return i < first() ? i : i + again();
  }
};

// The parity of the n-th use of one of `count` buffers.
__device__ __forceinline__ uint32_t parity(uint32_t n, uint32_t count) { return n / count & 1; }

// All that a warp is given.
struct RingBlock {
  const GroupRange& range;
  const RingGrid& grid;
  RingShared& shared;
  uint16_t* tiles;  // grid.slots

  __device__ __forceinline__ uint16_t* elements(uint32_t slot) const {
    return tiles + slot * static_cast<uint32_t>(kRingTile);
  }
  // Where the blocks put the moments of a group's spans, and the normalisation of a group: 4 words.
  __device__ __forceinline__ uint64_t* moments(uint32_t group) const {
    return reinterpret_cast<uint64_t*>(range.workspace.moments + group * int64_t{range.spans});
  }
  __device__ __forceinline__ uint64_t* normalisation(uint32_t group) const {
    return range.workspace.normalisations + kNormalisationWords * group;
  }
  __device__ __forceinline__ double span_size(uint32_t span) const {
    const bool last = span + 1 == static_cast<uint32_t>(range.spans);
    return static_cast<double>(
        last ? range.group_size - static_cast<int64_t>(span) * range.span_size : range.span_size);
  }
};

}  // namespace gnsilu
