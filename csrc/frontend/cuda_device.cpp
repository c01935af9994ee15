#include "cuda_device.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <array>
#include <mutex>

#include "cuda_error.h"
#include "gnsilu/launch.h"

namespace gnsilu {
namespace {

// What the runtime says of a kernel that the build does not hold for this GPU.
bool means_no_image(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
         error == cudaErrorUnsupportedPtxVersion || error == cudaErrorInvalidKernelImage;
}

Device read_device(c10::DeviceIndex index) {
  const c10::cuda::CUDAGuard guard(index);
  cudaDeviceProp properties;
  Device device;
  check_cuda(cudaGetDeviceProperties(&properties, index), "gnsilu: reading the GPU's properties");
  check_cuda(cudaDriverGetVersion(&device.driver_version), "gnsilu: reading the driver's version");
  device.name = properties.name;
  device.sm_count = properties.multiProcessorCount;
  device.capability_major = properties.major;
  device.capability_minor = properties.minor;
  device.shared_memory_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  int compiled_for = 0;
  const cudaError_t image = kernel_image_status(&compiled_for);
  device.has_clusters = compiled_for >= 90;
  device.has_kernel_image = !means_no_image(image);
  // Out of memory, or an earlier kernel's error, says nothing about the build: raised, not kept.
  if (device.has_kernel_image) check_cuda(image, "gnsilu: loading the kernels");
  if (!device.has_kernel_image) {
    TORCH_WARN("gnsilu: this build holds no usable kernels for ", device.name,
               " (compute capability ", device.capability_major, ".", device.capability_minor,
               "): ", cudaGetErrorString(image),
               ". PyTorch's operators are used instead. Rebuild gnsilu on this machine: "
               "pip install --no-build-isolation --force-reinstall --no-deps .");
  }
  return device;
}

}  // namespace

const Device& cuda_device(c10::DeviceIndex index) {
  // As many as torch can name; leaked, since threads may outlive static objects.
  static auto& once = *new std::array<std::once_flag, 128>;
  static auto& devices = *new std::array<Device, 128>;
  const auto i = static_cast<size_t>(index);
  TORCH_CHECK(i < devices.size(), "gnsilu: CUDA device index ", static_cast<int>(index));
  std::call_once(once[i], [&] { devices[i] = read_device(index); });
  return devices[i];
}

}  // namespace gnsilu
