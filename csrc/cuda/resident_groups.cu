// All in one launch and one read, for groups that fit into shared memory: a block holds a group, or
// from compute capability 9.0 on a cluster of blocks shares it.
//
// Every warp of a block has its own spans: it fetches them into shared memory, all at once, and
// finds their moments (moments.h), which it writes into every block of the cluster. After one
// barrier a warp merges all spans, each thread maps a channel's weight and bias to scale and shift,
// and the block writes y from shared memory. No workspace, no waiting but for the cluster, which
// the GPU schedules as a whole. The bits are those of two_pass.
//
// Reads x and writes y once, 4 bytes an element (6 to FP32). 5.9 instructions an element to sum
// (cuobjdump -sass for sm_90); to apply what apply.cu takes, and the search for the channel. H200:
// x2.0 to x2.35 of a copy in the same graph, x2.8 at 33x33. Small groups are bound by latencies
// (FP64, the cluster's barrier, the launch), larger ones by loading, computing and storing one
// after the other. Tried and no faster: the exchange by st.async, 80 registers with fewer threads,
// a warp that writes its own spans, programmatic launch.
#include <cooperative_groups.h>

#include "async_copy.cuh"
#include "dispatch.h"
#include "kernels.h"
#include "normalise.cuh"
#include "warp_moments.cuh"

namespace gnsilu {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kInFlight = 4;

struct ResidentGrid {
  int cluster;          // blocks a group
  int spans_per_block;  // at most
  Rows rows;
  ResidentLayout layout;
};

// A span into shared memory, by one warp: all of it under way at once, in vectors. From 8.0 on no
// register waits for it.
__device__ __forceinline__ void fetch_span(uint16_t* shared, const uint16_t* x, uint32_t size) {
  const uint32_t lane = threadIdx.x % kWarp, vectors = size / kVector;
  const int width = access_width(x);
  for (uint32_t v = lane; v < vectors; v += kWarp) {
    uint4* const to = reinterpret_cast<uint4*>(shared + kVector * v);
#if __CUDA_ARCH__ >= 800
    if (width == 16) {
      copy_vector(to, x + kVector * v);
      continue;
    }
#endif
    *to = load_vector(x + kVector * v, width).bits;
  }
  const uint32_t element = kVector * vectors + lane;
  if (element < size) shared[element] = x[element];
}

// Until this thread's parts of its spans are there; then for the warp.
__device__ __forceinline__ void await_spans() {
#if __CUDA_ARCH__ >= 800
  wait_for_vectors();
#endif
  __syncwarp();
}

// Between the blocks of a cluster, or within the only one.
__device__ __forceinline__ void arrive_in_cluster(bool alone) {
#if __CUDA_ARCH__ >= 900
  if (!alone) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  if (!alone) __trap();  // choose() does not let it happen
#endif
}
__device__ __forceinline__ void wait_for_cluster(bool alone) {
#if __CUDA_ARCH__ >= 900
  if (!alone) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Into slot `slot` of every block's moments.
__device__ __forceinline__ void share(SpanMoments* slot, const SpanMoments& moments, int cluster) {
  const int lane = threadIdx.x % kWarp;
  if (lane >= cluster) return;
#if __CUDA_ARCH__ >= 900
  if (cluster > 1) slot = cooperative_groups::this_cluster().map_shared_rank(slot, lane);
#endif
  *slot = moments;
}

template <DType kX, DType kY, Activation kActivation>
__global__ void __launch_bounds__(kMaxThreads)
    resident_groups(GroupRange range, ResidentGrid grid) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Normalisation shared_normalisation;
  static_assert(sizeof(shared_normalisation) <= kResidentStaticBytes, "the chooser counts it");
  uint16_t* const slice = reinterpret_cast<uint16_t*>(shared);
  SpanMoments* const moments = reinterpret_cast<SpanMoments*>(shared + grid.layout.moments);
  Affine* const affines = reinterpret_cast<Affine*>(shared + grid.layout.affines);
  const bool alone = grid.cluster == 1;
  const int64_t group = blockIdx.x / grid.cluster;
  const int first_span = blockIdx.x % grid.cluster * grid.spans_per_block;
  const int last_span = min(first_span + grid.spans_per_block, range.spans);
  const uint32_t size = static_cast<uint32_t>(range.group_size);
  const uint32_t start = min(first_span * range.span_size, size);
  const uint32_t end = min(last_span * range.span_size, size);
  const uint16_t* const x = range.x + group * range.group_size;

  arrive_in_cluster(alone);  // memory of a block that has not begun must not be written to
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  for (int s = first_span + warp; s < last_span; s += warps) {
    const uint32_t at = s * range.span_size;
    fetch_span(slice + (at - start), x + at, min(range.span_size, size - at));
  }
  // Weight and bias are on their way while x is summed: of one channel a thread, the usual case.
  const uint32_t in_sample = group_in_sample(range, static_cast<uint32_t>(group));
  const RawParameters parameters =
      RawParameters::load(range, in_sample, min(threadIdx.x, range.channels_per_group - 1));
  await_spans();
  bool begun = false;
  for (int s = first_span + warp; s < last_span; s += warps) {
    const uint32_t at = s * range.span_size;
    const SpanMoments result =
        warp_moments<kX, kInFlight>(slice + (at - start), min(range.span_size, size - at));
    if (!begun) wait_for_cluster(alone);
    begun = true;
    share(moments + s, result, grid.cluster);
  }
  if (!begun) wait_for_cluster(alone);
  __syncwarp();
  arrive_in_cluster(alone);
  wait_for_cluster(alone);
  if (alone) __syncthreads();

  if (threadIdx.x < kWarp) {
    const GroupMoments merged = merge_moments(moments, range.spans, range.span_size,
                                              range.group_size, range.inverse_group_size);
    if (threadIdx.x == 0) {
      shared_normalisation = normalisation_of(merged.variance, merged.centre, range.eps);
    }
  }
  __syncthreads();
  const Normalisation normalisation = shared_normalisation;
  if (threadIdx.x < range.channels_per_group) {
    affines[threadIdx.x] = parameters.affine(range, normalisation);
  }
  for (uint32_t row = threadIdx.x + blockDim.x; row < range.channels_per_group; row += blockDim.x) {
    affines[row] = RawParameters::load(range, in_sample, row).affine(range, normalisation);
  }
  __syncthreads();

  auto* const y = static_cast<typename Stored<kY>::Type*>(range.y) + group * range.group_size;
  const bool aligned = reinterpret_cast<uintptr_t>(y + start) % (kVector * sizeof(*y)) == 0;
  uint32_t row_end = 0;  // of the channel that affine is of: usually the next vector's, too
  Affine affine;
  for (uint32_t e = start + kVector * threadIdx.x; e < end; e += kVector * blockDim.x) {
    float values[kVector];
    Vector{*reinterpret_cast<const uint4*>(slice + (e - start))}.unpack<kX>(values);
    const uint32_t count = min(static_cast<uint32_t>(kVector), end - e);
    if (e >= row_end) {
      const uint32_t row = grid.rows.row_of(e);
      row_end = (row + 1) * range.spatial_size;
      affine = affines[row];
    }
    if (row_end - e >= count) {
      normalise(values, normalisation.centring, affine);
      activate<kActivation>(values, affine);
    } else {
      normalise_across_rows<kActivation>(values, e, count, grid.rows, normalisation.centring,
                                         affines);
    }
    if (aligned && count == kVector) {
      store_vector<kY>(y + e, values);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kVector; ++i) {
        if (i < count) store_element<kY>(y + e + i, values[i]);
      }
    }
  }
}

