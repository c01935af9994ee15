// A C++ program that links libtorch and the op library and runs a model that AOTInductor compiled:
// aoti_program model.pt2 x.pt want.pt
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <iostream>

#include "saved_tensor.h"

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: aoti_program model.pt2 x.pt want.pt\n";
    return 2;
  }
  c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const std::vector<at::Tensor> y = model.run({load_tensor(argv[2])});
  const bool ok = y.size() == 1 && at::equal(y[0], load_tensor(argv[3]));
  std::cout << (ok ? "aoti_program: passed\n" : "aoti_program: FAILED\n");
  return ok ? 0 : 1;
}
