// All in one launch and one read, for groups larger than shared memory: the blocks, one a
// multiprocessor, share every group, and hold their parts of it until its moments are known.
//
// A block is a ring of tiles in shared memory, and warps that each do one thing:
//
//   load     bulk copies of x into free slots (ring_sum.cuh)               one thread
//   sum      a chain of each span's sums                                   eight warps
//   publish  the span's moments, for all blocks                            one warp
//   finish   a group's moments, scales and shifts (ring_finish.cuh)        two warps, in turn
//   apply    x into registers, which frees the slot; once the group is     three teams of four
//            finished, y (ring_apply.cuh)                                  warps, a tile each
//
// They wait for each other by barriers in shared memory, blocks by words in global memory
// (exchange.cuh). All blocks have to run at once: a cooperative launch. A block never waits for
// more than its share of a group and the tiles before, for which there is room; where there is not,
// what it cannot keep is read again. Sums and merge are those of two_pass, and so are the bits.
//
// Reads x and writes y once, 4 bytes an element (6 to FP32). 17.6 instructions an element, BF16
// with SiLU: 6.1 to sum, 11.5 to apply, counted in the loops of cuobjdump -sass for sm_90; around
// the tiles and waiting some more (docs/design.md has what was executed). H200: x1.12 to x1.26 of a
// copy for activations of 64 MB and more in groups to 20 MB, x1.43 at groups of 34 MB.
//
// Beside so much shared memory the first-level cache is next to nothing, and what does not fit the
// registers costs more than the instructions that it takes: keep this kernel without spills (nvcc
// -Xptxas=-v). 84 bytes a thread came with x1.27 instead of x1.14 (1x128x1024x1024).
//
// What was tried and lost: y by bulk copies from shared memory (their stages took the room of two
// slots), x prefetched into L2, more warps with fewer registers each, 4 and 8 vectors a thread at a
// time, registers handed from warps to warps (setmaxnreg), programmatic launch.
#include <atomic>

#include "dispatch.h"
#include "ring_apply.cuh"
#include "ring_finish.cuh"
#include "ring_sum.cuh"

namespace gnsilu {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <DType kX, DType kY, Activation kActivation>
__global__ void ring(GroupRange, RingGrid) {
  __trap();  // choose() does not let it happen
}
#else
__device__ __forceinline__ void init(RingShared& s, uint32_t slots) {
  for (uint32_t i = 0; i < slots; ++i) {
    s.full[i].init(1);
    s.empty[i].init(kSumWarps + kTeamWarps);
  }
  // Every lane says for itself that it has written: compute-sanitizer follows no other lane's word.
  for (Barrier& barrier : s.summed) barrier.init(kSumWarps * kWarp);
  for (Barrier& barrier : s.taken) barrier.init(1);
  for (Barrier& barrier : s.ready) barrier.init(kWarp);
  for (Barrier& barrier : s.left) barrier.init(kApplyTeams * kTeamWarps);
  s.published = 0;
  publish_barriers();
}

// What the blocks tell each other begins as absent: each block's part of it.
__device__ __forceinline__ void clear_exchange(const GroupRange& range) {
  const int64_t words = range.groups * (2 * range.spans + kNormalisationWords);
  uint64_t* const exchange = reinterpret_cast<uint64_t*>(range.workspace.moments);
  for (int64_t i = 2 * (int64_t{blockIdx.x} * kRingThreads + threadIdx.x); i < words;
       i += 2 * int64_t{gridDim.x} * kRingThreads) {
    store_pair(exchange + i, kAbsent, kAbsent);
  }
}

template <DType kX, DType kY, Activation kActivation>
__global__ void __launch_bounds__(kRingThreads, 1) ring(GroupRange range, RingGrid grid) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ RingShared shared;
  if (threadIdx.x == 0) init(shared, grid.slots);
  clear_exchange(range);
  __syncthreads();
  const RingBlock block{range, grid, shared, reinterpret_cast<uint16_t*>(tiles)};
  // So that the compiler knows it to be the same in all lanes, and keeps what follows from it in
  // uniform registers: what does not fit the others goes to local memory, which beside that much
  // shared memory has next to no cache (x1.14 instead of x1.11 of a copy at 1x128x1024x1024).
  const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0);
  const bool first = threadIdx.x % kWarp == 0;
  constexpr uint32_t kFirstOfTeams = kServiceWarps + kSumWarps;
  if (warp >= kFirstOfTeams) {
    apply_tiles<kX, kY, kActivation>(block, (warp - kFirstOfTeams) / kTeamWarps,
                                     (threadIdx.x - kWarp * kFirstOfTeams) % kTeamThreads);
  } else if (warp >= kServiceWarps) {
    sum_tiles<kX>(block, warp - kServiceWarps);
  } else if (warp == 0) {
    if (first) load_tiles(block);
  } else if (warp == 1) {
    publish_spans<kX>(block);
  } else {
    finish_groups(block, warp - 2);
  }
}
#endif

RingGrid ring_grid(const GroupRange& range, const Ring& ring) {
  static std::atomic<uint32_t> launches{0};
  const auto tiles = [](int64_t elements) {
    return static_cast<uint32_t>((elements + kRingTile - 1) / kRingTile);
  };
  const auto blocks = static_cast<uint32_t>(ring.blocks);
  const auto spans = static_cast<uint32_t>(range.spans);
  RingGrid grid;
  grid.groups = static_cast<uint32_t>(range.groups);
  grid.slots = static_cast<uint32_t>(ring.slots);
  grid.kept = static_cast<uint32_t>(ring.kept);
  grid.in_flight = static_cast<uint32_t>(ring.in_flight);
  grid.span_tiles = tiles(range.span_size);
  grid.last_span_tiles = tiles(range.group_size - int64_t{range.span_size} * (range.spans - 1));
  grid.jump_groups = blocks / spans;
  grid.jump_spans = blocks % spans;
  grid.barrier = launches++ % kGridBarriers;
  grid.rows = rows_of(range);
  return grid;
}

template <DType kX, DType kY, Activation kActivation>
cudaError_t launch(const GroupRange& range, const Ring& shape, cudaStream_t stream) {
  const auto kernel = ring<kX, kY, kActivation>;
  const auto bytes = static_cast<size_t>(ring_bytes(shape.slots));
  // The limit is the kernel's, for all threads: always the same on one GPU.
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(kRingThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, range, ring_grid(range, shape));
}

}  // namespace

cudaError_t launch_ring(const GroupRange& range, const KernelTypes& types, const Ring& shape,
                        cudaStream_t stream) {
  return dispatch_x(types.x, [&](auto x) {
    return dispatch_y(types.y, [&](auto y) {
      return dispatch_activation(types.activation, [&](auto activation) {
        return launch<x(), y(), activation()>(range, shape, stream);
      });
    });
  });
}

}  // namespace gnsilu
