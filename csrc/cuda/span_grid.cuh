// The grid of the statistics kernels: a warp a span, in blocks that do not cross groups.
#pragma once

#include "kernels.h"
#include "vectors.cuh"

namespace gnsilu {

struct SpanGrid {
  unsigned blocks;
  int blocks_per_group;
  int threads;  // a block; no more than the group has spans for
};

inline SpanGrid span_grid(const GroupRange& range, const Config& config) {
  const int warps = config.threads / kWarp < range.spans ? config.threads / kWarp : range.spans;
  const int blocks_per_group = (range.spans + warps - 1) / warps;
  return {static_cast<unsigned>(range.groups * blocks_per_group), blocks_per_group, kWarp * warps};
}

// The part of a block's group that the calling warp sums.
struct WarpSpan {
  const uint16_t* x;
  uint32_t size;    // elements; 0 for a warp beyond the group's last span
  int64_t partial;  // where the span's partial results lie in the workspace
};

__device__ __forceinline__ WarpSpan span_of_warp(const GroupRange& range, int64_t group,
                                                 int block) {
  const int span = block * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const int64_t start = static_cast<int64_t>(span) * range.span_size;
  const int64_t left = range.group_size - start;
  const int64_t size = left < range.span_size ? left : range.span_size;
  return {range.x + group * range.group_size + start, size > 0 ? static_cast<uint32_t>(size) : 0,
          group * range.spans + span};
}

}  // namespace gnsilu
