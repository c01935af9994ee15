// Which route a Problem takes, and what it costs: a short list of conditions, first match wins.
#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "gnsilu/plan.h"

namespace gnsilu {
namespace {

// Why the CUDA routes cannot serve the problem; null where it can.
const char* obstacle_to_fused(const Problem& problem, const Device& device) {
  if (problem.needs_grad) return "a gradient is needed";
  if (!problem.on_cuda) return "x is not on a CUDA device";
  if (!is_16_bit(problem.x_dtype)) return "x is neither bfloat16 nor float16";
  if (problem.y_dtype == DType::kFloat64) return "the result is float64";
  if (!problem.contiguous) return "x is not contiguous in NCHW order";
  if (!device.has_kernel_image) return "this build has no kernel image for the GPU";
  if (device.capability() < 75) return "the GPU's compute capability is below 7.5";
  if (problem.group_size() > kMaxGroupSize) return "a group has 2^32 elements or more";
  if (problem.num_groups > INT32_MAX) return "a sample has 2^31 groups or more";
  return nullptr;
}

Plan fallback(const char* reason, const Problem& problem) {
  Plan plan;
  plan.route = Route::kFallback;
  plan.reason = reason;
  // Counted for the operators that PyTorch runs, per element, with weight and bias.
  const double x = static_cast<double>(size_in_bytes(problem.x_dtype));
  const double y = static_cast<double>(size_in_bytes(problem.y_dtype));
  if (is_16_bit(problem.x_dtype) && !problem.needs_grad) {
    // To FP64; sum; less the mean; sum of squares; weight, bias and SiLU in place; to y.
    const double silu = problem.activation == Activation::kSilu ? 16 : 0;
    plan.bytes_per_element = (x + 8) + 8 + 16 + 8 + 16 + 16 + silu + (8 + y);
    return plan;
  }
  // To FP32 (unless it is already), group norm (statistics, apply), SiLU, and the cast to y.
  const double wide = std::max(4.0, x);
  const double silu = problem.activation == Activation::kSilu ? 2 * wide : 0;
  plan.bytes_per_element = (x < wide ? x + wide : 0) + 3 * wide + silu + (y == wide ? 0 : wide + y);
  return plan;
}

bool is_one_read(Route route) { return route == Route::kResident || route == Route::kRing; }

Plan fused(Route route, const char* reason, const Problem& problem, const Spans& spans) {
  Plan plan;
  plan.route = route;
  plan.reason = reason;
  plan.config = candidates(route).front();
  plan.spans = spans;
  const double x = static_cast<double>(size_in_bytes(problem.x_dtype));
  const double y = static_cast<double>(size_in_bytes(problem.y_dtype));
  // Of a group of one span the second and third read are served by the caches.
  const int reads = plan.spans.count <= 1 || is_one_read(route) ? 1
                    : route == Route::kTwoPass                  ? 2
                                                                : 3;
  plan.bytes_per_element = reads * x + y;
  plan.groups_per_launch = problem.group_count();
  if (plan.spans.count <= 1 || route == Route::kResident) return plan;
  const int64_t group_bytes = workspace_bytes_per_group(route, plan.spans);
  plan.groups_per_launch = std::min(problem.group_count(), kMaxWorkspaceBytes / group_bytes);
  plan.workspace_bytes = plan.groups_per_launch * group_bytes;
  return plan;
}

// The plan by the resident route; nothing where a group does not fit into shared memory. The
// numbers are those of an H200, in graphs of launches with cold caches.
std::optional<Plan> resident(const char* reason, const Problem& problem, const Device& device,
                             const Spans& spans) {
  const int64_t groups = std::max<int64_t>(1, problem.group_count());
  // The kernel's 64 registers a thread leave an SM 1024 threads.
  const int64_t threads_at_once = int64_t{1024} * device.sm_count;
  // Clusters of 7 blocks beat 8, of which fewer fit side by side. Below 9.0 there are none.
  const bool clusters = device.capability() >= 90 && device.has_clusters;
  const int64_t most = clusters ? std::clamp(device.sm_count, 1, 7) : 1;
  // As many as run at once with 256 threads each, and five spans a block.
  const int64_t wanted = std::min(threads_at_once / 256 / groups, spans.count / 5);
  int64_t cluster = std::clamp<int64_t>(wanted, 1, most);
  // Clusters of 4, where there is a choice, were slower than both 2 and 5, by a fifth at
  // 2x320x64x64 and 4x512x64x64.
  if (cluster == 4) cluster = 2;
  const auto bytes = [&] {
    return kResidentStaticBytes +
           resident_layout(spans, problem.channels_per_group(), cluster).bytes;
  };
  // Blocks of a cluster that fill an SM take two turns: two_pass is faster then.
  // 512 bytes: each block takes 1 KB of the SM that no one block may have.
  const int64_t half = device.shared_memory_per_block / 2 - 512;
  const auto room = [&] { return cluster > 1 ? half : device.shared_memory_per_block; };
  while (cluster < most && bytes() > room()) ++cluster;
  if (bytes() > room() || groups * cluster > INT32_MAX) return std::nullopt;
  const int64_t vectors = (spans.count + cluster - 1) / cluster * spans.size / 8;
  int threads = 128;
  while (threads < 512 && threads < vectors && groups * cluster * threads * 2 <= threads_at_once) {
    threads *= 2;
  }
  if (bytes() > half) threads = 1024;  // one block an SM
  Plan plan = fused(Route::kResident, reason, problem, spans);
  plan.residence = {static_cast<int>(cluster), device.shared_memory_per_block};
  plan.config.threads = threads;
  return plan;
}

// Smallest activation that takes the ring where its groups fit into the shared memory of a cluster,
// 8 MB: one group of 4.7 MB alone took the ring 11.5 us, x3.07 of a copy (H200, as all of these; an
// earlier form of the ring). 1x512x128x128 (groups of 0.5 MB) x1.83, two_pass 2.24, resident 2.50;
// 1x256x256x256 1.74, two_pass 1.92. Smaller groups are resident's: 1x1280x64x64 x2.37 by the
// earlier form, resident 2.27.
constexpr int64_t kRingActivation = int64_t{1} << 22;

Ring ring_of(const Spans& spans, const Device& device) {
  return gnsilu::ring_of(spans, device.sm_count, device.shared_memory_per_block);
}

// Why the ring cannot serve the problem, which a CUDA route can; null where it can.
const char* obstacle_to_ring(const Problem& problem, const Device& device, const Spans& spans) {
  if (device.capability() < 90) return "the GPU's compute capability is below 9.0";
  if (!device.has_clusters) return "the build holds no code for compute capability 9.0 or above";
  if (!problem.aligned) return "x does not begin at a multiple of 16 bytes";
  if (problem.group_size() % 8 != 0) return "a group is no multiple of 8 elements";
  if (problem.channels_per_group() > kRingMaxChannels) return "a group has more than 64 channels";
  if (spans.size < kRingTile) return "a group is too small";
  if (!fits_ring(spans, ring_of(spans, device))) {
    return "a group does not fit into the GPU's shared memory";
  }
  return nullptr;
}

// Whether the ring reads an eighth of x again at most. H200: x1.43 of a copy at 1x128x2048x2048,
// where two_pass takes x1.57.
bool reads_little_again(const Spans& spans, const Ring& ring) {
  const int64_t share = ring_share(spans, ring.blocks);
  return share - ring.kept <= share / 8;
}

Plan ring(const char* reason, const Problem& problem, const Device& device, const Spans& spans) {
  Plan plan = fused(Route::kRing, reason, problem, spans);
  plan.ring = ring_of(spans, device);
  const auto share = static_cast<double>(ring_share(spans, plan.ring.blocks));
  const double again = std::max(0.0, 1 - plan.ring.kept / share);
  plan.bytes_per_element += again * static_cast<double>(size_in_bytes(problem.x_dtype));
  return plan;
}

}  // namespace

const char* to_string(Route route) {
  switch (route) {
    case Route::kFallback:
      return "fallback";
    case Route::kThreePass:
      return "three_pass";
    case Route::kTwoPass:
      return "two_pass";
    case Route::kResident:
      return "resident";
    case Route::kRing:
      return "ring";
  }
  return "?";
}

std::optional<Route> route_from_name(const std::string& name) {
  for (Route route :
       {Route::kFallback, Route::kThreePass, Route::kTwoPass, Route::kResident, Route::kRing}) {
    if (name == to_string(route)) return route;
  }
  return std::nullopt;
}

std::string to_string(const Config& config) {
  return std::to_string(config.threads) + " threads, " + std::to_string(config.vectors_in_flight) +
         " vectors in flight";
}

const std::vector<Config>& candidates(Route route) {
  static const std::vector<Config> none;
  // H200: the first was the fastest at each of three shapes, by up to 4 % (512 threads were slower
  // by 2 to 15 %). The others are for GPUs not measured yet.
  static const std::vector<Config> passes{{128, 8}, {128, 4}, {256, 8}, {256, 4}};
  // Not tuned: choose() picks one by the size of a block's part.
  static const std::vector<Config> resident{{512, 8}, {128, 8}, {256, 8}, {1024, 8}};
  // Its warps have roles.
  static const std::vector<Config> ring{{kRingThreads, 8}};
  switch (route) {
    case Route::kFallback:
      return none;
    case Route::kResident:
      return resident;
    case Route::kRing:
      return ring;
    default:
      return passes;
  }
}

bool is_candidate(Route route, const Config& config) {
  const std::vector<Config>& list = candidates(route);
  return std::find(list.begin(), list.end(), config) != list.end();
}

Plan choose(const Problem& problem, const Device& device, std::optional<Route> forced) {
  const char* obstacle = obstacle_to_fused(problem, device);
  if (forced && *forced != Route::kFallback && obstacle != nullptr) {
    throw std::invalid_argument(std::string("route ") + to_string(*forced) +
                                " is not possible: " + obstacle);
  }
  if (forced == Route::kFallback) return fallback("asked for", problem);
  if (obstacle != nullptr) return fallback(obstacle, problem);
  const Spans spans = spans_of(problem.group_size());
  if (forced == Route::kResident) {
    const std::optional<Plan> plan = resident("asked for", problem, device, spans);
    if (plan) return *plan;
    throw std::invalid_argument(
        "route resident is not possible: a group does not fit into shared memory");
  }
  const char* const no_ring = obstacle_to_ring(problem, device, spans);
  if (forced == Route::kRing) {
    if (no_ring == nullptr) return ring("asked for", problem, device, spans);
    throw std::invalid_argument(std::string("route ring is not possible: ") + no_ring);
  }
  if (forced) return fused(*forced, "asked for", problem, spans);
  const char* const reason = "contiguous 16-bit x on a CUDA device";
  if (spans.count <= 1) return fused(Route::kThreePass, reason, problem, spans);
  const bool can_ring = no_ring == nullptr;
  if (!can_ring || problem.group_size() < kLargeGroup || problem.numel() < kRingActivation) {
    const std::optional<Plan> on_chip =
        resident("contiguous 16-bit x, its groups fit into shared memory", problem, device, spans);
    if (on_chip) return *on_chip;
  }
  if (can_ring && reads_little_again(spans, ring_of(spans, device))) {
    return ring("contiguous 16-bit x, its groups fit into all shared memory together", problem,
                device, spans);
  }
  return fused(Route::kTwoPass, reason, problem, spans);
}

}  // namespace gnsilu
