// A tensor that a Python test handed over: the buffer `tensor` of a TorchScript module.
#pragma once

#include <torch/script.h>

inline at::Tensor load_tensor(const char* path) {
  return torch::jit::load(path).attr("tensor").toTensor();
}
