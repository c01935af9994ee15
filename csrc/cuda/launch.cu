// From a Plan to kernel launches.
#include "gnsilu/launch.h"

#include <algorithm>

#include "kernels.h"

namespace gnsilu {
namespace {

// Ordered by alignment, so that no padding is needed; plan.workspace_bytes counts the same.
Workspace divide_workspace(void* memory, int64_t groups, int spans) {
  Workspace w{};
  w.centres = static_cast<Centre*>(memory);
  w.sums = reinterpret_cast<double*>(w.centres + groups);
  w.squares = w.sums + groups * spans;
  w.max_abs = reinterpret_cast<float*>(w.squares + groups * spans);
  return w;
}

cudaError_t launch_two_pass(const Plan& plan, const GroupRange& range, const KernelTypes& types,
                            cudaStream_t stream, const char** kernel) {
  *kernel = "span_moments";
  const cudaError_t error = launch_span_moments(range, types, plan.config, stream);
  if (error != cudaSuccess) return error;
  *kernel = "apply";
  return launch_apply(range, types, plan.config, stream);
}

cudaError_t launch_ring(const Plan& plan, GroupRange range, const KernelTypes& types,
                        void* workspace, cudaStream_t stream, const char** kernel) {
  range.workspace.moments = static_cast<SpanMoments*>(workspace);
  range.workspace.normalisations =
      reinterpret_cast<uint64_t*>(range.workspace.moments + range.groups * range.spans);
  *kernel = "ring";
  return launch_ring(range, types, plan.ring, stream);
}

cudaError_t launch_three_pass(const Plan& plan, const GroupRange& range, const KernelTypes& types,
                              cudaStream_t stream, const char** kernel) {
  *kernel = "partial_sums";
  cudaError_t error = launch_partial_sums(range, types, plan.config, stream);
  if (error != cudaSuccess) return error;
  *kernel = "centred_squares";
  error = launch_centred_squares(range, types, plan.config, stream);
  if (error != cudaSuccess) return error;
  *kernel = "apply";
  return launch_apply(range, types, plan.config, stream);
}

}  // namespace

cudaError_t launch(const Plan& plan, const Problem& problem, const Arguments& arguments,
                   cudaStream_t stream, const char** kernel) {
  static_assert(sizeof(Centre) == kCentreBytes && sizeof(SpanMoments) == kSpanMomentsBytes &&
                    8 * kNormalisationWords == kNormalisationBytes,
                "plan.h must count the workspace that is used");
  const char* ignored = nullptr;
  if (kernel == nullptr) kernel = &ignored;
  if (problem.numel() == 0) return cudaSuccess;
  if (plan.route == Route::kFallback) return cudaErrorInvalidValue;
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(arguments.x) | reinterpret_cast<uintptr_t>(arguments.y);
  if (plan.route == Route::kRing && addresses % 16 != 0) return cudaErrorInvalidValue;

  GroupRange range{};
  range.group_size = problem.group_size();
  range.inverse_group_size = 1.0 / static_cast<double>(range.group_size);
  range.spatial_size = static_cast<uint32_t>(problem.spatial_size);
  range.channels_per_group = static_cast<uint32_t>(problem.channels_per_group());
  range.num_groups = static_cast<uint32_t>(problem.num_groups);
  range.span_size = static_cast<uint32_t>(plan.spans.size);
  range.spans = static_cast<int>(plan.spans.count);
  range.weight = arguments.weight;
  range.bias = arguments.bias;
  range.eps = arguments.eps;
  const KernelTypes types{problem.x_dtype, problem.y_dtype, problem.activation};
  const int64_t y_size = size_in_bytes(problem.y_dtype);

  // One turn unless the partial results of all groups exceed the workspace, which takes 19 MB of x
  // at least in three_pass, 34 MB in two_pass (groups of two spans, the second of one element) and
  // 1 GB in the ring.
  for (int64_t first = 0; first < problem.group_count(); first += plan.groups_per_launch) {
    range.first_in_sample = static_cast<uint32_t>(first % problem.num_groups);
    range.groups = std::min(plan.groups_per_launch, problem.group_count() - first);
    range.x = static_cast<const uint16_t*>(arguments.x) + first * range.group_size;
    range.y = static_cast<char*>(arguments.y) + first * range.group_size * y_size;
    cudaError_t error;
    if (plan.route == Route::kResident) {
      *kernel = "resident_groups";
      error = launch_resident_groups(range, types, plan.config, plan.residence, stream);
    } else if (plan.route == Route::kRing) {
      error = launch_ring(plan, range, types, arguments.workspace, stream, kernel);
    } else if (range.group_size < kWholeWarp) {
      *kernel = "small_groups";
      error = launch_small_groups(range, types, stream);
    } else if (plan.spans.count == 1) {
      *kernel = "whole_groups";
      error = launch_whole_groups(range, types, stream);
    } else if (plan.route == Route::kTwoPass) {
      range.workspace.moments = static_cast<SpanMoments*>(arguments.workspace);
      error = launch_two_pass(plan, range, types, stream, kernel);
    } else {
      range.workspace = divide_workspace(arguments.workspace, range.groups, range.spans);
      error = launch_three_pass(plan, range, types, stream, kernel);
    }
    if (error != cudaSuccess) {
      cudaGetLastError();  // not to be found by the next call
      return error;
    }
  }
  return cudaSuccess;
}

cudaError_t kernel_image_status(int* compiled_for) {
  const cudaError_t status = partial_sums_image_status(compiled_for);
  if (status != cudaSuccess) cudaGetLastError();  // not to be found by the next caller
  return status;
}

}  // namespace gnsilu
