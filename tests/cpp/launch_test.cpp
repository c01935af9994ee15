// What launch() refuses before it asks anything of a GPU.
#include "gnsilu/launch.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace gnsilu {
namespace {

Device hopper() {
  Device device;
  device.sm_count = 132;
  device.capability_major = 9;
  device.shared_memory_per_block = 232448;
  return device;
}

Problem decoder() {
  Problem problem;
  problem.samples = 1;
  problem.channels = 128;
  problem.spatial_size = 1024 * 1024;
  problem.num_groups = 32;
  problem.on_cuda = true;
  return problem;
}

void* address(uintptr_t value) { return reinterpret_cast<void*>(value); }

TEST(Launch, RefusesTheRingAtAddressesThatItCannotTake) {
  const Plan plan = choose(decoder(), hopper());
  ASSERT_EQ(plan.route, Route::kRing);
  for (const uintptr_t offset : {2, 4, 8}) {
    Arguments arguments;
    arguments.x = address(4096);
    arguments.y = address(8192 + offset);
    EXPECT_EQ(launch(plan, decoder(), arguments, nullptr), cudaErrorInvalidValue);
    arguments.x = address(4096 + offset);
    arguments.y = address(8192);
    EXPECT_EQ(launch(plan, decoder(), arguments, nullptr), cudaErrorInvalidValue);
  }
}

TEST(Launch, RefusesTheFallbackAndLeavesEmptyProblemsAlone) {
  const Plan fallback = choose(decoder(), hopper(), Route::kFallback);
  EXPECT_EQ(launch(fallback, decoder(), {}, nullptr), cudaErrorInvalidValue);
  Problem empty = decoder();
  empty.samples = 0;
  EXPECT_EQ(launch(choose(empty, hopper()), empty, {}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace gnsilu
