// The kernels in a program without torch: a Plan for a Problem, then launch() on device pointers.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <vector>

#include "gnsilu/float16.h"
#include "gnsilu/launch.h"

namespace {

// Ends the program where CUDA fails.
void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::cerr << what << ": " << cudaGetErrorString(error) << '\n';
  std::exit(1);
}

gnsilu::Device current_device() {
  int index = 0;
  cudaDeviceProp properties;
  gnsilu::Device device;
  check(cudaGetDevice(&index), "cudaGetDevice");
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  check(cudaDriverGetVersion(&device.driver_version), "cudaDriverGetVersion");
  device.name = properties.name;
  device.sm_count = properties.multiProcessorCount;
  device.capability_major = properties.major;
  device.capability_minor = properties.minor;
  device.shared_memory_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  int compiled_for = 0;
  device.has_kernel_image = gnsilu::kernel_image_status(&compiled_for) == cudaSuccess;
  device.has_clusters = compiled_for >= 90;
  return device;
}

double silu(double z) { return z / (1 + std::exp(-z)); }

// The largest error of y against FP64; weight 1, bias 0.
double largest_error(const std::vector<uint16_t>& x, const std::vector<uint16_t>& y,
                     const gnsilu::Problem& problem, double eps) {
  const auto size = static_cast<size_t>(problem.group_size());
  double largest = 0;
  for (size_t group = 0; group < x.size() / size; ++group) {
    double mean = 0, variance = 0;
    for (size_t i = group * size; i < (group + 1) * size; ++i)
      mean += gnsilu::float_from_bf16(x[i]);
    mean /= static_cast<double>(size);
    for (size_t i = group * size; i < (group + 1) * size; ++i) {
      variance += std::pow(gnsilu::float_from_bf16(x[i]) - mean, 2);
    }
    variance /= static_cast<double>(size);
    for (size_t i = group * size; i < (group + 1) * size; ++i) {
      const double z = (gnsilu::float_from_bf16(x[i]) - mean) / std::sqrt(variance + eps);
      largest = std::fmax(largest, std::fabs(gnsilu::float_from_bf16(y[i]) - silu(z)));
    }
  }
  return largest;
}

}  // namespace

int main() {
  gnsilu::Problem problem;
  problem.samples = 1;
  problem.channels = 128;
  problem.spatial_size = 64 * 64;
  problem.num_groups = 32;
  problem.on_cuda = true;

  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    gnsilu::Device h100;  // choosing needs no GPU
    h100.sm_count = 132;
    h100.capability_major = 9;
    h100.has_kernel_image = h100.has_clusters = true;
    h100.shared_memory_per_block = 232448;
    std::cout << "no GPU; one of 132 multiprocessors would take "
              << to_string(gnsilu::choose(problem, h100).route) << '\n';
    return 0;
  }

  const gnsilu::Plan plan = gnsilu::choose(problem, current_device());
  std::cout << to_string(plan.route) << ": " << plan.reason << '\n';
  if (plan.route == gnsilu::Route::kFallback) return 0;  // PyTorch's operators, which are not here

  std::vector<uint16_t> x(static_cast<size_t>(problem.numel())), y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = gnsilu::bf16_from_float(std::sin(0.37f * static_cast<float>(i % 100003)));
  }
  const size_t bytes = x.size() * sizeof(x[0]);
  gnsilu::Arguments arguments;
  arguments.eps = 1e-6;
  void *device_x = nullptr, *workspace = nullptr;
  check(cudaMalloc(&device_x, bytes), "cudaMalloc");
  check(cudaMalloc(&arguments.y, bytes), "cudaMalloc");
  check(cudaMalloc(&workspace, static_cast<size_t>(plan.workspace_bytes) + 1), "cudaMalloc");
  check(cudaMemcpy(device_x, x.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  arguments.x = device_x;
  arguments.workspace = workspace;

  const char* kernel = "";
  check(gnsilu::launch(plan, problem, arguments, /*stream=*/nullptr, &kernel), kernel);
  check(cudaMemcpy(y.data(), arguments.y, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  for (void* memory : {device_x, arguments.y, workspace}) check(cudaFree(memory), "cudaFree");

  const double error = largest_error(x, y, problem, arguments.eps);
  std::cout << "largest error " << error << '\n';
  return error < 0x1p-7 ? 0 : 1;
}
