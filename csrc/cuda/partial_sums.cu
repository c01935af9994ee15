// First pass: the sum and the largest magnitude of every span.
//
// One warp sums a span in FP64, or in FP32 with two-sums where the GPU is slow at FP64 (ExactSum,
// moments.h), 4 chains a lane, in an order that only the span's size determines.
// Reads x once, 2 bytes an element. 5.3 instructions an element in the loop (unpack, maximum, sum;
// counted with cuobjdump -sass for sm_90).
#include "dispatch.h"
#include "kernels.h"
#include "span_grid.cuh"
#include "warp_statistics.cuh"

namespace gnsilu {
namespace {

template <DType kX, int kInFlight>
__global__ void partial_sums(GroupRange range, int blocks_per_group) {
  const WarpSpan span =
      span_of_warp(range, blockIdx.x / blocks_per_group, blockIdx.x % blocks_per_group);
  if (span.size == 0) return;
  const SpanSum result = warp_span_sum<kX, kInFlight>(span.x, span.size);
  if (threadIdx.x % kWarp == 0) {
    range.workspace.sums[span.partial] = result.sum;
    range.workspace.max_abs[span.partial] = result.max_abs;
  }
}

}  // namespace

cudaError_t partial_sums_image_status(int* compiled_for) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, partial_sums<DType::kBFloat16, 4>);
  *compiled_for = attributes.ptxVersion;
  return status;
}

cudaError_t launch_partial_sums(const GroupRange& range, const KernelTypes& types,
                                const Config& config, cudaStream_t stream) {
  const SpanGrid grid = span_grid(range, config);
  return dispatch_x(types.x, [&](auto x) {
    return dispatch_in_flight(config, [&](auto in_flight) {
      partial_sums<x(), in_flight()>
          <<<grid.blocks, grid.threads, 0, stream>>>(range, grid.blocks_per_group);
      return cudaGetLastError();
    });
  });
}

}  // namespace gnsilu
