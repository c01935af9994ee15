// How a group is cut for its statistics. A span is a run of consecutive elements of one group that
// one warp sums; its size is a function of the group's size alone, so that the bits of the result
// depend neither on the batch, the grid nor the launch configuration, and the routes that share the
// spans and their merge agree.
#pragma once

#include <cstdint>

namespace gnsilu {

// Smallest span: 1 KB of a 16-bit type, 2 vectors of 8 elements a lane.
constexpr int64_t kMinSpan = 512;
// Spans double until there are at most this many a group: enough warps for a small group, few
// enough that merging them is quick (H200: 20 to 80 spans were the fastest from 0.03 to 0.5 MB).
constexpr int64_t kFewSpans = 64;
// 32 KB, where the work on a span hides everything around it: then their number grows.
constexpr int64_t kLongSpan = 16384;
// Groups of 0.5 MB and more are the ring's (ring.h), whose tile no span may be smaller than.
constexpr int64_t kLargeGroup = int64_t{1} << 18;
constexpr int64_t kLargeGroupSpan = 8192;
// Most spans a group: what every block merges before it can use the group's mean. Beyond it they
// double again. Up to 20 MB of a group are spans of 32 KB, of which the ring can share out evenly.
constexpr int64_t kMaxSpans = 640;
// A chain (numerics.h) adds at most 2^16 elements, or BF16's largest values would overflow FP32;
// a lane has 4 chains and a warp 32 lanes.
constexpr int64_t kMaxSpan = int64_t{1} << 23;
// Offsets inside a group are 32-bit.
constexpr int64_t kMaxGroupSize = (int64_t{1} << 32) - 1;
static_assert(kMaxGroupSize <= kMaxSpan * kMaxSpans, "every group has spans");

struct Spans {
  int64_t size = kMinSpan;  // elements, a power of two; the group's last span may be shorter
  int64_t count = 0;        // spans a group
};

// For 0 <= group_size <= kMaxGroupSize.
constexpr Spans spans_of(int64_t group_size) {
  int64_t size = kMinSpan;
  while (size < kLongSpan && size * kFewSpans < group_size) size *= 2;
  if (group_size >= kLargeGroup && size < kLargeGroupSpan) size = kLargeGroupSpan;
  while (size * kMaxSpans < group_size) size *= 2;
  return {size, (group_size + size - 1) / size};
}

}  // namespace gnsilu
