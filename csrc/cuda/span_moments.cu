// First of two passes: the mean and the sum of squared deviations of every span, in one read.
//
// A warp a span: chunks of 32 elements about an FP32 centre of their own, then FP64 about the
// span's first element (moments.h); the apply pass merges the spans. A span whose squares leave
// FP32's range is summed again, scaled by a power of two.
// Reads x once, 2 bytes an element. 6.0 instructions an element in the loop (unpack, exact sum,
// centre, square), counted with cuobjdump -sass for sm_90.
#include "dispatch.h"
#include "kernels.h"
#include "span_grid.cuh"
#include "warp_moments.cuh"

namespace gnsilu {
namespace {

template <DType kX, int kInFlight>
__global__ void span_moments(GroupRange range, int blocks_per_group) {
  const WarpSpan span =
      span_of_warp(range, blockIdx.x / blocks_per_group, blockIdx.x % blocks_per_group);
  if (span.size == 0) return;
  const SpanMoments moments = warp_moments<kX, kInFlight>(span.x, span.size);
  if (threadIdx.x % kWarp == 0) range.workspace.moments[span.partial] = moments;
}

}  // namespace

cudaError_t launch_span_moments(const GroupRange& range, const KernelTypes& types,
                                const Config& config, cudaStream_t stream) {
  const SpanGrid grid = span_grid(range, config);
  return dispatch_x(types.x, [&](auto x) {
    return dispatch_in_flight(config, [&](auto in_flight) {
      span_moments<x(), in_flight()>
          <<<grid.blocks, grid.threads, 0, stream>>>(range, grid.blocks_per_group);
      return cudaGetLastError();
    });
  });
}

}  // namespace gnsilu
