// How the resident route lays out shared memory, and how many blocks share a group: known to the
// chooser, which has to know what fits, and to the kernel.
#pragma once

#include <cstdint>

#include "gnsilu/spans.h"

namespace gnsilu {

struct Residence {
  int cluster = 1;                      // blocks that share a group, 1 below compute capability 9.0
  int64_t shared_memory_per_block = 0;  // bytes, the most that the GPU gives: Device's
};

// Offsets in bytes within a block's shared memory: its part of the group comes first.
struct ResidentLayout {
  int64_t moments;  // of all spans of the group
  int64_t affines;  // scale and shift of all channels of the group
  int64_t bytes;    // in all
};

constexpr int64_t kSpanMomentsBytes = 16;  // sizeof(SpanMoments), moments.h
constexpr int64_t kAffineBytes = 8;        // sizeof(Affine), numerics.h
// What the kernel declares besides.
constexpr int64_t kResidentStaticBytes = 64;

// cluster: blocks that share a group, each the same number of spans at most.
constexpr ResidentLayout resident_layout(const Spans& spans, int64_t channels_per_group,
                                         int64_t cluster) {
  const int64_t slice = 2 * ((spans.count + cluster - 1) / cluster) * spans.size;
  const int64_t affines = slice + kSpanMomentsBytes * spans.count;
  return {slice, affines, affines + kAffineBytes * channels_per_group};
}

}  // namespace gnsilu
