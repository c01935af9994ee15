// How a Problem is computed: the route, its launch configuration, its tiling and its cost.
// choose() is a pure function; the tuner (csrc/core/tuner.h) may replace Plan::config afterwards.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gnsilu/device.h"
#include "gnsilu/problem.h"
#include "gnsilu/resident.h"
#include "gnsilu/ring.h"
#include "gnsilu/spans.h"

namespace gnsilu {

enum class Route : int8_t {
  kFallback,   // PyTorch's operators
  kThreePass,  // partial sums, centred squares, apply: x is read three times
  kTwoPass,    // moments of the spans, apply: x is read twice
  kResident,   // one launch: blocks hold their groups in shared memory, x is read once
  kRing,       // one launch: all blocks share every group, x is read once, or nearly so
};

const char* to_string(Route route);
// The route of that name; nothing for "auto" or an unknown name.
std::optional<Route> route_from_name(const std::string& name);

// What the tuner may vary. No choice of these changes a bit of the result.
struct Config {
  int threads = 128;          // a block; a multiple of 32
  int vectors_in_flight = 8;  // vectors of 8 elements that a lane loads before it uses the first

  bool operator==(const Config& other) const {
    return threads == other.threads && vectors_in_flight == other.vectors_in_flight;
  }
};

std::string to_string(const Config& config);

// The configurations that the tuner times for a route, the default first, or that choose() picks
// from (resident); none for the fallback.
const std::vector<Config>& candidates(Route route);
// Whether config is one of candidates(route): nothing else is ever launched.
bool is_candidate(Route route, const Config& config);

struct Plan {
  Route route = Route::kFallback;
  const char* reason = "";  // why this route, a sentence with static storage
  Config config;
  Spans spans;                    // CUDA routes only
  Residence residence;            // resident only
  Ring ring;                      // ring only
  int64_t groups_per_launch = 0;  // groups whose partial results the workspace holds at a time
  int64_t workspace_bytes = 0;
  double bytes_per_element = 0;  // moved through memory, reads and writes together

  // Blocks that work on a group together and wait for each other; 0 where none waits.
  int blocks_per_group() const {
    return route == Route::kResident ? residence.cluster : route == Route::kRing ? ring.blocks : 0;
  }
  // One configuration only: nothing to tune.
  bool tunable() const {
    return (route == Route::kThreePass || route == Route::kTwoPass) && spans.count > 1;
  }
};

constexpr int64_t kMaxWorkspaceBytes = int64_t{1} << 20;
constexpr int64_t kCentreBytes = 16;         // sizeof(Centre), numerics.h
constexpr int64_t kNormalisationBytes = 32;  // as the ring's blocks exchange it

// three_pass: a group's centre, and of every span two FP64 sums and an FP32 maximum. two_pass: the
// spans' moments; the ring: these and the group's normalisation.
constexpr int64_t workspace_bytes_per_group(Route route, const Spans& spans) {
  if (route == Route::kTwoPass) return spans.count * kSpanMomentsBytes;
  if (route == Route::kRing) return spans.count * kSpanMomentsBytes + kNormalisationBytes;
  return kCentreBytes + spans.count * 20;
}

// The route for problem on device. Throws std::invalid_argument, with a message that says which
// condition failed, where forced names a route that cannot serve this problem.
Plan choose(const Problem& problem, const Device& device, std::optional<Route> forced = {});

}  // namespace gnsilu
