#include "tuned_config.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda_device.h"
#include "tuner.h"

namespace gnsilu {
namespace {

constexpr int64_t kLeastBytes = int64_t{32} << 20;  // of x; smaller ones are not worth tuning
constexpr int64_t kMostBytes = int64_t{256} << 20;  // of y; larger ones are timed on a slice
constexpr int kRepetitions = 5;

// The tuner of one device, with what it has decided in a form that a warm call finds without
// building a string.
struct DeviceTuner {
  DeviceTuner()
      : tuner(cache_directory(), [](const std::string& message) { TORCH_WARN(message); }) {}

  Tuner tuner;
  std::mutex mutex;
  std::unordered_map<uint64_t, Config> decided;
};

DeviceTuner& device_tuner(int device_index) {
  static auto& once = *new std::array<std::once_flag, 128>;
  static auto& tuners = *new std::array<DeviceTuner*, 128>{};
  const auto i = static_cast<size_t>(device_index);
  std::call_once(once[i], [&] { tuners[i] = new DeviceTuner; });
  return *tuners[i];
}

uint64_t short_key(const Plan& plan, const Problem& problem) {
  return static_cast<uint64_t>(problem.channels_per_group()) << 12 |
         static_cast<uint64_t>(plan.route) << 8 | static_cast<uint64_t>(problem.x_dtype) << 4 |
         static_cast<uint64_t>(problem.y_dtype);
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

struct Events {
  std::array<cudaEvent_t, kRepetitions + 1> events{};
  Events() {
    for (cudaEvent_t& event : events) {
      TORCH_CHECK(cudaEventCreate(&event) == cudaSuccess, "gnsilu: cannot create a CUDA event");
    }
  }
  ~Events() {
    for (cudaEvent_t event : events) cudaEventDestroy(event);
  }
};

// Median time of a launch in microseconds. A candidate that cannot be launched is passed over; an
// error of the device itself stays and is raised.
std::optional<double> time_candidate(const Plan& plan, const Problem& problem,
                                     const Arguments& arguments, cudaStream_t stream,
                                     Events& events) {
  if (launch(plan, problem, arguments, stream) != cudaSuccess) {
    cudaGetLastError();
    return std::nullopt;
  }
  cudaEventRecord(events.events[0], stream);
  for (int i = 0; i < kRepetitions; ++i) {
    launch(plan, problem, arguments, stream);
    cudaEventRecord(events.events[static_cast<size_t>(i) + 1], stream);
  }
  const cudaError_t error = cudaEventSynchronize(events.events.back());
  TORCH_CHECK(error == cudaSuccess,
              "gnsilu: a CUDA error came up while tuning: ", cudaGetErrorString(error));
  std::vector<double> times;
  for (size_t i = 0; i < kRepetitions; ++i) {
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, events.events[i], events.events[i + 1]);
    times.push_back(1000.0 * milliseconds);
  }
  std::nth_element(times.begin(), times.begin() + kRepetitions / 2, times.end());
  return times[kRepetitions / 2];
}

Config tune(DeviceTuner& tuner, const Plan& plan, const Problem& problem,
            const Arguments& arguments, int device_index, cudaStream_t stream) {
  const Problem slice = slice_of(problem);
  Plan slice_plan = choose(slice, cuda_device(device_index), plan.route);
  slice_plan.workspace_bytes = plan.workspace_bytes;
  slice_plan.groups_per_launch =
      std::min(slice_plan.groups_per_launch,
               plan.workspace_bytes / workspace_bytes_per_group(slice_plan.spans));
  Arguments slice_arguments = arguments;
  slice_arguments.weight = slice_arguments.bias = Parameter{};
  Events events;
  return tuner.tuner.tune(
      tuner_key(problem, cuda_device(device_index), plan.route), [&](const Config& config) {
        slice_plan.config = config;
        return time_candidate(slice_plan, slice, slice_arguments, stream, events);
      });
}

}  // namespace

Config tuned_config(const Plan& plan, const Problem& problem, const Arguments& arguments,
                    int device_index, cudaStream_t stream) {
  if (!worth_tuning(plan, problem) || switched_off()) return plan.config;
  DeviceTuner& tuner = device_tuner(device_index);
  const uint64_t key = short_key(plan, problem);
  {
    const std::lock_guard<std::mutex> lock(tuner.mutex);
    const auto found = tuner.decided.find(key);
    if (found != tuner.decided.end()) return found->second;
  }
  if (capturing()) return known_config(plan, problem, device_index);
  const Config config = tune(tuner, plan, problem, arguments, device_index, stream);
  // Absent where another thread is still timing this key: then config is the default, for now.
  if (tuner.tuner.find(tuner_key(problem, cuda_device(device_index), plan.route))) {
    const std::lock_guard<std::mutex> lock(tuner.mutex);
    tuner.decided[key] = config;
  }
  return config;
}

Config known_config(const Plan& plan, const Problem& problem, int device_index) {
  if (!worth_tuning(plan, problem) || switched_off()) return plan.config;
  const TunerKey key = tuner_key(problem, cuda_device(device_index), plan.route);
  return device_tuner(device_index).tuner.find(key).value_or(plan.config);
}

}  // namespace gnsilu
