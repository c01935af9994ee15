// The kernels' launchers, one a kernel file. Each queues one kernel for a range of groups.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gnsilu/launch.h"
#include "gnsilu/moments.h"
#include "gnsilu/numerics.h"
#include "gnsilu/plan.h"

namespace gnsilu {

constexpr int kNormalisationWords = 4;
constexpr int64_t kWholeWarp = 256;  // elements: a vector for each lane of a warp

// The partial results of the groups of one launch, all in the caller's workspace: moments for
// two_pass and the ring, normalisations for the ring, the rest for three_pass; what a route does
// not use is null.
struct Workspace {
  SpanMoments* moments;      // [groups, spans]
  uint64_t* normalisations;  // [groups, kNormalisationWords]
  Centre* centres;           // [groups]
  double* sums;              // [groups, spans]: of x * sum_scale
  double* squares;           // [groups, spans]: of ((x - mean32) * 2^-exponent)^2
  float* max_abs;            // [groups, spans]
};

// What all kernels are told. Groups are numbered from the first of the launch on.
struct GroupRange {
  const uint16_t* x;         // element 0 of group first
  void* y;                   // likewise
  uint32_t first_in_sample;  // the number of the first group within its sample
  int64_t groups;            // groups in this launch
  int64_t group_size;        // elements
  double inverse_group_size;
  uint32_t num_groups;  // a sample
  uint32_t spatial_size;
  uint32_t channels_per_group;
  uint32_t span_size;
  int spans;  // a group
  Parameter weight;
  Parameter bias;
  double eps;
  Workspace workspace;
};

struct KernelTypes {
  DType x;
  DType y;
  Activation activation;
};

cudaError_t launch_partial_sums(const GroupRange& range, const KernelTypes& types,
                                const Config& config, cudaStream_t stream);
// What the runtime says of the kernel on the current device: whether this build holds its code.
// *compiled_for: __CUDA_ARCH__ / 10 of that code.
cudaError_t partial_sums_image_status(int* compiled_for);
cudaError_t launch_centred_squares(const GroupRange& range, const KernelTypes& types,
                                   const Config& config, cudaStream_t stream);
cudaError_t launch_span_moments(const GroupRange& range, const KernelTypes& types,
                                const Config& config, cudaStream_t stream);
cudaError_t launch_resident_groups(const GroupRange& range, const KernelTypes& types,
                                   const Config& config, const Residence& residence,
                                   cudaStream_t stream);
cudaError_t launch_ring(const GroupRange& range, const KernelTypes& types, const Ring& shape,
                        cudaStream_t stream);
cudaError_t launch_apply(const GroupRange& range, const KernelTypes& types, const Config& config,
                         cudaStream_t stream);
// Groups of less than kWholeWarp elements.
cudaError_t launch_small_groups(const GroupRange& range, const KernelTypes& types,
                                cudaStream_t stream);
cudaError_t launch_whole_groups(const GroupRange& range, const KernelTypes& types,
                                cudaStream_t stream);

}  // namespace gnsilu
