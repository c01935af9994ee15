// All in one launch for groups of less than 256 elements: several groups share a warp, each as many
// lanes as it has vectors, or elements after the last one. A lane has at most one vector and one
// such element, which are the chunks that a whole warp would give it, so that the bits are those of
// whole_groups and two_pass.
#include <algorithm>

#include "dispatch.h"
#include "kernels.h"
#include "normalise.cuh"
#include "warp_moments.cuh"

namespace gnsilu {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMaxBlocks = int64_t{1} << 20;  // beyond that a lane takes several groups

// Over the lanes of a group, the same in each: the sums of all other lanes would be 0.
__device__ __forceinline__ double sum_over(double value, uint32_t lanes) {
  for (uint32_t step = lanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

// The moments of the group at x; every lane of the warp comes here, with `exists` or not.
template <DType kX>
__device__ __forceinline__ SpanMoments group_moments_of(const uint16_t* x, uint32_t size,
                                                        uint32_t lane, uint32_t lanes,
                                                        bool exists) {
  const uint32_t vectors = size / kVector;
  const uint32_t element = kVector * vectors + lane;
  const double pivot = exists ? static_cast<double>(to_float<kX>(x[0])) : 0;
  ChainReader<kX, Unscaled> reader{{}, pivot, {}};
  if (exists && lane < vectors) {
    const Vector loaded[1] = {load_vector(x + kVector * lane, access_width(x))};
    reader.add(loaded, [&](uint32_t) { return loaded[0]; });
  }
  if (exists && element < size) reader.add(to_float<kX>(x[element]));
  const LaneSums& sums = reader.chunks.sums;
  const LaneSums all = {sum_over(sums.sum, lanes), sum_over(sums.squares, lanes)};
  const auto count = static_cast<double>(size);
  SpanMoments moments = moments_of(all, pivot, count, 1.0 / count);
  // Rarely FP32 was too narrow: the whole warp sums such groups again, one after the other.
  uint32_t again = __ballot_sync(0xffffffffu, exists && needs_scaling(moments));
  while (again != 0) {
    const int first = __ffs(static_cast<int>(again)) - 1;
    const auto address = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(x), first);
    const SpanMoments found = {__shfl_sync(0xffffffffu, moments.mean, first),
                               __shfl_sync(0xffffffffu, moments.squares, first)};
    const SpanMoments right = checked<kX>(found, reinterpret_cast<const uint16_t*>(address), size);
    const bool own = reinterpret_cast<uint64_t>(x) == address;
    if (own) moments = right;
    again &= ~__ballot_sync(0xffffffffu, own);
  }
  return moments;
}

template <DType kX, DType kY, Activation kActivation>
__global__ void __launch_bounds__(kThreads)
    small_groups(GroupRange range, uint32_t lanes, uint32_t row_lanes) {
  const int64_t at_once = static_cast<int64_t>(gridDim.x) * (kThreads / lanes);
  const uint32_t lane = threadIdx.x % lanes;
  const uint32_t size = static_cast<uint32_t>(range.group_size);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes);
  for (int64_t of_block = begin; of_block < range.groups; of_block += at_once) {
    const int64_t group = of_block + threadIdx.x / lanes;
    const bool exists = group < range.groups;
    const uint16_t* x = range.x + (exists ? group : of_block) * range.group_size;
    const SpanMoments span = group_moments_of<kX>(x, size, lane, lanes, exists);
    if (!exists) continue;
    SpanSums sums;
    sums.add(span, static_cast<double>(size), span.mean);
    const GroupMoments moments = group_moments(sums, span.mean, range.inverse_group_size);
    const Normalisation normalisation =
        normalisation_of(moments.variance, moments.centre, range.eps);

    auto* y = static_cast<typename Stored<kY>::Type*>(range.y) + group * range.group_size;
    // There may be more than 2^32 groups as small as that.
    const auto in_sample =
        static_cast<uint32_t>((range.first_in_sample + group) % range.num_groups);
    for (uint32_t row = lane / row_lanes; row < range.channels_per_group;
         row += lanes / row_lanes) {
      const uint32_t offset = row * range.spatial_size;
      const Affine affine = RawParameters::load(range, in_sample, row).affine(range, normalisation);
      normalise_run<kX, kY, kActivation, 1>(x + offset, y + offset, range.spatial_size,
                                            normalisation.centring, affine, lane % row_lanes,
                                            row_lanes);
    }
  }
}

// A power of two: enough for a vector a lane, and for an element after the last vector.
uint32_t lanes_per_group(int64_t group_size) {
  const auto vectors = static_cast<uint32_t>(group_size / kVector);
  const uint32_t needed = std::max(vectors, static_cast<uint32_t>(group_size % kVector));
  uint32_t lanes = 1;
  while (lanes < needed) lanes *= 2;
  return lanes;
}

}  // namespace

cudaError_t launch_small_groups(const GroupRange& range, const KernelTypes& types,
                                cudaStream_t stream) {
  const uint32_t lanes = lanes_per_group(range.group_size);
  const uint32_t row_lanes = std::min(lanes, lanes_per_row(range.spatial_size));
  const int64_t groups_per_block = kThreads / lanes;
  const int64_t needed = (range.groups + groups_per_block - 1) / groups_per_block;
  const unsigned blocks = static_cast<unsigned>(std::min(needed, kMaxBlocks));
  return dispatch_x(types.x, [&](auto x) {
    return dispatch_y(types.y, [&](auto y) {
      return dispatch_activation(types.activation, [&](auto activation) {
        small_groups<x(), y(), activation()>
            <<<blocks, kThreads, 0, stream>>>(range, lanes, row_lanes);
        return cudaGetLastError();
      });
    });
  });
}

}  // namespace gnsilu
