#include "fused.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda_device.h"
#include "cuda_error.h"
#include "fallback.h"
#include "gnsilu/launch.h"
#include "tuned_config.h"

namespace gnsilu {
namespace {

Parameter parameter_of(const std::optional<at::Tensor>& tensor) {
  if (!tensor.has_value() || !tensor->defined()) return {};
  Parameter parameter;
  parameter.data = tensor->const_data_ptr();
  parameter.stride = tensor->stride(0);
  switch (tensor->scalar_type()) {
    case at::kBFloat16:
      parameter.dtype = DType::kBFloat16;
      break;
    case at::kHalf:
      parameter.dtype = DType::kFloat16;
      break;
    case at::kFloat:
      parameter.dtype = DType::kFloat32;
      break;
    default:
      parameter.dtype = DType::kFloat64;
  }
  return parameter;
}

// By a fused route; the tuner may replace plan.config where config is not given.
at::Tensor run_fused(const Call& call, const Problem& problem, const Device& device, Plan plan,
                     const std::optional<Config>& config) {
  at::Tensor y = at::empty(call.x.sizes(), call.x.options().dtype(call.result_dtype()),
                           at::MemoryFormat::Contiguous);
  if (problem.numel() == 0) return y;
  at::Tensor workspace;
  Arguments arguments;
  arguments.x = call.x.const_data_ptr();
  arguments.weight = parameter_of(call.weight);
  arguments.bias = parameter_of(call.bias);
  arguments.eps = call.eps;
  arguments.y = y.mutable_data_ptr();
  if (plan.workspace_bytes > 0) {
    workspace = at::empty({plan.workspace_bytes}, call.x.options().dtype(at::kByte),
                          at::MemoryFormat::Contiguous);
    arguments.workspace = workspace.mutable_data_ptr();
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(call.x.device().index());
  plan.config = config ? *config : tuned_config(plan, problem, arguments, device, stream);

  const char* kernel = "";
  const cudaError_t error = launch(plan, problem, arguments, stream, &kernel);
  if (error == cudaErrorCooperativeLaunchTooLarge && !config && !forced_route()) {
    TORCH_WARN_ONCE(call.name(),
                    ": fewer multiprocessors than the GPU has are to be had (MPS, green ",
                    "contexts): route two_pass takes the place of ring, with the same result");
    y.reset();  // or there would be two
    workspace.reset();
    return run_fused(call, problem, device, choose(problem, device, Route::kTwoPass), config);
  }
  check_cuda(error, call.name(), ": launching kernel ", kernel);
  return y;
}

}  // namespace

at::Tensor run_cuda(const Call& call) {
  const c10::cuda::CUDAGuard guard(call.x.device());
  const Device& device = cuda_device(call.x.device().index());
  const Problem problem = problem_of(call);
  const Plan plan = checked_choose(call, problem, device);
  if (plan.route == Route::kFallback) return fallback(call);
  return run_fused(call, problem, device, plan, std::nullopt);
}

at::Tensor run_with_config(const Call& call, Route route, const Config& config, int64_t blocks) {
  TORCH_CHECK(is_candidate(route, config), "config is ", to_string(config),
              "; one of the candidates of ", to_string(route), " is wanted");
  const c10::cuda::CUDAGuard guard(call.x.device());
  const Device& device = cuda_device(call.x.device().index());
  const Problem problem = problem_of(call);
  TORCH_CHECK(blocks >= 0 && blocks <= INT32_MAX, "blocks is ", blocks,
              "; a number of blocks, or 0 for the usual one, is wanted");
  Plan plan = choose(problem, device, route);
  if (blocks > 0) {
    plan.residence.cluster = static_cast<int>(blocks);
    plan.ring = ring_of(plan.spans, static_cast<int>(blocks), device.shared_memory_per_block);
  }
  TORCH_CHECK(
      route != Route::kResident ||
          resident_layout(plan.spans, problem.channels_per_group(), plan.residence.cluster).bytes +
                  kResidentStaticBytes <=
              device.shared_memory_per_block,
      "blocks is ", blocks, "; a group's part has to fit into shared memory");
  TORCH_CHECK(route != Route::kRing ||
                  (plan.ring.blocks <= device.sm_count && fits_ring(plan.spans, plan.ring)),
              "blocks is ", blocks, "; they have to hold a group, one a multiprocessor");
  return run_fused(call, problem, device, plan, config);
}

}  // namespace gnsilu
