// Runs a Plan on raw device pointers. Needs the CUDA runtime and nothing of torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gnsilu/plan.h"
#include "gnsilu/problem.h"

namespace gnsilu {

// weight or bias: C values of any of the four types, `stride` elements apart. A null pointer
// stands for all ones (weight) or all zeros (bias).
struct Parameter {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride = 1;
};

struct Arguments {
  const void* x = nullptr;    // [samples, channels, spatial_size], dense, aligned to its element
  Parameter weight;           // [channels]
  Parameter bias;             // [channels]
  double eps = 0;             // added to the variance
  void* y = nullptr;          // like x, of problem.y_dtype, no overlap with x; problem.aligned
                              // says that x and y begin at multiples of 16 bytes
  void* workspace = nullptr;  // plan.workspace_bytes, aligned to 16 bytes; any contents
};

// Queues the plan's kernels on stream, of the current device, and returns at once; allocates
// nothing, synchronises nothing. On an error *kernel (where not null) names the kernel that
// could not be launched; y is then undefined. An empty problem launches nothing. The ring with x or
// y at no multiple of 16 bytes is cudaErrorInvalidValue, as the fallback is.
cudaError_t launch(const Plan& plan, const Problem& problem, const Arguments& arguments,
                   cudaStream_t stream, const char** kernel = nullptr);

// Whether this build holds code for the current device's GPU: cudaSuccess, or what the runtime
// says of one kernel (cudaErrorNoKernelImageForDevice). Leaves no error behind. *compiled_for: the
// capability that the code was compiled for, 80 where PTX of 8.0 serves a 9.0.
cudaError_t kernel_image_status(int* compiled_for);

}  // namespace gnsilu
