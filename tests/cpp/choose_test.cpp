// Routes, tilings and costs on invented problems and devices.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gnsilu/moments.h"
#include "gnsilu/numerics.h"
#include "gnsilu/plan.h"
#include "gnsilu/spans.h"

namespace gnsilu {
namespace {

Device gpu(int capability = 90, int sm_count = 132) {
  Device device;
  device.name = "Invented";
  device.sm_count = sm_count;
  device.capability_major = capability / 10;
  device.capability_minor = capability % 10;
  device.shared_memory_per_block = capability >= 90 ? 232448 : capability >= 80 ? 101376 : 65536;
  return device;
}

Problem problem(int64_t samples, int64_t channels, int64_t spatial_size, int64_t num_groups) {
  Problem p;
  p.samples = samples;
  p.channels = channels;
  p.spatial_size = spatial_size;
  p.num_groups = num_groups;
  p.on_cuda = true;
  return p;
}

const Problem kDecoder = problem(1, 256, 1024 * 1024, 32);

// Groups of 67 MB, more than any GPU's multiprocessors hold together.
const Problem kHuge = problem(1, 256, 4096 * 1024, 32);

const Route kFused[] = {Route::kThreePass, Route::kTwoPass, Route::kResident, Route::kRing};

TEST(Choose, TakesTwoPassForLargeGroups) {
  for (int capability : {75, 80, 86, 89, 90, 100, 120}) {
    for (int sm_count : {1, 14, 80, 132, 188}) {
      const Plan plan = choose(capability < 90 ? kDecoder : kHuge, gpu(capability, sm_count));
      EXPECT_EQ(plan.route, Route::kTwoPass);
      EXPECT_EQ(plan.bytes_per_element, 6);
      EXPECT_TRUE(plan.tunable());
      EXPECT_TRUE(is_candidate(plan.route, plan.config));
    }
  }
}

TEST(Choose, HoldsGroupsThatFitInSharedMemory) {
  for (int capability : {75, 80, 86, 89, 90, 100, 120}) {
    for (int sm_count : {1, 14, 80, 132, 188}) {
      const Device device = gpu(capability, sm_count);
      for (int64_t samples : {1, 2, 33, 5000}) {
        for (int64_t spatial : {64, 65, 1089, 4096, 16384, 65536}) {
          const Problem p = problem(samples, 512, spatial, 32);
          const Plan plan = choose(p, device);
          EXPECT_NE(plan.route, Route::kFallback);
          if (plan.route != Route::kResident) continue;
          EXPECT_EQ(plan.bytes_per_element, 4);
          EXPECT_EQ(plan.workspace_bytes, 0);
          EXPECT_EQ(plan.groups_per_launch, p.group_count());
          EXPECT_GE(plan.residence.cluster, 1);
          EXPECT_LE(plan.residence.cluster, capability >= 90 ? std::min(7, sm_count) : 1);
          EXPECT_LE(plan.residence.cluster, plan.spans.count);
          EXPECT_LE(
              resident_layout(plan.spans, p.channels_per_group(), plan.residence.cluster).bytes +
                  kResidentStaticBytes,
              device.shared_memory_per_block);
          EXPECT_TRUE(is_candidate(plan.route, plan.config));
          EXPECT_FALSE(plan.tunable());
        }
      }
    }
  }
  EXPECT_EQ(choose(problem(1, 512, 4096, 32), gpu()).residence.cluster, 7);
  Device jit = gpu();  // PTX of 8.0 on a 9.0: the code knows no clusters
  jit.has_clusters = false;
  EXPECT_EQ(choose(problem(1, 512, 4096, 32), jit).residence.cluster, 1);
  EXPECT_EQ(choose(problem(1, 512, 4096, 32), gpu(89)).route, Route::kTwoPass);
  EXPECT_EQ(choose(problem(1, 512, 2048, 32), gpu(89)).route, Route::kResident);
  EXPECT_EQ(choose(problem(1, 512, 96 * 160, 32), gpu()).route, Route::kResident);
  // Clusters that fill an SM each would take two turns, and 7 * 65535 is no multiple of 8.
  EXPECT_EQ(choose(problem(1, 252, 65535, 36), gpu()).route, Route::kTwoPass);
}

TEST(Choose, RefusesToHoldWhatDoesNotFit) {
  EXPECT_THROW(choose(kDecoder, gpu(), Route::kResident), std::invalid_argument);
}

struct Change {
  const char* reason;
  void (*apply)(Problem&, Device&);
};

TEST(Choose, SharesLargeGroupsAmongAllMultiprocessors) {
  for (int sm_count : {66, 108, 132, 188}) {
    const Plan plan = choose(problem(1, 128, 1024 * 1024, 32), gpu(90, sm_count));
    EXPECT_EQ(plan.route, Route::kRing);
    EXPECT_EQ(plan.bytes_per_element, 4);
    EXPECT_EQ(plan.ring.blocks, sm_count);
    EXPECT_GT(plan.workspace_bytes, 0);
    EXPECT_FALSE(plan.tunable());
  }
  EXPECT_EQ(choose(kDecoder, gpu()).route, Route::kRing);
  EXPECT_EQ(choose(problem(1, 128, 1536 * 1536, 32), gpu()).route, Route::kRing);  // 18.9 MB
  EXPECT_EQ(choose(problem(1, 512, 256 * 256, 32), gpu()).route, Route::kRing);    // 2.1 MB
  EXPECT_EQ(choose(problem(1, 512, 128 * 128, 32), gpu()).route, Route::kRing);    // 0.5 MB
  // The same groups, of which there are fewer.
  EXPECT_EQ(choose(problem(1, 64, 128 * 128, 4), gpu()).route, Route::kResident);
  EXPECT_EQ(choose(problem(1, 16, 512 * 512, 4), gpu()).route, Route::kRing);
  // 33.6 MB, of which a block of 132 holds all but two tiles of 16.
  const Plan largest = choose(problem(1, 128, 2048 * 2048, 32), gpu());
  EXPECT_EQ(largest.route, Route::kRing);
  EXPECT_EQ(largest.bytes_per_element, 4.25);
  EXPECT_EQ(choose(problem(1, 128, 2048 * 2560, 32), gpu()).route, Route::kTwoPass);
}

// What a block has of a group, and one span more, are in the ring at a time; or it is read again.
TEST(Choose, FillsTheRingWithNoMoreThanItHolds) {
  int read_again = 0;
  for (int capability : {90, 100, 120}) {
    for (int sm_count = 1; sm_count <= 188; ++sm_count) {
      const Device device = gpu(capability, sm_count);
      for (int64_t spatial = 1 << 18; spatial <= 1 << 23; spatial += 8 * 12345) {
        const Problem p = problem(1, 128, spatial, 32);
        Plan plan = choose(p, device);
        if (plan.route == Route::kRing) {
          EXPECT_LE(plan.bytes_per_element, 4.25);
        }
        try {
          plan = choose(p, device, Route::kRing);
        } catch (const std::invalid_argument&) {
          continue;
        }
        const Ring& ring = plan.ring;
        EXPECT_LE(ring_bytes(ring.slots) + kRingStaticBytes, device.shared_memory_per_block);
        EXPECT_LE(ring.slots, kRingMaxSlots);
        EXPECT_EQ(plan.spans.size % kRingTile, 0);
        const int64_t share =
            (plan.spans.count + sm_count - 1) / sm_count * (plan.spans.size / kRingTile);
        EXPECT_GE(ring.in_flight, 2);
        EXPECT_LE(ring.in_flight, kRingMostInFlight);
        if (ring.kept == ring.slots + kRingTeams) {
          EXPECT_LE(share + plan.spans.size / kRingTile, ring.kept);
          EXPECT_EQ(plan.bytes_per_element, 4);
          continue;
        }
        ++read_again;
        EXPECT_EQ(ring.kept, ring.slots + kRingTeams - 2);
        EXPECT_LT(share - ring.kept, ring.slots);
        if (share <= ring.kept) continue;
        EXPECT_GT(plan.bytes_per_element, 4);
        EXPECT_LT(plan.bytes_per_element, 6);
      }
    }
  }
  EXPECT_GT(read_again, 100);
}

TEST(Choose, SaysWhyTheRingIsNotPossible) {
  const Change changes[] = {
      {"the GPU's compute capability is below 9.0", [](Problem&, Device& d) { d = gpu(89); }},
      {"the build holds no code for compute capability 9.0 or above",
       [](Problem&, Device& d) { d.has_clusters = false; }},
      {"x does not begin at a multiple of 16 bytes",
       [](Problem& p, Device&) { p.aligned = false; }},
      {"a group is no multiple of 8 elements",
       [](Problem& p, Device&) {
         p = problem(1, 32, 1024 * 1024 + 1, 32);
         p.on_cuda = true;
       }},
      {"a group has more than 64 channels",
       [](Problem& p, Device&) { p = problem(1, 32 * 65, 128 * 128, 32); }},
      {"a group is too small", [](Problem& p, Device&) { p.spatial_size = 64; }},
      {"a group does not fit into the GPU's shared memory",
       [](Problem&, Device& d) { d.sm_count = 16; }},
  };
  for (const Change& change : changes) {
    Problem p = kDecoder;
    Device device = gpu();
    change.apply(p, device);
    EXPECT_NE(choose(p, device).route, Route::kRing);
    try {
      choose(p, device, Route::kRing);
      FAIL() << change.reason;
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(error.what(), std::string("route ring is not possible: ") + change.reason);
    }
  }
}

const Change kChanges[] = {
    {"a gradient is needed", [](Problem& p, Device&) { p.needs_grad = true; }},
    {"x is not on a CUDA device", [](Problem& p, Device&) { p.on_cuda = false; }},
    {"x is neither bfloat16 nor float16", [](Problem& p, Device&) { p.x_dtype = DType::kFloat32; }},
    {"x is neither bfloat16 nor float16", [](Problem& p, Device&) { p.x_dtype = DType::kFloat64; }},
    {"x is not contiguous in NCHW order", [](Problem& p, Device&) { p.contiguous = false; }},
    {"the GPU's compute capability is below 7.5", [](Problem&, Device& d) { d = gpu(70); }},
    {"this build has no kernel image for the GPU",
     [](Problem&, Device& d) { d.has_kernel_image = false; }},
    {"a group has 2^32 elements or more",
     [](Problem& p, Device&) { p.spatial_size = int64_t{1} << 30; }},
};

TEST(Choose, FallsBackWithAReasonAndRefusesTheForcedRoute) {
  for (const Change& change : kChanges) {
    Problem p = kDecoder;
    Device device = gpu();
    change.apply(p, device);
    const Plan plan = choose(p, device);
    EXPECT_EQ(plan.route, Route::kFallback);
    EXPECT_STREQ(plan.reason, change.reason);
    EXPECT_EQ(plan.workspace_bytes, 0);
    for (Route route : kFused) {
      try {
        choose(p, device, route);
        FAIL() << change.reason;
      } catch (const std::invalid_argument& error) {
        EXPECT_EQ(error.what(),
                  std::string("route ") + to_string(route) + " is not possible: " + change.reason);
      }
    }
  }
}

TEST(Choose, ObeysAForcedRoute) {
  EXPECT_EQ(choose(kDecoder, gpu(), Route::kFallback).route, Route::kFallback);
  EXPECT_EQ(choose(kDecoder, gpu(), Route::kThreePass).route, Route::kThreePass);
  EXPECT_EQ(choose(kDecoder, gpu(), Route::kThreePass).bytes_per_element, 8);
  EXPECT_EQ(choose(kDecoder, gpu(), Route::kTwoPass).route, Route::kTwoPass);
  const Problem small = problem(1, 64, 40000, 8);
  for (Route route : kFused) EXPECT_EQ(choose(small, gpu(), route).route, route);
}

TEST(Choose, KeepsTheWorkspaceBelowItsLimit) {
  for (int64_t samples : {1, 4, 33, 1000}) {
    for (int64_t spatial : {1, 64, 513, 4096, 65536, 1 << 20, 1 << 24}) {
      for (int64_t groups : {1, 2, 32, 128}) {
        const Problem p = problem(samples, 128, spatial, groups);
        for (Route route : {Route::kThreePass, Route::kTwoPass, Route::kRing}) {
          Plan plan;
          try {
            plan = choose(p, gpu(), route);
          } catch (const std::invalid_argument&) {
            EXPECT_EQ(route, Route::kRing);
            continue;
          }
          EXPECT_LE(plan.workspace_bytes, kMaxWorkspaceBytes);
          EXPECT_GE(plan.groups_per_launch, 1);
          EXPECT_LE(plan.groups_per_launch, p.group_count());
          EXPECT_EQ(plan.workspace_bytes > 0, plan.spans.count > 1);
        }
      }
    }
  }
}

TEST(Choose, NeedsNoWorkspaceForGroupsOfOneSpan) {
  const Plan plan = choose(problem(2, 320, 49, 32), gpu());
  EXPECT_EQ(plan.spans.count, 1);
  EXPECT_EQ(plan.workspace_bytes, 0);
  EXPECT_EQ(plan.bytes_per_element, 4);
  EXPECT_FALSE(plan.tunable());
}

TEST(Choose, CountsBytesOfAnFp32Result) {
  Problem p = kDecoder;
  p.y_dtype = DType::kFloat32;
  EXPECT_EQ(choose(p, gpu()).bytes_per_element, 6);
  EXPECT_EQ(choose(p, gpu(), Route::kTwoPass).bytes_per_element, 8);
  EXPECT_EQ(choose(p, gpu(), Route::kThreePass).bytes_per_element, 10);
}

TEST(Choose, TakesEmptyProblems) {
  for (const Problem& p : {problem(0, 64, 64, 32), problem(2, 64, 0, 32), problem(2, 0, 64, 1)}) {
    const Plan plan = choose(p, gpu());
    EXPECT_EQ(plan.workspace_bytes, 0);
    EXPECT_FALSE(plan.tunable());
  }
}

TEST(Choose, LaysSharedMemoryOutAlignedAndWithinBounds) {
  for (int64_t channels : {1, 3, 16, 147, 5000}) {
    for (int64_t spatial : {1, 7, 49, 720, 4097}) {
      const Problem p = problem(3, 2 * channels, spatial, 2);
      const Spans spans = spans_of(p.group_size());
      for (int cluster = 1; cluster <= 7; ++cluster) {
        const ResidentLayout layout = resident_layout(spans, channels, cluster);
        EXPECT_EQ(layout.moments % static_cast<int64_t>(alignof(SpanMoments)), 0);
        EXPECT_EQ(layout.affines % static_cast<int64_t>(alignof(Affine)), 0);
        EXPECT_GE(layout.moments * cluster, 2 * p.group_size());
        EXPECT_EQ(layout.bytes - layout.affines, kAffineBytes * channels);
      }
    }
  }
}

TEST(Choose, ServesShortGroupsInOneLaunchWhateverTheRoute) {
  for (int64_t size : {int64_t{1}, kMinSpan, kMinSpan + 1}) {
    const Problem p = problem(2, 32, size, 32);
    EXPECT_EQ(choose(p, gpu()).route, size <= kMinSpan ? Route::kThreePass : Route::kResident);
    for (Route route : {Route::kThreePass, Route::kTwoPass, Route::kResident}) {
      EXPECT_EQ(choose(p, gpu(), route).workspace_bytes == 0,
                size <= kMinSpan || route == Route::kResident);
    }
  }
}

TEST(Spans, CoverTheGroupWithinTheirBounds) {
  for (int64_t size : {int64_t{1}, kMinSpan - 1, kMinSpan, kMinSpan + 1, kMinSpan * kMaxSpans,
                       kMinSpan * kMaxSpans + 1, int64_t{33554432}, kMaxGroupSize}) {
    const Spans spans = spans_of(size);
    EXPECT_LE(spans.count, kMaxSpans);
    EXPECT_LE(spans.size, kMaxSpan);
    EXPECT_EQ(spans.size % kMinSpan, 0);
    EXPECT_GE(spans.size * spans.count, size);
    EXPECT_LT(spans.size * (spans.count - 1), size);
  }
}

TEST(Candidates, BeginWithTheDefaultAndAreLaunchable) {
  for (Route route : kFused) {
    const auto& list = candidates(route);
    ASSERT_FALSE(list.empty());
    for (const Config& config : list) {
      EXPECT_EQ(config.threads % 32, 0);
      EXPECT_GE(config.threads, 32);
      EXPECT_LE(config.threads, 1024);
    }
  }
  EXPECT_EQ(candidates(Route::kTwoPass).front(), Config{});
  EXPECT_TRUE(candidates(Route::kFallback).empty());
  EXPECT_FALSE(is_candidate(Route::kThreePass, Config{3, 4}));
}

TEST(Routes, HaveNamesThatComeBack) {
  for (Route route :
       {Route::kFallback, Route::kThreePass, Route::kTwoPass, Route::kResident, Route::kRing}) {
    EXPECT_EQ(route_from_name(to_string(route)), route);
  }
  EXPECT_FALSE(route_from_name("auto").has_value());
  EXPECT_FALSE(route_from_name("four_pass").has_value());
}

TEST(Workspace, CountsWhatTheKernelsStore) {
  EXPECT_EQ(sizeof(Centre), static_cast<size_t>(kCentreBytes));
  EXPECT_EQ(sizeof(SpanMoments), static_cast<size_t>(kSpanMomentsBytes));
  EXPECT_EQ(sizeof(Affine), static_cast<size_t>(kAffineBytes));
}

}  // namespace
}  // namespace gnsilu
