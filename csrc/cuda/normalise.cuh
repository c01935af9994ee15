// From x to y: affine map and activation of a vector, of an element, of a run of one channel.
#pragma once

#include "kernels.h"
#include "vectors.cuh"

namespace gnsilu {

// A parameter as it lies in memory. Loading and converting apart, so that nobody waits for a load
// before its value is wanted. (For FP64, which beside a 16-bit x counts as FP32, one does.)
struct RawParameter {
  uint32_t bits;

  static __device__ __forceinline__ RawParameter load(const Parameter& parameter, int64_t channel) {
    if (parameter.data == nullptr) return {0};
    const int64_t i = channel * parameter.stride;
    switch (parameter.dtype) {
      case DType::kFloat32:
        return {static_cast<const uint32_t*>(parameter.data)[i]};
      case DType::kFloat64:
        return {float_bits(static_cast<float>(static_cast<const double*>(parameter.data)[i]))};
      default:
        return {static_cast<const uint16_t*>(parameter.data)[i]};
    }
  }
  __device__ __forceinline__ float value(const Parameter& parameter, float absent) const {
    if (parameter.data == nullptr) return absent;
    switch (parameter.dtype) {
      case DType::kBFloat16:
        return float_from_bf16(static_cast<uint16_t>(bits));
      case DType::kFloat16:
        return float_from_fp16(static_cast<uint16_t>(bits));
      default:
        return float_from_bits(bits);
    }
  }
};

// The number of a group of this launch within its sample.
__device__ __forceinline__ uint32_t group_in_sample(const GroupRange& range, uint32_t group) {
  return (range.first_in_sample + group) % range.num_groups;
}

// Weight and bias of one channel of a group.
struct RawParameters {
  RawParameter weight;
  RawParameter bias;

  static __device__ __forceinline__ RawParameters load(const GroupRange& range, uint32_t in_sample,
                                                       uint32_t row) {
    const int64_t channel = int64_t{in_sample} * range.channels_per_group + row;
    return {RawParameter::load(range.weight, channel), RawParameter::load(range.bias, channel)};
  }
  __device__ __forceinline__ Affine affine(const GroupRange& range, const Normalisation& n) const {
    return affine_of(n, weight.value(range.weight, 1.f), bias.value(range.bias, 0.f));
  }
};

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

// To which row (channel) of its group an element belongs: element / spatial_size by a
// multiplication, at most 1 too large, and a correction. For groups below 2^31 elements.
struct Rows {
  uint32_t spatial_size;
  uint32_t count;  // channels a group
  uint32_t magic;  // 2^32 / spatial_size, rounded up

  __device__ __forceinline__ uint32_t row_of(uint32_t element) const {
    if (spatial_size == 1) return element;  // 2^32 / 1 is no 32-bit number
    const uint32_t row = __umulhi(element, magic);
    return row * spatial_size > element ? row - 1 : row;
  }
};

inline Rows rows_of(const GroupRange& range) {
  return {range.spatial_size, range.channels_per_group,
          static_cast<uint32_t>((uint64_t{1} << 32) / range.spatial_size + 1)};
}

// y of the vector that begins at an element of a group, in place; `affines` of all its channels.
// Only the first `count` elements exist.
template <Activation kActivation>
__device__ __forceinline__ void normalise_across_rows(float (&values)[kVector], uint32_t element,
                                                      uint32_t count, const Rows& rows,
                                                      const Centring& centring,
                                                      const Affine* affines) {
  const uint32_t row = rows.row_of(element);
  const uint32_t left = (row + 1) * rows.spatial_size - element;  // elements of this row
  if (left >= count) {
    const Affine affine = affines[row];
    normalise(values, centring, affine);
    activate<kActivation>(values, affine);
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < kVector; ++i) {
    const uint32_t own = i < left                       ? row
                         : rows.spatial_size >= kVector ? row + 1
                                                        : rows.row_of(element + i);
    // Elements after the last are not stored, but their channel has to exist.
    const Affine affine = affines[min(own, rows.count - 1)];
    values[i] = normalised<kActivation>(values[i], centring, affine);
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
