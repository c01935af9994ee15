#include "tuned_config.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda_error.h"
#include "tuner.h"

namespace gnsilu {
namespace {

constexpr int64_t kLeastBytes = int64_t{32} << 20;  // of x; smaller ones are not worth tuning
constexpr int64_t kMostBytes = int64_t{256} << 20;  // of y; larger ones are timed on a slice
constexpr int kRepetitions = 5;

// One for all devices: its keys name the GPU model. Leaked, since threads may outlive statics.
Tuner& the_tuner() {
  static Tuner& tuner =
      *new Tuner(cache_directory(), [](const std::string& message) { TORCH_WARN(message); });
  return tuner;
}

bool worth_tuning(const Plan& plan, const Problem& problem) {
  return plan.tunable() && problem.numel() * size_in_bytes(problem.x_dtype) >= kLeastBytes;
}

// Switched off altogether: then the default serves, whatever has been tuned before.
bool switched_off() {
  const char* value = std::getenv("GNSILU_TUNE");
  return (value != nullptr && std::string(value) == "0") ||
         at::globalContext().deterministicAlgorithms();
}

bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// A problem of the same kind whose y is at most kMostBytes: fewer groups, or part of one. Without
// parameters, since theirs are not where the slice would look for them.
Problem slice_of(const Problem& problem) {
  const int64_t y_size = size_in_bytes(problem.y_dtype);
  const int64_t group_bytes = problem.group_size() * y_size;
  Problem slice = problem;
  slice.samples = 1;
  slice.num_groups = std::clamp<int64_t>(kMostBytes / group_bytes, 1, problem.group_count());
  slice.channels = slice.num_groups * problem.channels_per_group();
  if (group_bytes > kMostBytes) {
    slice.spatial_size = std::max<int64_t>(1, kMostBytes / y_size / slice.channels / 8 * 8);
  }
  return slice;
}

// The events between the repetitions; `error` where they could not be made.
struct Events {
  std::array<cudaEvent_t, kRepetitions + 1> events{};
  cudaError_t error = cudaSuccess;

  Events() {
    for (cudaEvent_t& event : events) {
      if (error == cudaSuccess) error = cudaEventCreate(&event);
    }
  }
  ~Events() {
    for (cudaEvent_t event : events) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
};

// Queues one launch to warm up and kRepetitions between events.
cudaError_t record_repetitions(const Plan& plan, const Problem& problem, const Arguments& arguments,
                               cudaStream_t stream, const Events& events) {
  cudaError_t error = launch(plan, problem, arguments, stream);
  for (size_t i = 0; error == cudaSuccess; ++i) {
    error = cudaEventRecord(events.events[i], stream);
    if (i == kRepetitions) break;
    if (error == cudaSuccess) error = launch(plan, problem, arguments, stream);
  }
  return error;
}

// Median time of a launch in microseconds. A candidate that cannot be launched is passed over; an
// error of the device itself stays and is raised.
std::optional<double> time_candidate(const Plan& plan, const Problem& problem,
                                     const Arguments& arguments, cudaStream_t stream,
                                     const Events& events) {
  if (events.error != cudaSuccess ||
      record_repetitions(plan, problem, arguments, stream, events) != cudaSuccess) {
    cudaGetLastError();
    return std::nullopt;
  }
  check_cuda(cudaEventSynchronize(events.events.back()), "gnsilu: tuning");
  std::vector<double> times;
  for (size_t i = 0; i < kRepetitions; ++i) {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, events.events[i], events.events[i + 1]),
               "gnsilu: tuning");
    times.push_back(1000.0 * milliseconds);
  }
  std::nth_element(times.begin(), times.begin() + kRepetitions / 2, times.end());
  return times[kRepetitions / 2];
}

Config tune(const Plan& plan, const Problem& problem, const Arguments& arguments,
            const Device& device, cudaStream_t stream) {
  // Another thread may be capturing a graph, which the events here must not break.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const Problem slice = slice_of(problem);
  // The plan's spans, of which a slice's group has no more than the workspace was made for.
  Plan slice_plan = plan;
  slice_plan.spans.count = (slice.group_size() + plan.spans.size - 1) / plan.spans.size;
  Arguments slice_arguments = arguments;
  slice_arguments.weight = slice_arguments.bias = Parameter{};
  const Events events;
  return the_tuner().tune(tuner_key(problem, device, plan.route), [&](const Config& config) {
    slice_plan.config = config;
    return time_candidate(slice_plan, slice, slice_arguments, stream, events);
  });
}

}  // namespace

Config known_config(const Plan& plan, const Problem& problem, const Device& device) {
  if (!worth_tuning(plan, problem) || switched_off()) return plan.config;
  return the_tuner().find(tuner_key_view(problem, device, plan.route)).value_or(plan.config);
}

Config tuned_config(const Plan& plan, const Problem& problem, const Arguments& arguments,
                    const Device& device, cudaStream_t stream) {
  if (!worth_tuning(plan, problem) || switched_off()) return plan.config;
  const auto found = the_tuner().find(tuner_key_view(problem, device, plan.route));
  if (found) return *found;
  return capturing() ? plan.config : tune(plan, problem, arguments, device, stream);
}

}  // namespace gnsilu
