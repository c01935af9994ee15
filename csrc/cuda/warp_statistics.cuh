// The sums of one span by one warp. Everything here is fixed by the position of an element in its
// span: element i belongs to vector i / 8, that to lane (i / 8) % 32, and in the lane to chain
// i % 4; a lane adds in ascending order; chains, then lanes, are added as balanced trees in FP64.
// Alignment, loads in flight and the grid do not enter, so they cannot change a bit.
#pragma once

#include "vectors.cuh"

namespace gnsilu {

constexpr int kChains = 4;  // independent sums, to hide the latency of a two-sum

// The same value, bit for bit, in every lane: a + b is commutative.
__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

// Over the warp and its chains. The low parts are 2^-24 of the high ones: FP32 serves them, and
// leaves one FP64 operation to 9 elements at the smallest span (GPUs with little FP64).
__device__ __forceinline__ double warp_total(const Sum32 (&chains)[kChains]) {
  const double high = (static_cast<double>(chains[0].high) + static_cast<double>(chains[1].high)) +
                      (static_cast<double>(chains[2].high) + static_cast<double>(chains[3].high));
  const float low = (chains[0].low + chains[1].low) + (chains[2].low + chains[3].low);
  return warp_sum(high + static_cast<double>(low));
}

// Adds term(x) of every element of a span of size elements, in a fixed order.
template <DType kX, int kInFlight, class Term>
__device__ __forceinline__ double warp_sum_of(const uint16_t* x, uint32_t size, Term term) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t vectors = size / kVector;
  Sum32 chains[kChains];
  for_each_vector<kInFlight>(x, vectors, lane, kWarp, [&](const Vector& vector, uint32_t) {
    float values[kVector];
    vector.unpack<kX>(values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) chains[i % kChains].add(term(values[i]));
  });
  if (lane == vectors % kWarp) {  // the last, incomplete vector is the next of this lane
#pragma unroll
    for (int i = 0; i < kVector - 1; ++i) {
      const uint32_t element = kVector * vectors + i;
      if (element < size) chains[i % kChains].add(term(to_float<kX>(x[element])));
    }
  }
  return warp_total(chains);
}

struct SpanSum {
  double sum;     // of x * sum_scale
  float max_abs;  // largest |x|; NaNs do not enter, they reach the sum
};

template <DType kX, int kInFlight>
__device__ __forceinline__ SpanSum warp_span_sum(const uint16_t* x, uint32_t size) {
  float max_abs = 0.f;
  const double sum = warp_sum_of<kX, kInFlight>(x, size, [&](float value) {
    max_abs = fmaxf(max_abs, fabsf(value));
    return mul_rn(value, sum_scale(kX));
  });
  return {sum, warp_max(max_abs)};
}

// The sum of ((x - mean32) * 2^-exponent)^2.
template <DType kX, int kInFlight>
__device__ __forceinline__ double warp_span_squares(const uint16_t* x, uint32_t size,
                                                    const Centring& centring) {
  return warp_sum_of<kX, kInFlight>(x, size, [&](float value) {
    const float deviation = centring(value);
    return mul_rn(deviation, deviation);
  });
}

// The sum of a group's partial results by one warp, the same in every lane; the order depends on
// count alone.
__device__ __forceinline__ double merge_sums(const double* partial, int count) {
  double sum = 0;
#pragma unroll 4
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) sum += partial[i];
  return warp_sum(sum);
}

__device__ __forceinline__ float merge_max(const float* partial, int count) {
  float largest = 0.f;
#pragma unroll 4
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) largest = fmaxf(largest, partial[i]);
  return warp_max(largest);
}

}  // namespace gnsilu
