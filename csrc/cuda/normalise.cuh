// From x to y: affine map and activation of a vector, of an element, of a run of one channel.
#pragma once

#include "kernels.h"
#include "vectors.cuh"

namespace gnsilu {

__device__ __forceinline__ double parameter_at(const Parameter& parameter, int64_t channel,
                                               double absent) {
  if (parameter.data == nullptr) return absent;
  const int64_t i = channel * parameter.stride;
  switch (parameter.dtype) {
    case DType::kBFloat16:
      return float_from_bf16(static_cast<const uint16_t*>(parameter.data)[i]);
    case DType::kFloat16:
      return float_from_fp16(static_cast<const uint16_t*>(parameter.data)[i]);
    case DType::kFloat32:
      return static_cast<const float*>(parameter.data)[i];
    default:  // beside a 16-bit x an FP64 parameter counts as FP32
      return static_cast<float>(static_cast<const double*>(parameter.data)[i]);
  }
}

// Affine map of one channel of a group; group is numbered through all samples.
__device__ __forceinline__ Affine channel_affine(const GroupRange& range, const Normalisation& n,
                                                 int64_t group, uint32_t row) {
  const int64_t channel = group % range.num_groups * range.channels_per_group + row;
  return affine_of(n, parameter_at(range.weight, channel, 1), parameter_at(range.bias, channel, 0));
}

// A NaN stays one.
__device__ __forceinline__ float at_least(float z, float lowest) { return z < lowest ? lowest : z; }

// Out of line: the loop that never comes here fits the instruction cache better.
static __device__ __noinline__ float silu_of_any(float z, float lowest) {
  return silu(at_least(z, lowest));
}

// z of a vector of one channel, in place.
__device__ __forceinline__ void normalise(float (&values)[kVector], const Centring& centring,
                                          const Affine& affine) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    values[i] = fma_rn(centring(values[i]), affine.scale, affine.shift);
  }
}

// From z to y, in place.
template <Activation kActivation>
__device__ __forceinline__ void activate(float (&values)[kVector], const Affine& affine) {
  if constexpr (kActivation == Activation::kSilu) {
    bool any_tail = false;
#pragma unroll
    for (int i = 0; i < kVector; ++i) any_tail |= !(fabsf(values[i]) < kSiluShortLimit);
    if (any_tail) {  // rare; one branch a vector
      const float lowest = affine.lowest_z();
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = silu_of_any(values[i], lowest);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = silu_short(values[i]);
    }
  }
}

// y of one element.
template <Activation kActivation>
__device__ __forceinline__ float normalised(float x, const Centring& centring,
                                            const Affine& affine) {
  const float z = fma_rn(centring(x), affine.scale, affine.shift);
  if (kActivation == Activation::kNone) return z;
  return fabsf(z) < kSiluShortLimit ? silu_short(z) : silu_of_any(z, affine.lowest_z());
}

// y for size elements of one channel, shared by `lanes` lanes of which this is number `lane`.
// y's alignment decides where vectors begin; x is read at whatever alignment it then has.
template <DType kX, DType kY, Activation kActivation, int kInFlight>
__device__ __forceinline__ void normalise_run(const uint16_t* x, typename Stored<kY>::Type* y,
                                              uint32_t size, const Centring& centring,
                                              const Affine& affine, uint32_t lane, uint32_t lanes) {
  constexpr uint32_t kElement = sizeof(typename Stored<kY>::Type);
  const uint32_t phase = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(y)) / kElement;
  const uint32_t head = min(-phase % kVector, size);
  const uint32_t vectors = (size - head) / kVector;
  const uint32_t body_end = head + kVector * vectors;

  for_each_vector<kInFlight>(x + head, vectors, lane, lanes, [&](const Vector& in, uint32_t v) {
    float values[kVector];
    in.unpack<kX>(values);
    normalise(values, centring, affine);
    activate<kActivation>(values, affine);
    store_vector<kY>(y + head + kVector * v, values);
  });

  // The elements before the first vector and after the last.
  for (uint32_t i = lane; i < size - kVector * vectors; i += lanes) {
    const uint32_t element = i < head ? i : body_end + (i - head);
    store_element<kY>(y + element,
                      normalised<kActivation>(to_float<kX>(x[element]), centring, affine));
  }
}

// Lanes that share a row (one channel of one sample): enough for its vectors, a power of two.
__host__ __device__ __forceinline__ uint32_t lanes_per_row(uint32_t spatial_size) {
  const uint32_t vectors = (spatial_size + kVector - 1) / kVector;
  uint32_t lanes = 1;
  while (lanes < kWarp && lanes < vectors) lanes *= 2;
  return lanes;
}

}  // namespace gnsilu
