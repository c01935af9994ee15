// The op in a program with libtorch: linking gnsilu::ops registers it.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("gnsilu::group_norm_silu", "")
          .typed<at::Tensor(const at::Tensor&, int64_t, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, double,
                            std::optional<at::ScalarType>)>();
  const c10::InferenceMode no_gradient;
  const auto device = torch::cuda::is_available() ? at::kCUDA : at::kCPU;
  const at::Tensor x = torch::randn({1, 128, 64, 64}, device).to(at::kBFloat16);
  const at::Tensor weight = torch::ones({128}, device), bias = torch::zeros({128}, device);
  const at::Tensor y = op.call(x, 32, weight, bias, 1e-6, std::nullopt);

  const at::Tensor wanted = at::silu(
      at::group_norm(x.to(at::kDouble), 32, weight.to(at::kDouble), bias.to(at::kDouble), 1e-6));
  const bool ok = at::allclose(y.to(at::kDouble), wanted, /*rtol=*/0x1p-8, /*atol=*/1e-6);
  std::cout << "on " << device << ": " << (ok ? "as FP64 gives it" : "WRONG") << '\n';
  return ok ? 0 : 1;
}
