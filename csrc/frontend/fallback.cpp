#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/silu.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace gnsilu {
namespace {

constexpr int64_t kSliceBytes = int64_t{64} << 20;

// Autocast would rule group_norm's type, and with it the exactness.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

at::ScalarType compute_dtype(const Call& call) {
  return call.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

std::optional<at::Tensor> as_type(const std::optional<at::Tensor>& tensor, at::ScalarType type) {
  if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
  return tensor->to(type);
}

std::optional<at::Tensor> channels(const std::optional<at::Tensor>& tensor, int64_t first,
                                   int64_t count) {
  if (!tensor.has_value()) return std::nullopt;
  return tensor->narrow(0, first, count);
}

}  // namespace

at::Tensor decomposed(const Call& call) {
  const WithoutAutocast without_autocast;
  const at::ScalarType type = compute_dtype(call);
  at::Tensor y = at::group_norm(call.x.to(type), call.num_groups, as_type(call.weight, type),
                                as_type(call.bias, type), call.eps, /*cudnn_enabled=*/false);
  if (call.activation == Activation::kSilu) y = at::silu(y);
  return y.to(call.result_dtype());
}

at::Tensor differentiable(const Call& call) {
  // PyTorch's group_norm does not always keep x's memory format.
  return decomposed(call).contiguous(call.result_memory_format());
}

at::Tensor fallback(const Call& call) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutAutocast without_autocast;
  const at::ScalarType type = compute_dtype(call);
  const at::Tensor& x = call.x;
  at::Tensor y =
      at::empty(x.sizes(), x.options().dtype(call.result_dtype()), call.result_memory_format());
  if (y.numel() == 0) return y;
  const std::optional<at::Tensor> weight = as_type(call.weight, type);
  const std::optional<at::Tensor> bias = as_type(call.bias, type);

  auto write = [&](const at::Tensor& x_slice, const at::Tensor& y_slice, int64_t groups,
                   const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& b) {
    at::Tensor z = at::group_norm(x_slice.to(type), groups, w, b, call.eps, false);
    if (call.activation == Activation::kSilu) at::silu_(z);
    y_slice.copy_(z);
  };

  const int64_t samples = x.size(0);
  const int64_t channels_per_group = x.size(1) / call.num_groups;
  const int64_t slice_elements = kSliceBytes / static_cast<int64_t>(sizeof(float));
  const int64_t sample_elements = x.numel() / samples;
  if (sample_elements <= slice_elements) {
    const int64_t step = slice_elements / sample_elements;
    for (int64_t n = 0; n < samples; n += step) {
      const int64_t count = std::min(step, samples - n);
      write(x.narrow(0, n, count), y.narrow(0, n, count), call.num_groups, weight, bias);
    }
    return y;
  }
  const int64_t group_elements = sample_elements / call.num_groups;
  const int64_t step = std::max<int64_t>(1, slice_elements / group_elements);
  for (int64_t n = 0; n < samples; ++n) {
    const at::Tensor x_sample = x.narrow(0, n, 1);
    const at::Tensor y_sample = y.narrow(0, n, 1);
    for (int64_t g = 0; g < call.num_groups; g += step) {
      const int64_t groups = std::min(step, call.num_groups - g);
      const int64_t first = g * channels_per_group;
      const int64_t count = groups * channels_per_group;
      write(x_sample.narrow(1, first, count), y_sample.narrow(1, first, count), groups,
            channels(weight, first, count), channels(bias, first, count));
    }
  }
  return y;
}

}  // namespace gnsilu
