// CUDA's errors as torch's.
#pragma once

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

namespace gnsilu {

// Raises torch.OutOfMemoryError, which callers catch to go on in tiles, or RuntimeError; what
// begins the message.
template <class... What>
void check_cuda(cudaError_t error, const What&... what) {
  TORCH_CHECK_WITH(OutOfMemoryError, error != cudaErrorMemoryAllocation, what..., ": ",
                   cudaGetErrorString(error));
  TORCH_CHECK(error == cudaSuccess, what..., ": ", cudaGetErrorString(error));
}

}  // namespace gnsilu