// Beyond 48 KB, what the kernel declares included, shared memory has to be asked for. Always all
// that the GPU has: the limit is the kernel's, and a smaller one would fail the launch of a larger
// group that another thread is about to make.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int64_t bytes, int64_t most) {
  if (bytes + kResidentStaticBytes <= 48 << 10) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(most - kResidentStaticBytes));
}

}  // namespace

cudaError_t launch_resident_groups(const GroupRange& range, const KernelTypes& types,
                                   const Config& config, const Residence& residence,
                                   cudaStream_t stream) {
  const int cluster = residence.cluster;
  ResidentGrid grid;
  grid.cluster = cluster;
  grid.spans_per_block = (range.spans + cluster - 1) / cluster;
  grid.rows = rows_of(range);
  grid.layout = resident_layout({range.span_size, range.spans}, range.channels_per_group, cluster);
  return dispatch_x(types.x, [&](auto x) {
    return dispatch_y(types.y, [&](auto y) {
      return dispatch_activation(types.activation, [&](auto activation) {
        const auto kernel = resident_groups<x(), y(), activation()>;
        const cudaError_t error =
            allow_shared_memory(kernel, grid.layout.bytes, residence.shared_memory_per_block);
        if (error != cudaSuccess) return error;
        cudaLaunchConfig_t launch{};
        launch.gridDim = dim3(static_cast<unsigned>(range.groups * cluster));
        launch.blockDim = dim3(config.threads);
        launch.dynamicSmemBytes = grid.layout.bytes;
        launch.stream = stream;
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
        launch.attrs = &attribute;
        launch.numAttrs = cluster > 1 ? 1 : 0;
        return cudaLaunchKernelEx(&launch, kernel, range, grid);
      });
    });
  });
}

}  // namespace gnsilu
