// Last pass: y = silu((x - mean) * rstd * weight + bias), rounded once.
//
// Every block merges its group's sums of squares, or moments (at most 640, fixed order);
// then teams of lanes take tiles, each a run of one channel, so that scale and shift are constants
// of the run: z = fma(fma(x, 2^-e, -mean32 * 2^-e), scale, shift), where the shift carries what
// rounding the mean to FP32 lost (numerics.h).
// Reads x and writes y, 4 bytes an element (6 to FP32). 5.1 instructions an element in the loop
// without SiLU (counted with cuobjdump -sass for sm_90); the short SiLU adds 8, two of them special
// functions.
#include "dispatch.h"
#include "kernels.h"
#include "normalise.cuh"
#include "warp_moments.cuh"

namespace gnsilu {
namespace {

// Elements of a tile: 32 vectors a lane, over which reading a channel's parameters is shared out.
constexpr uint32_t kTile = 8192;

struct TileGrid {
  uint32_t lanes;          // a team, which works on one tile at a time
  uint32_t tiles_per_row;  // a row is one channel of one sample
  uint32_t tiles;          // a group
  uint32_t blocks_per_group;
};

// By one warp, from what the passes before left in the workspace.
__device__ __forceinline__ Normalisation merged_normalisation(const GroupRange& range,
                                                              int64_t group) {
  const Workspace& w = range.workspace;
  if (w.moments != nullptr) {
    const GroupMoments moments =
        merge_moments(w.moments + group * range.spans, range.spans, range.span_size,
                      range.group_size, range.inverse_group_size);
    return normalisation_of(moments.variance, moments.centre, range.eps);
  }
  const double squares = merge_sums(w.squares + group * range.spans, range.spans);
  const Centre centre = w.centres[group];
  return normalisation_of(variance_of(squares, centre, range.group_size), centre, range.eps);
}

template <DType kX, DType kY, Activation kActivation, int kInFlight>
__global__ void apply(GroupRange range, TileGrid grid) {
  __shared__ Normalisation shared_normalisation;
  const int64_t group = blockIdx.x / grid.blocks_per_group;
  const uint32_t block = blockIdx.x % grid.blocks_per_group;
  if (threadIdx.x < kWarp) {
    const Normalisation merged = merged_normalisation(range, group);
    if (threadIdx.x == 0) shared_normalisation = merged;
  }
  __syncthreads();
  const Normalisation normalisation = shared_normalisation;

  const uint32_t teams = blockDim.x / grid.lanes;
  const uint32_t tile = block * teams + threadIdx.x / grid.lanes;
  if (tile >= grid.tiles) return;
  const uint32_t row = tile / grid.tiles_per_row;
  const uint32_t start = (tile % grid.tiles_per_row) * kTile;
  const uint32_t size = min(kTile, range.spatial_size - start);
  const int64_t offset =
      group * range.group_size + static_cast<int64_t>(row) * range.spatial_size + start;
  const uint32_t in_sample = group_in_sample(range, static_cast<uint32_t>(group));
  const Affine affine = RawParameters::load(range, in_sample, row).affine(range, normalisation);
  normalise_run<kX, kY, kActivation, kInFlight>(
      range.x + offset, static_cast<typename Stored<kY>::Type*>(range.y) + offset, size,
      normalisation.centring, affine, threadIdx.x % grid.lanes, grid.lanes);
}

uint32_t ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

TileGrid tile_grid(const GroupRange& range, const Config& config) {
  TileGrid grid;
  grid.lanes = lanes_per_row(range.spatial_size);
  grid.tiles_per_row = ceil_div(range.spatial_size, kTile);
  grid.tiles = grid.tiles_per_row * range.channels_per_group;
  const uint32_t teams = static_cast<uint32_t>(config.threads) / grid.lanes;
  grid.blocks_per_group = ceil_div(grid.tiles, teams);
  return grid;
}

}  // namespace

cudaError_t launch_apply(const GroupRange& range, const KernelTypes& types, const Config& config,
                         cudaStream_t stream) {
  const TileGrid grid = tile_grid(range, config);
  return dispatch_x(types.x, [&](auto x) {
    return dispatch_y(types.y, [&](auto y) {
      return dispatch_activation(types.activation, [&](auto activation) {
        return dispatch_in_flight(config, [&](auto in_flight) {
          const unsigned blocks = static_cast<unsigned>(range.groups * grid.blocks_per_group);
          apply<x(), y(), activation(), in_flight()>
              <<<blocks, config.threads, 0, stream>>>(range, grid);
          return cudaGetLastError();
        });
      });
    });
  });
}

}  // namespace gnsilu
