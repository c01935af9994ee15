// Which route a Problem takes, and what it costs: a short list of conditions, first match wins.
#include <algorithm>
#include <stdexcept>

#include "gnsilu/plan.h"

namespace gnsilu {
namespace {

// Why three_pass cannot serve the problem; null where it can.
const char* obstacle_to_fused(const Problem& problem, const Device& device) {
  if (problem.needs_grad) return "a gradient is needed";
  if (!problem.on_cuda) return "x is not on a CUDA device";
  if (!is_16_bit(problem.x_dtype)) return "x is neither bfloat16 nor float16";
  if (problem.y_dtype == DType::kFloat64) return "the result is float64";
  if (!problem.contiguous) return "x is not contiguous in NCHW order";
  if (!device.has_kernel_image) return "this build has no kernel image for the GPU";
  if (device.capability() < 75) return "the GPU's compute capability is below 7.5";
  if (problem.group_size() > kMaxGroupSize) return "a group has 2^32 elements or more";
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

Plan three_pass(const char* reason, const Problem& problem) {
  Plan plan;
  plan.route = Route::kThreePass;
  plan.reason = reason;
  plan.config = candidates(Route::kThreePass).front();
  plan.spans = spans_of(problem.group_size());
  const double x = static_cast<double>(size_in_bytes(problem.x_dtype));
  const double y = static_cast<double>(size_in_bytes(problem.y_dtype));
  if (plan.spans.count <= 1) {  // the second and third read are served by the caches
    plan.groups_per_launch = problem.group_count();
    plan.bytes_per_element = x + y;
    return plan;
  }
  const int64_t group_bytes = workspace_bytes_per_group(plan.spans);
  plan.groups_per_launch = std::min(problem.group_count(), kMaxWorkspaceBytes / group_bytes);
  plan.workspace_bytes = plan.groups_per_launch * group_bytes;
  plan.bytes_per_element = 3 * x + y;
  return plan;
}

}  // namespace

const char* to_string(Route route) { return route == Route::kFallback ? "fallback" : "three_pass"; }

std::optional<Route> route_from_name(const std::string& name) {
  for (Route route : {Route::kFallback, Route::kThreePass}) {
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
  static const std::vector<Config> three_pass{{128, 8}, {128, 4}, {256, 8}, {256, 4}};
  return route == Route::kThreePass ? three_pass : none;
}

bool is_candidate(Route route, const Config& config) {
  const std::vector<Config>& list = candidates(route);
  return std::find(list.begin(), list.end(), config) != list.end();
}

Plan choose(const Problem& problem, const Device& device, std::optional<Route> forced) {
  const char* obstacle = obstacle_to_fused(problem, device);
  if (forced == Route::kThreePass && obstacle != nullptr) {
    throw std::invalid_argument(std::string("route three_pass is not possible: ") + obstacle);
  }
  if (forced == Route::kFallback) return fallback("asked for", problem);
  if (obstacle != nullptr) return fallback(obstacle, problem);
  return three_pass(forced ? "asked for" : "contiguous 16-bit x on a CUDA device", problem);
}

}  // namespace gnsilu
