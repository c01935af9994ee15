// One call of an op: its arguments as the dispatcher hands them over, and what follows from them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "gnsilu/plan.h"
#include "gnsilu/problem.h"

namespace gnsilu {

struct Call {
  const at::Tensor& x;
  int64_t num_groups;
  const std::optional<at::Tensor>& weight;
  const std::optional<at::Tensor>& bias;
  double eps;
  std::optional<at::ScalarType> dtype;
  Activation activation;

  // The result's type: dtype, else x's.
  at::ScalarType result_dtype() const { return dtype ? *dtype : x.scalar_type(); }
  // x's where that is channels_last (or channels_last_3d), else contiguous.
  at::MemoryFormat result_memory_format() const {
    return x.is_contiguous() ? at::MemoryFormat::Contiguous : x.suggest_memory_format();
  }
  const char* name() const {
    return activation == Activation::kSilu ? "group_norm_silu" : "group_norm";
  }
};

// Raises an error that names the argument, what it is and what is wanted. The same checks, in the
// same order, on every device, before anything runs; sizes may be symbolic.
void check(const Call& call);

// Whether a gradient has to flow back to an argument, or a forward-mode tangent through it.
bool needs_grad(const Call& call);

// For concrete sizes.
Problem problem_of(const Call& call);

// The route named by GNSILU_ROUTE, read at each call; nothing for "auto", "" or unset. An unknown
// name is an error.
std::optional<Route> forced_route();

// What stands for the device of a call that no CUDA kernel serves. Warns once where x is on a GPU
// and this build is for the CPU only.
Device no_device(const Call& call);

// choose(), with an impossible forced route turned into torch's error.
Plan checked_choose(const Call& call, const Problem& problem, const Device& device);

}  // namespace gnsilu
