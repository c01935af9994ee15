// The first half of a ring block: tiles come in and are summed, spans are published. See ring.cu.
#pragma once

#include "exchange.cuh"
#include "ring_block.cuh"

namespace gnsilu {

// Fills slot after slot; one thread.
struct TileLoader {
  const RingBlock& block;
  RingSlot next = {}, landed = {};
  uint32_t count = 0;

  __device__ __forceinline__ Barrier& await_slot() {
    RingShared& s = block.shared;
    if (count++ >= block.grid.slots) s.empty[next.slot].wait(next.phase ^ 1);
    return s.full[next.slot];
  }

  // skip: tiles behind this one that are not to be summed.
  __device__ __forceinline__ void load(const Walk& walk, bool is_summed, bool is_applied,
                                       uint32_t skip) {
    RingShared& s = block.shared;
    const GroupRange& range = block.range;
    Barrier& full = await_slot();
    if (count > block.grid.in_flight) {
      s.full[landed.slot].wait(landed.phase);
      landed.advance(block.grid.slots);
    }
    // Who does not look at the tile does not give it back.
    if (!is_summed) s.empty[next.slot].arrive(kSumWarps);
    if (!is_applied) s.empty[next.slot].arrive(kTeamWarps);
    const uint32_t start = walk.start(range), size = walk.size(range);
    Tile& tile = s.tile[next.slot];
    tile.vectors = size / kVector;
    tile.start = start;
    tile.local = walk.local;
    tile.skip = static_cast<uint16_t>(skip);
    tile.last = walk.tile + 1 == walk.tiles(range, block.grid);
    tile.row = block.grid.rows.row_of(start);
    tile.one_row = (tile.row + 1) * range.spatial_size - start >= size;
    tile.offset = walk.offset(range);
    full.arrive_expecting(2 * size);
    bulk_load(block.elements(next.slot), range.x + tile.offset, 2 * size, &full);
    next.advance(block.grid.slots);
  }

  // For those who sum.
  __device__ __forceinline__ void end() {
    Barrier& full = await_slot();
    block.shared.tile[next.slot].vectors = 0;
    full.arrive();
  }
};

// One thread: from global memory into the ring.
__device__ __forceinline__ void load_tiles(const RingBlock& block) {
  TileLoader loader{block};
  for (Walk walk = Walk::begin(block.range); walk.in(block.grid);) {
    const GroupTiles group(walk.tiles_of_group(block.range, block.grid), block.grid);
    Walk again = walk;  // to the first tile that is read again
    for (uint32_t i = 0; i < group.tiles; ++i) {
      if (i == group.first()) again = walk;
      const bool is_last = i + 1 == group.tiles;
      loader.load(walk, true, group.is_kept(i), is_last ? group.again() : 0);
      walk.next_tile(block.range, block.grid);
    }
    for (uint32_t i = 0; i < group.again(); ++i) {
      loader.load(again, false, true, 0);
      again.next_tile(block.range, block.grid);
    }
  }
  loader.end();
}

// kSumWarps warps, a chain of every span each.
template <DType kX>
__device__ __forceinline__ void sum_tiles(const RingBlock& block, uint32_t chain) {
  RingShared& s = block.shared;
  const uint32_t lane = threadIdx.x % kWarp;
  ChainReader<kX, Unscaled> reader{};
  RingSlot at;
  uint32_t spans = 0;
  bool begins = true;  // a span
  while (true) {
    s.full[at.slot].wait(at.phase);
    const uint32_t vectors = s.tile[at.slot].vectors, skip = s.tile[at.slot].skip;
    const bool last = s.tile[at.slot].last;
    if (vectors == 0) break;
    const uint16_t* const x = block.elements(at.slot);
    if (begins) reader = {{}, static_cast<double>(to_float<kX>(x[0])), {}};
    // Of each tile its chain has one block.
    reader.template read_chain<kChunkVectors>(
        kBlockVectors * chain, vectors, [&](uint32_t v) { return load_aligned(x + kVector * v); });
    __syncwarp();
    if (lane == 0) s.empty[at.slot].arrive();
    at.advance(block.grid.slots, 1 + skip);
    begins = last;
    if (!last) continue;
    const uint32_t buffer = spans % kSpanBuffers;
    if (spans >= kSpanBuffers) s.taken[buffer].wait(parity(spans, kSpanBuffers) ^ 1);
    s.sums[buffer][chain][lane] = reader.chunks.sums;
    if (chain == 0 && lane == 0) s.pivot[buffer] = reader.pivot;
    s.summed[buffer].arrive();
    ++spans;
  }
}

// One warp: the moments of the block's spans, for all blocks. Its first lane waits until all blocks
// have cleared the exchange, which they have, as a rule, before the first span is summed.
template <DType kX>
__device__ __forceinline__ void publish_spans(const RingBlock& block) {
  RingShared& s = block.shared;
  const GroupRange& range = block.range;
  const uint32_t lane = threadIdx.x % kWarp;
  GridBarrier cleared;
  if (lane == 0) cleared = GridBarrier::arrive(block.grid.barrier);
  uint32_t j = 0;
  for (Walk walk = Walk::begin(range); walk.in(block.grid);
       walk.next_span(range, block.grid), ++j) {
    const double size = block.span_size(walk.span);
    const double inverse_size = 1.0 / size;
    const uint32_t buffer = j % kSpanBuffers;
    s.summed[buffer].wait(parity(j, kSpanBuffers));
    LaneSums sums;
#pragma unroll
    for (uint32_t chain = 0; chain < kSpanChains; ++chain) sums.add(s.sums[buffer][chain][lane]);
    const double pivot = s.pivot[buffer];
    __syncwarp();
    if (lane == 0) s.taken[buffer].arrive();
    const SpanMoments moments =
        checked<kX>(moments_of(warp_sum(sums), pivot, size, inverse_size),
                    range.x + walk.offset(range), static_cast<uint32_t>(size));
    if (lane == 0) {
      if (j == 0) cleared.wait();
      store_pair(block.moments(walk.group) + 2 * walk.span, message(moments.mean),
                 message(moments.squares));
      __threadfence_block();
      atomicExch_block(&s.published, j + 1);
    }
    __syncwarp();
  }
  if (lane == 0 && j == 0) cleared.wait();  // before the block ends: see GridBarrier
}

}  // namespace gnsilu
