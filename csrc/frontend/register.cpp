// The ops: schemas, and a kernel a dispatch key.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "call.h"
#include "explain.h"
#include "fallback.h"
#if GNSILU_WITH_CUDA
#include "fused.h"
#endif

namespace gnsilu {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalType = std::optional<at::ScalarType>;
using Op = at::Tensor(const at::Tensor&, int64_t, const OptionalTensor&, const OptionalTensor&,
                      double, OptionalType);

// CPU, and every device that has no kernel of its own.
template <Activation kActivation>
at::Tensor any_device(const at::Tensor& x, int64_t num_groups, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps, OptionalType dtype) {
  const Call call{x, num_groups, weight, bias, eps, dtype, kActivation};
  check(call);
  checked_choose(call, problem_of(call), no_device(call));  // a forced route may be impossible
  return fallback(call);
}

#if GNSILU_WITH_CUDA
template <Activation kActivation>
at::Tensor cuda(const at::Tensor& x, int64_t num_groups, const OptionalTensor& weight,
                const OptionalTensor& bias, double eps, OptionalType dtype) {
  const Call call{x, num_groups, weight, bias, eps, dtype, kActivation};
  check(call);
  return run_cuda(call);
}

at::Tensor with_config(const at::Tensor& x, int64_t num_groups, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps, OptionalType dtype, bool silu,
                       const std::string& route_name, int64_t threads, int64_t vectors_in_flight,
                       int64_t blocks) {
  const Activation activation = silu ? Activation::kSilu : Activation::kNone;
  const Call call{x, num_groups, weight, bias, eps, dtype, activation};
  check(call);
  const std::optional<Route> route = route_from_name(route_name);
  TORCH_CHECK(route.has_value(), "route is '", route_name, "'; a CUDA route is wanted");
  return run_with_config(call, *route,
                         {static_cast<int>(threads), static_cast<int>(vectors_in_flight)}, blocks);
}
#endif

template <Activation kActivation>
at::Tensor meta(const at::Tensor& x, int64_t num_groups, const OptionalTensor& weight,
                const OptionalTensor& bias, double eps, OptionalType dtype) {
  const Call call{x, num_groups, weight, bias, eps, dtype, kActivation};
  check(call);
  forced_route();  // an unknown name is an error here, too
  return at::empty_symint(x.sym_sizes(), x.options().dtype(call.result_dtype()),
                          call.result_memory_format());
}

// vmap: by decomposition into PyTorch's operators, which have batching rules.
template <Activation kActivation>
at::Tensor under_vmap(const at::Tensor& x, int64_t num_groups, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps, OptionalType dtype) {
  const Call call{x, num_groups, weight, bias, eps, dtype, kActivation};
  check(call);
  const std::optional<Route> route = forced_route();
  TORCH_CHECK(!route.has_value() || *route == Route::kFallback, call.name(), ": GNSILU_ROUTE is '",
              to_string(*route), "', but under vmap PyTorch's operators serve the call");
  return vmapped(call);
}

// With a gradient to carry the op becomes PyTorch's differentiable operators; without, it goes on
// below autograd.
template <Activation kActivation>
at::Tensor autograd(c10::DispatchKeySet keys, const at::Tensor& x, int64_t num_groups,
                    const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                    OptionalType dtype) {
  const Call call{x, num_groups, weight, bias, eps, dtype, kActivation};
  if (needs_grad(call)) {
    check(call);  // else the kernel below does
    Problem problem;
    problem.needs_grad = true;
    checked_choose(call, problem, no_device(call));
    return differentiable(call);
  }
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(
              kActivation == Activation::kSilu ? "gnsilu::group_norm_silu" : "gnsilu::group_norm",
              "")
          .typed<Op>();
  return op.redispatch(keys & c10::after_autograd_keyset, x, num_groups, weight, bias, eps, dtype);
}

std::string explain_op(const at::Tensor& x, int64_t num_groups, const OptionalTensor& weight,
                       const OptionalTensor& bias, double eps, OptionalType dtype) {
  return explain({x, num_groups, weight, bias, eps, dtype, Activation::kSilu});
}

#define GNSILU_ARGUMENTS                                                                 \
  "(Tensor x, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, " \
  "ScalarType? dtype=None)"

TORCH_LIBRARY(gnsilu, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("group_norm_silu" GNSILU_ARGUMENTS " -> Tensor", tags);
  m.def("group_norm" GNSILU_ARGUMENTS " -> Tensor", tags);
  m.def("explain" GNSILU_ARGUMENTS " -> str", &explain_op);
  // Private: for tests and benchmarks of the launch configurations.
  m.def(
      "_with_config(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, "
      "ScalarType? dtype, bool silu, str route, int threads, int vectors_in_flight, int blocks) "
      "-> Tensor");
}

// Also what refuses sparse, quantised and other tensors by name, in check().
TORCH_LIBRARY_IMPL(gnsilu, CompositeExplicitAutograd, m) {
  m.impl("group_norm_silu", &any_device<Activation::kSilu>);
  m.impl("group_norm", &any_device<Activation::kNone>);
}

// Nested tensors are outside of CompositeExplicitAutograd; check() refuses them. The first serves
// jagged ones, too, which are a Python subclass below autograd.
TORCH_LIBRARY_IMPL(gnsilu, AutogradNestedTensor, m) {
  m.impl("group_norm_silu", &any_device<Activation::kSilu>);
  m.impl("group_norm", &any_device<Activation::kNone>);
}

TORCH_LIBRARY_IMPL(gnsilu, NestedTensorCPU, m) {
  m.impl("group_norm_silu", &any_device<Activation::kSilu>);
  m.impl("group_norm", &any_device<Activation::kNone>);
}

TORCH_LIBRARY_IMPL(gnsilu, NestedTensorCUDA, m) {
  m.impl("group_norm_silu", &any_device<Activation::kSilu>);
  m.impl("group_norm", &any_device<Activation::kNone>);
}

#if GNSILU_WITH_CUDA
TORCH_LIBRARY_IMPL(gnsilu, CUDA, m) {
  m.impl("group_norm_silu", &cuda<Activation::kSilu>);
  m.impl("group_norm", &cuda<Activation::kNone>);
  m.impl("_with_config", &with_config);
}
#endif

TORCH_LIBRARY_IMPL(gnsilu, Meta, m) {
  m.impl("group_norm_silu", &meta<Activation::kSilu>);
  m.impl("group_norm", &meta<Activation::kNone>);
}

TORCH_LIBRARY_IMPL(gnsilu, FuncTorchBatched, m) {
  m.impl("group_norm_silu", &under_vmap<Activation::kSilu>);
  m.impl("group_norm", &under_vmap<Activation::kNone>);
}

TORCH_LIBRARY_IMPL(gnsilu, Autograd, m) {
  m.impl("group_norm_silu", &autograd<Activation::kSilu>);
  m.impl("group_norm", &autograd<Activation::kNone>);
}

}  // namespace
}  // namespace gnsilu
