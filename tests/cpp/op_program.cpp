// A C++ program that links libtorch and the op library and calls the op through the dispatcher;
// also loads a TorchScript module, where one is named: op_program [module.pt x.pt want.pt]
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/cuda.h>
#include <torch/script.h>

#include <iostream>

#include "saved_tensor.h"

namespace {

at::Tensor group_norm_silu(const at::Tensor& x, int64_t num_groups,
                           const std::optional<at::Tensor>& weight,
                           const std::optional<at::Tensor>& bias, double eps) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("gnsilu::group_norm_silu", "")
          .typed<at::Tensor(const at::Tensor&, int64_t, const std::optional<at::Tensor>&,
                            const std::optional<at::Tensor>&, double,
                            std::optional<at::ScalarType>)>();
  return op.call(x, num_groups, weight, bias, eps, std::nullopt);
}

// Within one unit in the last place of BF16, 2^-8 of the value.
bool call_gives_pytorchs_values(const at::Device& device) {
  const at::Tensor x = at::randn({2, 64, 33, 31}, at::device(device)).to(at::kBFloat16);
  const at::Tensor weight = at::randn({64}, at::device(device));
  const at::Tensor bias = at::randn({64}, at::device(device));
  const at::Tensor y = group_norm_silu(x, 32, weight, bias, 1e-5);
  const at::Tensor want =
      at::silu(at::group_norm(x.to(at::kDouble), 32, weight.to(at::kDouble), bias.to(at::kDouble)));
  return y.scalar_type() == at::kBFloat16 &&
         at::allclose(y.to(at::kDouble), want, /*rtol=*/0x1p-8, /*atol=*/1e-5);
}

bool call_raises_for_bad_groups() {
  try {
    group_norm_silu(at::zeros({1, 128, 4, 4}), 7, std::nullopt, std::nullopt, 1e-5);
  } catch (const c10::Error& error) {
    return error.msg().find("num_groups is 7, x has 128 channels") != std::string::npos;
  }
  return false;
}

bool module_gives_the_saved_bits(const char* module, const char* x, const char* want) {
  const at::Tensor y = torch::jit::load(module).forward({load_tensor(x)}).toTensor();
  return at::equal(y, load_tensor(want));
}

}  // namespace

int main(int argc, char** argv) {
  bool ok = call_gives_pytorchs_values(at::kCPU) && call_raises_for_bad_groups();
  if (torch::cuda::is_available()) {
    ok = ok && call_gives_pytorchs_values(at::kCUDA);
    std::cout << "checked on the GPU, too\n";
  }
  if (argc == 4) ok = ok && module_gives_the_saved_bits(argv[1], argv[2], argv[3]);
  std::cout << (ok ? "op_program: passed\n" : "op_program: FAILED\n");
  return ok ? 0 : 1;
}
