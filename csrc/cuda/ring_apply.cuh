// The second half of a ring block: from x to y. See ring.cu.
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

// y of any vector. Out of line: the usual path fits the instruction cache better.
template <DType kX, DType kY, Activation kActivation>
__device__ __noinline__ void apply_any(uint4 x, typename Stored<kY>::Type* y, uint32_t element,
                                       Rows rows, Centring centring, const Affine* affines) {
  float values[kVector];
  Vector{x}.unpack<kX>(values);
  normalise_across_rows<kActivation>(values, element, kVector, rows, centring, affines);
  store_vector<kY>(y, values);
}

// Where is_short().
template <DType kX, DType kY, Activation kActivation>
__device__ __forceinline__ void apply_short(const Vector& x, typename Stored<kY>::Type* y,
                                            const Centring& centring, const Affine& affine) {
  float values[kVector];
  x.unpack<kX>(values);
  normalise(values, centring, affine);
  if constexpr (kActivation == Activation::kSilu) {
#pragma unroll
    for (float& value : values) value = silu_short(value);
  }
  store_vector<kY>(y, values);
}

// By one team. x comes into registers, which frees the slot while the group is still incomplete.
template <DType kX, DType kY, Activation kActivation>
__device__ __forceinline__ void apply_tile(const RingBlock& block, const RingSlot& at,
                                           uint32_t& left, uint32_t thread) {
  RingShared& s = block.shared;
  s.full[at.slot].wait(at.phase);
  const Tile tile = s.tile[at.slot];
  const uint4* const in = reinterpret_cast<const uint4*>(block.elements(at.slot));
  Vector x[kThreadVectors];  // beyond the last one what was there before: not stored
#pragma unroll
  for (uint32_t k = 0; k < kThreadVectors; ++k) x[k].bits = in[thread + kTeamThreads * k];
  __syncwarp();
  if (threadIdx.x % kWarp == 0) s.empty[at.slot].arrive();
  leave_groups(s, left, tile.local);

  const uint32_t buffer = tile.local % kGroupBuffers;
  s.ready[buffer].wait(parity(tile.local, kGroupBuffers));
  const Centring centring = s.centring[buffer];
  const Affine* const affines = s.affines[buffer];
  const Affine affine = affines[tile.row];
  auto* const y =
      static_cast<typename Stored<kY>::Type*>(block.range.y) + tile.offset + kVector * thread;
  const bool all_short = tile.one_row && tile.vectors == kTileVectors &&
                         is_short<kX, kActivation>(x, centring, affine);
#pragma unroll
  for (uint32_t first = 0; first < kThreadVectors; first += kPartVectors) {
    if (all_short) {  // asked anew, or the compiler works on all parts at once, which is slower
#pragma unroll
      for (uint32_t k = first; k < first + kPartVectors; ++k) {
        apply_short<kX, kY, kActivation>(x[k], y + kVector * kTeamThreads * k, centring, affine);
      }
      continue;
    }
#pragma unroll
    for (uint32_t k = first; k < first + kPartVectors; ++k) {
      const uint32_t v = thread + kTeamThreads * k;
      if (v >= tile.vectors) break;
      apply_any<kX, kY, kActivation>(x[k].bits, y + kVector * kTeamThreads * k,
                                     tile.start + kVector * v, block.grid.rows, centring, affines);
    }
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
      apply_tile<kX, kY, kActivation>(block, at, left, thread);
    }
    i -= group.tiles;
    first.advance(grid.slots, group.tiles + group.again());
  }
  leave_groups(block.shared, left, Walk::groups_of_block(range, grid));
}

}  // namespace gnsilu
