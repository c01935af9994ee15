#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/silu.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <vector>

namespace gnsilu {
namespace {

// On a CPU what its caches hold: half the time of 64 MiB at 1x128x512x512. On a GPU large enough to
// hide the launches.
constexpr int64_t kSliceBytesCpu = int64_t{4} << 20;
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

bool is_16_bit(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

// The parameters of some consecutive channels.
struct Affine {
  std::optional<at::Tensor> weight;
  std::optional<at::Tensor> bias;

  Affine of_channels(int64_t first, int64_t count) const {
    return {channels(weight, first, count), channels(bias, first, count)};
  }
};

// FP32 of an FP64 parameter first, as the kernels read it.
Affine affine_of(const Call& call) {
  const at::ScalarType type = compute_dtype(call);
  Affine affine{as_type(call.weight, type), as_type(call.bias, type)};
  if (!is_16_bit(call.x)) return affine;
  return {as_type(affine.weight, at::kDouble), as_type(affine.bias, at::kDouble)};
}

// z of 16-bit x [N, C, *] in FP64: the mean is taken off before anything is squared or scaled, so
// that nothing cancels, and 16-bit values neither overflow nor vanish.
at::Tensor normalised_in_fp64(const Call& call, const at::Tensor& x, int64_t groups,
                              const Affine& affine) {
  const at::Tensor wide = x.to(at::kDouble, false, false, at::MemoryFormat::Contiguous);
  const at::Tensor z = wide.view({x.size(0), groups, x.size(1) / groups, -1});
  const at::Tensor by_group = z.view({x.size(0), groups, -1});
  const double size = static_cast<double>(by_group.size(2));
  // A sum and a division by a tensor on x's device: on GPUs mean() and a division by a number
  // multiply by 1 / size, and a constant group has to be centred to exact zeros.
  const at::Tensor divisor = at::scalar_tensor(size, by_group.options());
  by_group.sub_(by_group.sum(-1, /*keepdim=*/true).div_(divisor));
  const at::Tensor variance =
      at::linalg_vector_norm(by_group, 2, at::IntArrayRef{-1}, /*keepdim=*/true)
          .square_()
          .div_(size);
  at::Tensor scale = variance.add_(call.eps).rsqrt_().unsqueeze(-1);
  const auto per_channel = [&](const at::Tensor& parameter) {
    return parameter.view({1, groups, x.size(1) / groups, 1});
  };
  if (affine.weight) scale = scale.mul(per_channel(*affine.weight));
  z.mul_(scale);
  if (affine.bias) z.add_(per_channel(*affine.bias));
  return wide;
}

at::Tensor normalised(const Call& call, const at::Tensor& x, int64_t groups, const Affine& affine) {
  if (is_16_bit(x)) return normalised_in_fp64(call, x, groups, affine);
  return at::group_norm(x.to(compute_dtype(call)), groups, affine.weight, affine.bias, call.eps,
                        /*cudnn_enabled=*/false);
}

// An empty x, with zero gradients for weight and bias: group_norm's are NaN.
at::Tensor affine_of_nothing(at::Tensor x, const std::optional<at::Tensor>& weight,
                             const std::optional<at::Tensor>& bias) {
  std::vector<int64_t> per_channel(static_cast<size_t>(x.dim()), 1);
  per_channel[1] = -1;
  if (x.sym_size(1) == 0) per_channel[1] = 0;
  if (weight) x = x.mul(weight->view(per_channel));
  if (bias) x = x.add(bias->view(per_channel));
  return x;
}

// One expression of PyTorch's operators, from x in the type that is computed in. Sizes may be
// symbolic.
at::Tensor decomposed(const Call& call, const at::Tensor& x, const Affine& affine) {
  const WithoutAutocast without_autocast;
  at::Tensor y = call.x.sym_numel() == 0
                     ? affine_of_nothing(x, affine.weight, affine.bias)
                     : at::group_norm(x, call.num_groups, affine.weight, affine.bias, call.eps,
                                      /*cudnn_enabled=*/false);
  if (call.activation == Activation::kSilu) y = at::silu(y);
  return y.to(call.result_dtype());
}

// y in a format, dimensions of size 1 included: where it has two formats at once, contiguous()
// would leave their strides as they are.
at::Tensor in_format(const at::Tensor& y, at::MemoryFormat format) {
  if (y.dim() == 4 || y.dim() == 5) {
    const auto last =
        y.dim() == 4 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
    if (y.is_contiguous() && y.is_contiguous(last)) return y.clone(format);
  }
  return y.contiguous(format);
}

}  // namespace

at::Tensor differentiable(const Call& call) {
  const at::ScalarType type = compute_dtype(call);
  const Affine affine{as_type(call.weight, type), as_type(call.bias, type)};
  // PyTorch's group_norm does not always keep x's memory format.
  return in_format(decomposed(call, call.x.to(type), affine), call.result_memory_format());
}

at::Tensor vmapped(const Call& call) {
  const at::ScalarType type = is_16_bit(call.x) ? at::kDouble : compute_dtype(call);
  // group_norm knows no other format under vmap.
  return decomposed(call, call.x.contiguous().to(type), affine_of(call));
}

at::Tensor fallback(const Call& call) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const WithoutAutocast without_autocast;
  const at::Tensor& x = call.x;
  at::Tensor y =
      at::empty(x.sizes(), x.options().dtype(call.result_dtype()), call.result_memory_format());
  if (y.numel() == 0) return y;
  const Affine affine = affine_of(call);

  auto write = [&](const at::Tensor& x_slice, const at::Tensor& y_slice, int64_t groups,
                   const Affine& affine_slice) {
    at::Tensor z = normalised(call, x_slice, groups, affine_slice);
    if (call.activation == Activation::kSilu) at::silu_(z);
    y_slice.copy_(z);
  };

  const int64_t samples = x.size(0);
  const int64_t channels_per_group = x.size(1) / call.num_groups;
  const int64_t slice_elements =
      (x.is_cpu() ? kSliceBytesCpu : kSliceBytes) /
      static_cast<int64_t>(is_16_bit(x) ? sizeof(double) : sizeof(float));
  const int64_t sample_elements = x.numel() / samples;
  if (sample_elements <= slice_elements) {
    const int64_t step = slice_elements / sample_elements;
    for (int64_t n = 0; n < samples; n += step) {
      const int64_t count = std::min(step, samples - n);
      write(x.narrow(0, n, count), y.narrow(0, n, count), call.num_groups, affine);
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
            affine.of_channels(first, count));
    }
  }
  return y;
}

}  // namespace gnsilu
