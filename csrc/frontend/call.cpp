#include "call.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace gnsilu {
namespace {

bool is_supported_float(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf || type == at::kFloat || type == at::kDouble;
}

// Refuses by name what is a tensor to the type system but not to this op.
void check_kind(const Call& call, const char* argument, const at::Tensor& tensor) {
  const char* kind = nullptr;
  if (tensor.is_nested()) {
    kind = "a nested";
  } else if (tensor.is_quantized()) {
    kind = "a quantised";
  } else if (tensor.is_complex()) {
    kind = "a complex";
  } else if (tensor.layout() != at::kStrided) {
    kind = "a sparse (or otherwise not strided)";
  }
  TORCH_CHECK(kind == nullptr, call.name(), ": ", argument, " is ", kind,
              " tensor; a dense floating-point tensor is wanted");
  TORCH_CHECK(is_supported_float(tensor.scalar_type()), call.name(), ": ", argument, " is ",
              tensor.scalar_type(), "; bfloat16, float16, float32 or float64 is wanted");
}

void check_parameter(const Call& call, const char* argument,
                     const std::optional<at::Tensor>& parameter) {
  if (!parameter.has_value() || !parameter->defined()) return;
  check_kind(call, argument, *parameter);
  TORCH_CHECK(parameter->dim() == 1 && parameter->sym_size(0) == call.x.sym_size(1), call.name(),
              ": ", argument, " has shape ", parameter->sym_sizes(), "; one value for each of the ",
              call.x.sym_size(1), " channels of x is wanted, shape [", call.x.sym_size(1), "]");
  TORCH_CHECK(parameter->device() == call.x.device(), call.name(), ": ", argument, " is on ",
              parameter->device(), ", x on ", call.x.device(), "; the same device is wanted");
}

bool flows(const at::Tensor& tensor) {
  // Inference mode leaves grad mode as it is, and autograd out.
  const bool grad_mode = at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  return (grad_mode && tensor.requires_grad()) || tensor._fw_grad(0).defined();
}

bool flows(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() && flows(*tensor);
}

}  // namespace

void check(const Call& call) {
  check_kind(call, "x", call.x);
  TORCH_CHECK(call.x.dim() >= 2, call.name(), ": x has ", call.x.dim(),
              " dimensions; [N, C, *], two or more, is wanted");
  TORCH_CHECK(call.num_groups >= 1, call.name(), ": num_groups is ", call.num_groups, ", x has ",
              call.x.sym_size(1), " channels; 1 or more groups are wanted");
  TORCH_CHECK(call.x.sym_size(1) % call.num_groups == 0, call.name(), ": num_groups is ",
              call.num_groups, ", x has ", call.x.sym_size(1),
              " channels; a divisor of the number of channels is wanted");
  check_parameter(call, "weight", call.weight);
  check_parameter(call, "bias", call.bias);
  TORCH_CHECK(std::isfinite(call.eps) && call.eps >= 0, call.name(), ": eps is ", call.eps,
              "; a finite number, 0 or more, is wanted");
  const bool fp64_from_fp64 =
      call.result_dtype() == at::kDouble && call.x.scalar_type() == at::kDouble;
  TORCH_CHECK(call.result_dtype() == at::kBFloat16 || call.result_dtype() == at::kHalf ||
                  call.result_dtype() == at::kFloat || fp64_from_fp64,
              call.name(), ": dtype is ", call.result_dtype(),
              "; bfloat16, float16 or float32 (or float64 where x is float64) is wanted");
}

bool needs_grad(const Call& call) {
  return flows(call.x) || flows(call.weight) || flows(call.bias);
}

namespace {

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    case at::kFloat:
      return DType::kFloat32;
    default:
      return DType::kFloat64;
  }
}

}  // namespace

Problem problem_of(const Call& call) {
  Problem problem;
  problem.samples = call.x.size(0);
  problem.channels = call.x.size(1);
  problem.spatial_size = 1;
  for (int64_t i = 2; i < call.x.dim(); ++i) problem.spatial_size *= call.x.size(i);
  problem.num_groups = call.num_groups;
  problem.x_dtype = dtype_of(call.x.scalar_type());
  problem.y_dtype = dtype_of(call.result_dtype());
  problem.activation = call.activation;
  problem.on_cuda = call.x.is_cuda();
  problem.contiguous = call.x.is_contiguous();
  problem.aligned =
      !problem.on_cuda || reinterpret_cast<uintptr_t>(call.x.const_data_ptr()) % 16 == 0;
  return problem;
}

std::optional<Route> forced_route() {
  const char* value = std::getenv("GNSILU_ROUTE");
  if (value == nullptr || *value == '\0' || std::string(value) == "auto") return std::nullopt;
  const std::optional<Route> route = route_from_name(value);
  TORCH_CHECK(route.has_value(), "GNSILU_ROUTE is '", value,
              "'; auto, fallback, three_pass, two_pass, resident or ring is wanted");
  return route;
}

Device no_device(const Call& call) {
  Device device;
  device.has_kernel_image = false;
#if !GNSILU_WITH_CUDA
  if (call.x.is_cuda()) {
    TORCH_WARN_ONCE(
        "gnsilu was built for the CPU only: PyTorch's operators serve tensors on GPUs. Rebuild it "
        "where nvcc is found: pip install --no-build-isolation --force-reinstall --no-deps .");
  }
#else
  static_cast<void>(call);
#endif
  return device;
}

Plan checked_choose(const Call& call, const Problem& problem, const Device& device) {
  try {
    return choose(problem, device, forced_route());
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK(false, call.name(), ": GNSILU_ROUTE: ", error.what());
  }
}

}  // namespace gnsilu
