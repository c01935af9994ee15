// The middle of a ring block: from the spans of all blocks to a group's scales and shifts. See
// ring.cu.
#pragma once

#include "exchange.cuh"
#include "ring_block.cuh"

namespace gnsilu {

// By one warp: the moments of a group, from those of its spans as they come in. The order of
// merge_moments().
__device__ __forceinline__ GroupMoments gather_moments(const RingBlock& block, uint32_t group) {
  constexpr uint32_t kAtOnce = 4;  // spans a lane
  const GroupRange& range = block.range;
  const uint64_t* const words = block.moments(group);
  const uint32_t spans = static_cast<uint32_t>(range.spans);
  double origin = 0;
  SpanSums sums;
#pragma unroll 1
  for (uint32_t first = threadIdx.x % kWarp; first - threadIdx.x % kWarp < spans;
       first += kAtOnce * kWarp) {
    uint64_t found[kAtOnce][2];
    uint32_t missing = 0;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (first + kWarp * i < spans) missing |= 1u << i;
    }
    for (uint32_t looks = 0; __any_sync(0xffffffffu, missing != 0); count_look(looks)) {
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (missing >> i & 1) load_pair(words + 2 * (first + kWarp * i), found[i]);
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const bool is_there = found[i][0] != kAbsent && found[i][1] != kAbsent;
        if ((missing >> i & 1) && is_there) missing &= ~(1u << i);
      }
    }
    if (first == threadIdx.x % kWarp) {
      origin = __shfl_sync(0xffffffffu, double_from_bits(found[0][0]), 0);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t span = first + kWarp * i;
      if (span < spans) {
        sums.add({double_from_bits(found[i][0]), double_from_bits(found[i][1])},
                 block.span_size(span), origin);
      }
    }
  }
  return merged(sums, origin, range.inverse_group_size);
}

// By one warp, for every block.
__device__ __forceinline__ void publish(const RingBlock& block, uint32_t group,
                                        const Normalisation& n) {
  uint64_t* const words = block.normalisation(group);
  if (threadIdx.x % kWarp != 0) return;
  store_pair(words, message(n.rstd), message(n.correction));
  const uint64_t centring =
      uint64_t{float_bits(n.centring.offset)} << 32 | float_bits(n.centring.scale);
  store_pair(words + 2, centring == kAbsent ? centring - 1 : centring,
             static_cast<uint32_t>(n.exponent));
}

// By one warp: what publish() wrote, maybe in another block.
__device__ __forceinline__ Normalisation await_normalisation(const RingBlock& block,
                                                             uint32_t group) {
  const uint64_t* const words = block.normalisation(group);
  uint64_t word;
  for (uint32_t looks = 0;; count_look(looks)) {
    word = load_word(words + threadIdx.x % kNormalisationWords);
    if (__all_sync(0xffffffffu, word != kAbsent)) break;
    __nanosleep(kPause);
  }
  const auto from = [&](int i) { return __shfl_sync(0xffffffffu, word, i); };
  Normalisation n;
  n.rstd = double_from_bits(from(0));
  n.correction = double_from_bits(from(1));
  const uint64_t centring = from(2);
  n.centring.scale = float_from_bits(static_cast<uint32_t>(centring));
  n.centring.offset = float_from_bits(static_cast<uint32_t>(centring >> 32));
  n.exponent = static_cast<int>(static_cast<uint32_t>(from(3)));
  return n;
}

// By one warp: until the block has published so many of its spans.
__device__ __forceinline__ void await_own_spans(RingShared& s, uint32_t spans) {
  uint32_t published = 0;
  for (uint32_t looks = 0;; count_look(looks)) {
    if (threadIdx.x % kWarp == 0) published = atomicAdd_block(&s.published, 0);
    if (__shfl_sync(0xffffffffu, published, 0) >= spans) break;
    __nanosleep(kPause);
  }
  __threadfence_block();
}

// kFinishWarps warps, which take the groups that the block has a part of in turn: scales and
// shifts. The block that has a group's last span merges its moments for all.
__device__ __forceinline__ void finish_groups(const RingBlock& block, uint32_t which) {
  RingShared& s = block.shared;
  const GroupRange& range = block.range;
  const uint32_t lane = threadIdx.x % kWarp;
  constexpr uint32_t kRows = kRingMaxChannels / kWarp;  // a lane
  uint32_t spans = 0;                                   // of this block, to the end of the group
  for (Walk walk = Walk::begin(range); walk.in(block.grid);) {
    const uint32_t local = walk.local, group = walk.group, buffer = local % kGroupBuffers;
    bool merges = false;
    for (; walk.local == local; walk.next_span(range, block.grid), ++spans) {
      merges |= walk.last_span(range);
    }
    if (local % kFinishWarps != which) continue;
    // Under way while the moments come together.
    const uint32_t in_sample = group_in_sample(range, group);
    RawParameters parameters[kRows];
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
      const uint32_t row = min(lane + kWarp * i, range.channels_per_group - 1);
      parameters[i] = RawParameters::load(range, in_sample, row);
    }
    Normalisation normalisation;
    // The result cannot be there before the block's own part: until then, spare the memory. And
    // nothing can, before the first.
    await_own_spans(s, merges ? 1 : spans);
    if (merges) {
      const GroupMoments moments = gather_moments(block, group);
      normalisation = normalisation_of(moments.variance, moments.centre, range.eps);
      publish(block, group, normalisation);
    } else {
      normalisation = await_normalisation(block, group);
    }
    if (local >= kGroupBuffers) s.left[buffer].wait(parity(local, kGroupBuffers) ^ 1);
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
      const uint32_t row = lane + kWarp * i;
      if (row < range.channels_per_group) {
        s.affines[buffer][row] = parameters[i].affine(range, normalisation);
      }
    }
    if (lane == 0) s.centring[buffer] = normalisation.centring;
    s.ready[buffer].arrive();
  }
}

}  // namespace gnsilu
