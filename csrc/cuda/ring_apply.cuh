// The second half of a ring block: from x to y, and out. See ring.cu.
#pragma once

#include "ring_block.cuh"

namespace gnsilu {

// The team of this warp needs none of the block's groups left, left + 1, … below end any more. Each
// is waited for in turn, or a team that has no tile of several could leave one for the next.
__device__ __forceinline__ void leave_groups(RingShared& s, uint32_t& left, uint32_t end) {
  for (; left < end; ++left) {
    s.ready[left % kGroupBuffers].wait(parity(left, kGroupBuffers));
    __syncwarp();
    if (threadIdx.x % kWarp == 0) s.left[left % kGroupBuffers].arrive();
  }
}

// The element of these vectors whose z is the lowest: the least where scale is positive.
template <DType kX, int kVectors>
__device__ __forceinline__ float lowest_element(const Vector (&x)[kVectors], float scale) {
  uint4 found = x[0].bits;
  const auto reduce = [&](auto of_pairs) {
#pragma unroll
    for (int k = 1; k < kVectors; ++k) {
      found = {of_pairs(found.x, x[k].bits.x), of_pairs(found.y, x[k].bits.y),
               of_pairs(found.z, x[k].bits.z), of_pairs(found.w, x[k].bits.w)};
    }
    const uint32_t pair = of_pairs(of_pairs(found.x, found.y), of_pairs(found.z, found.w));
    return of_pairs(pair, pair >> 16);
  };
  const uint32_t lowest =
      scale > 0 ? reduce([](uint32_t a, uint32_t b) { return least_of_pairs<kX>(a, b); })
                : reduce([](uint32_t a, uint32_t b) { return greatest_of_pairs<kX>(a, b); });
  return to_float<kX>(static_cast<uint16_t>(lowest));
}

// Whether the short form of y serves all of these vectors of one channel. It fails for z below
// -kSiluShortLimit and for infinite z; above, the sigmoid rounds to 1 by itself. (x - mean) in
// units of the spread is at most the square root of the group's size.
template <DType kX, Activation kActivation, int kVectors>
__device__ __forceinline__ bool is_short(const Vector (&x)[kVectors], const Centring& centring,
                                         const Affine& affine) {
  if constexpr (kActivation == Activation::kNone) return true;
  const float lowest = centring(lowest_element<kX>(x, affine.scale));
  return fma_rn(lowest, affine.scale, affine.shift) > -kSiluShortLimit &&
         fabsf(affine.scale) < 0x1p100f && fabsf(affine.shift) < 0x1p100f;
}

template <DType kY>
__device__ __forceinline__ uint4 pack(const float (&y)[kVector]) {
  return {pack_pair<kY>(y[0], y[1]), pack_pair<kY>(y[2], y[3]), pack_pair<kY>(y[4], y[5]),
          pack_pair<kY>(y[6], y[7])};
}

// y of any vector. Out of line: the usual path fits the instruction cache better.
template <DType kX, DType kY, Activation kActivation>
__device__ __noinline__ uint4 normalise_any(uint4 x, uint32_t element, Rows rows, Centring centring,
                                            const Affine* affines) {
  float values[kVector];
  Vector{x}.unpack<kX>(values);
  normalise_across_rows<kActivation>(values, element, kVector, rows, centring, affines);
  return pack<kY>(values);
}

// Between the warps of a team.
__device__ __forceinline__ void sync_team(uint32_t team) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kTeamThreads) : "memory");
}

// From x to y, where is_short().
template <DType kX, DType kY, Activation kActivation, int kVectors>
__device__ __forceinline__ void apply_short(Vector (&vectors)[kVectors], const Centring& centring,
                                            const Affine& affine) {
#pragma unroll
  for (Vector& vector : vectors) {
    float values[kVector];
    vector.unpack<kX>(values);
    normalise(values, centring, affine);
    if constexpr (kActivation == Activation::kSilu) {
#pragma unroll
      for (float& value : values) value = silu_short(value);
    }
    vector.bits = pack<kY>(values);
  }
}

