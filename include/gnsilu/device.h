// The facts about a GPU that choosing and tuning depend on. Invented ones serve the tests.
#pragma once

#include <cstdint>
#include <string>

namespace gnsilu {

struct Device {
  std::string name;          // as the driver gives it, "NVIDIA H200"
  int sm_count = 0;          // multiprocessors
  int capability_major = 0;  // 9 and 0 for sm_90
  int capability_minor = 0;
  int driver_version = 0;                      // cudaDriverGetVersion: 13000 for CUDA 13.0
  bool has_kernel_image = true;                // this build holds code that the GPU can run
  bool has_clusters = true;                    // and bulk copies: compiled for 9.0 or above
  int64_t shared_memory_per_block = 48 << 10;  // bytes, the most that a kernel may ask for

  int capability() const { return 10 * capability_major + capability_minor; }
};

}  // namespace gnsilu
