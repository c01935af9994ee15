// How the resident route lays out shared memory, and how many blocks share a group: known to the
// chooser, which has to know what fits, and to the kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gnsilu/spans.h"

namespace gnsilu {

// Offsets in bytes within a block's shared memory: its part of the group comes first.
struct ResidentLayout {
  uint32_t moments;  // of all spans of the group
  uint32_t affines;  // scale and shift of all channels of the group
  uint32_t bytes;    // in all
};

constexpr int64_t kSpanMomentsBytes = 16;  // sizeof(SpanMoments), moments.h
constexpr int64_t kAffineBytes = 8;        // sizeof(Affine), numerics.h
// What the kernel declares besides.
constexpr int64_t kResidentStaticBytes = 64;

constexpr int64_t resident_bytes(const Spans& spans, int64_t channels_per_group, int cluster) {
  const int64_t spans_per_block = (spans.count + cluster - 1) / cluster;
  return 2 * spans_per_block * spans.size + kSpanMomentsBytes * spans.count +
         kAffineBytes * channels_per_group;
}

// For what fits: below 2^32 bytes.
constexpr ResidentLayout resident_layout(const Spans& spans, int64_t channels_per_group,
                                         int cluster) {
  const int64_t slice = 2 * ((spans.count + cluster - 1) / cluster) * spans.size;
  const int64_t affines = slice + kSpanMomentsBytes * spans.count;
  return {static_cast<uint32_t>(slice), static_cast<uint32_t>(affines),
          static_cast<uint32_t>(affines + kAffineBytes * channels_per_group)};
}

}  // namespace gnsilu