// A part of a tile, from its vector `begin` on, whose vectors begin + thread + kTeamThreads * k
// this thread holds: from x to y.
template <DType kX, DType kY, Activation kActivation>
__device__ __forceinline__ void apply_any(Vector (&vectors)[kPartVectors], const Tile& tile,
                                          uint32_t first, const Rows& rows,
                                          const Centring& centring, const Affine* affines) {
#pragma unroll
  for (uint32_t k = 0; k < kPartVectors; ++k) {
    const uint32_t v = first + kTeamThreads * k;
    if (v >= tile.vectors) break;
    vectors[k].bits = normalise_any<kX, kY, kActivation>(vectors[k].bits, tile.start + kVector * v,
                                                         rows, centring, affines);
  }
}

// A team's part of a tile, to the team's stage and out.
__device__ __forceinline__ void store_part(const RingBlock& block, const Tile& tile, uint32_t begin,
                                           uint32_t team, uint32_t thread,
                                           const Vector (&vectors)[kPartVectors]) {
  uint4* const stage = reinterpret_cast<uint4*>(block.stage(team));
  if (thread == 0) wait_for_reads();
  sync_team(team);
#pragma unroll
  for (uint32_t k = 0; k < kPartVectors; ++k) stage[thread + kTeamThreads * k] = vectors[k].bits;
  before_bulk_store();
  sync_team(team);
  if (thread != 0) return;
  const uint32_t count = min(tile.vectors - begin, kTeamThreads * kPartVectors);
  auto* const y = static_cast<uint16_t*>(block.range.y) + tile.offset;
  bulk_store(y + kVector * begin, stage, 16 * count);
}

// By one team. x comes into registers, which frees the slot while the group is still incomplete; y
// goes out a part at a time.
template <DType kX, DType kY, Activation kActivation>
__device__ __forceinline__ void apply_tile(const RingBlock& block, const RingSlot& at,
                                           uint32_t& left, uint32_t team, uint32_t thread) {
  RingShared& s = block.shared;
  s.full[at.slot].wait(at.phase);
  const Tile tile = s.tile[at.slot];
  const uint4* const in = reinterpret_cast<const uint4*>(block.elements(at.slot));
  Vector x[kTileParts][kPartVectors];  // beyond the last one what was there before: not stored
#pragma unroll
  for (uint32_t part = 0; part < kTileParts; ++part) {
#pragma unroll
    for (uint32_t k = 0; k < kPartVectors; ++k) {
      x[part][k].bits = in[thread + kTeamThreads * (kPartVectors * part + k)];
    }
  }
  __syncwarp();
  if (threadIdx.x % kWarp == 0) s.empty[at.slot].arrive();
  leave_groups(s, left, tile.local);

  const uint32_t buffer = tile.local % kGroupBuffers;
  s.ready[buffer].wait(parity(tile.local, kGroupBuffers));
  const Centring centring = s.centring[buffer];
  const Affine* const affines = s.affines[buffer];
  const Affine affine = affines[tile.row];
#pragma unroll
  for (uint32_t part = 0; part < kTileParts; ++part) {
    const uint32_t begin = kTeamThreads * kPartVectors * part;  // vectors
    if (begin >= tile.vectors) break;
    if (tile.one_row && is_short<kX, kActivation>(x[part], centring, affine)) {
      apply_short<kX, kY, kActivation>(x[part], centring, affine);
    } else {
      apply_any<kX, kY, kActivation>(x[part], tile, begin + thread, block.grid.rows, centring,
                                     affines);
    }
    store_part(block, tile, begin, team, thread, x[part]);
  }
}

// kApplyTeams teams, which take the block's tiles in turn.
template <DType kX, DType kY, Activation kActivation>
__device__ __forceinline__ void apply_tiles(const RingBlock& block, uint32_t team,
                                            uint32_t thread) {
  const GroupRange& range = block.range;
  const RingGrid& grid = block.grid;
  uint32_t left = 0;  // groups of this block
  RingSlot first;     // of the group
  uint32_t i = team;  // of the group's tiles
  for (Walk walk = Walk::begin(range); walk.in(grid); walk.next_group(range, grid)) {
    const GroupTiles group(walk.tiles_of_group(range, grid), grid);
    for (; i < group.tiles; i += kApplyTeams) {
      RingSlot at = first;
      at.advance(grid.slots, group.applied(i));
      apply_tile<kX, kY, kActivation>(block, at, left, team, thread);
    }
    i -= group.tiles;
    first.advance(grid.slots, group.tiles + group.again());
  }
  if (thread == 0) wait_for_stores();
  leave_groups(block.shared, left, Walk::groups_of_block(range, grid));
}

}  // namespace gnsilu
