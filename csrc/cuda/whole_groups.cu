// All in one launch for groups of a single span (256 to 512 elements): a warp a group. The
// statistics read x from memory, the apply finds it in the caches; no workspace. The bits are those
// of two_pass.
#include <algorithm>

#include "dispatch.h"
#include "kernels.h"
#include "normalise.cuh"
#include "warp_moments.cuh"

namespace gnsilu {
namespace {

constexpr int kThreads = 128;
constexpr int kInFlight = 4;
constexpr int64_t kMaxBlocks = int64_t{1} << 20;  // beyond that a warp takes several groups

template <DType kX, DType kY, Activation kActivation>
__global__ void whole_groups(GroupRange range, uint32_t lanes) {
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t size = static_cast<uint32_t>(range.group_size);
  int64_t group = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  for (; group < range.groups; group += warps) {
    const uint16_t* x = range.x + group * range.group_size;
    auto* y = static_cast<typename Stored<kY>::Type*>(range.y) + group * range.group_size;

    const SpanMoments span = warp_moments<kX, kInFlight>(x, size);
    SpanSums sums;
    sums.add(span, static_cast<double>(size), span.mean);
    const GroupMoments moments = group_moments(sums, span.mean, range.inverse_group_size);
    const Normalisation normalisation =
        normalisation_of(moments.variance, moments.centre, range.eps);

    // There may be more than 2^32 groups as small as that.
    const auto in_sample =
        static_cast<uint32_t>((range.first_in_sample + group) % range.num_groups);
    for (uint32_t row = lane / lanes; row < range.channels_per_group; row += kWarp / lanes) {
      const uint32_t offset = row * range.spatial_size;
      const Affine affine = RawParameters::load(range, in_sample, row).affine(range, normalisation);
      normalise_run<kX, kY, kActivation, kInFlight>(x + offset, y + offset, range.spatial_size,
                                                    normalisation.centring, affine, lane % lanes,
                                                    lanes);
    }
  }
}

}  // namespace

cudaError_t launch_whole_groups(const GroupRange& range, const KernelTypes& types,
                                cudaStream_t stream) {
  constexpr int64_t kGroupsPerBlock = kThreads / kWarp;
  const int64_t needed = (range.groups + kGroupsPerBlock - 1) / kGroupsPerBlock;
  const unsigned blocks = static_cast<unsigned>(std::min(needed, kMaxBlocks));
  return dispatch_x(types.x, [&](auto x) {
    return dispatch_y(types.y, [&](auto y) {
      return dispatch_activation(types.activation, [&](auto activation) {
        whole_groups<x(), y(), activation()>
            <<<blocks, kThreads, 0, stream>>>(range, lanes_per_row(range.spatial_size));
        return cudaGetLastError();
      });
    });
  });
}

}  // namespace gnsilu
