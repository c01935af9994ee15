// Second pass: the sum of squares about the mean of every span.
//
// Every block first merges its group's partial sums into the mean (at most 640, fixed order), then
// a warp a span sums ((x - mean32) * 2^-exponent)^2, eight at a time with two-sums. Squares of
// deviations cannot cancel, and the power of two above the largest deviation keeps them from
// overflow and underflow; variance_of() (numerics.h) takes out what rounding the mean to FP32
// added. Reads x once, 2 bytes an element. 5.0 instructions an element in the loop (unpack, centre,
// square, sum; counted with cuobjdump -sass for sm_90).
#include "dispatch.h"
#include "kernels.h"
#include "span_grid.cuh"
#include "warp_statistics.cuh"

namespace gnsilu {
namespace {

template <DType kX, int kInFlight>
__global__ void centred_squares(GroupRange range, int blocks_per_group) {
  __shared__ Centre shared_centre;
  const int64_t group = blockIdx.x / blocks_per_group;
  const int block = blockIdx.x % blocks_per_group;
  if (threadIdx.x < kWarp) {
    const int64_t partial = group * range.spans;
    const double sum = merge_sums(range.workspace.sums + partial, range.spans);
    const float max_abs = merge_max(range.workspace.max_abs + partial, range.spans);
    if (threadIdx.x == 0) {
      shared_centre = centre_of(sum, max_abs, range.group_size, kX);
      if (block == 0) range.workspace.centres[group] = shared_centre;  // for the apply pass
    }
  }
  __syncthreads();
  const Centring centre = centring(shared_centre.mean32, shared_centre.exponent);

  const WarpSpan span = span_of_warp(range, group, block);
  if (span.size == 0) return;
  const double squares = warp_span_squares<kX, kInFlight>(span.x, span.size, centre);
  if (threadIdx.x % kWarp == 0) range.workspace.squares[span.partial] = squares;
}

}  // namespace

cudaError_t launch_centred_squares(const GroupRange& range, const KernelTypes& types,
                                   const Config& config, cudaStream_t stream) {
  const SpanGrid grid = span_grid(range, config);
  return dispatch_x(types.x, [&](auto x) {
    return dispatch_in_flight(config, [&](auto in_flight) {
      centred_squares<x(), in_flight()>
          <<<grid.blocks, grid.threads, 0, stream>>>(range, grid.blocks_per_group);
      return cudaGetLastError();
    });
  });
}

}  // namespace gnsilu
