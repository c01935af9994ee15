// The sums of one span by one warp. Everything here is fixed by the position of an element in its
// span: element i belongs to vector i / 8, that to lane (i / 8) % 32; a lane adds in ascending
// order; lanes are added as a balanced tree in FP64. Alignment, loads in flight and the grid do not
// enter, so they cannot change a bit.
#pragma once

#include <type_traits>

#include "gnsilu/moments.h"
#include "vectors.cuh"

namespace gnsilu {

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

// Calls visit(values, count) for the lane's vectors in ascending order; all have kVector elements
// but the span's last one.
template <DType kX, int kInFlight, class Visit>
__device__ __forceinline__ void for_each_eight(const uint16_t* x, uint32_t size, Visit visit) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t vectors = size / kVector;
  float values[kVector];
  for_each_vector<kInFlight>(x, vectors, lane, kWarp, [&](const Vector& vector, uint32_t) {
    vector.unpack<kX>(values);
    visit(values, kVector);
  });
  if (lane == vectors % kWarp) {  // the last, incomplete vector is the next of this lane
#pragma unroll
    for (int i = 0; i < kVector - 1; ++i) {
      const uint32_t element = kVector * vectors + i;
      values[i] = element < size ? to_float<kX>(x[element]) : 0.f;
    }
    values[kVector - 1] = 0.f;
    visit(values, static_cast<int>(size - kVector * vectors));
  }
}

struct SpanSum {
  double sum;     // of x * sum_scale
  float max_abs;  // largest |x|; NaNs do not enter, they reach the squares
};

template <DType kX, int kInFlight>
__device__ __forceinline__ SpanSum warp_span_sum(const uint16_t* x, uint32_t size) {
  // In FP32 the largest BF16 values would overflow.
  constexpr bool kInFp32 = std::is_same<ExactSum, Sum32>::value;
  ExactSum chains[4];  // independent, so that no sum waits for the last
  float max_abs = 0.f;
  for_each_eight<kX, kInFlight>(x, size, [&](const float(&values)[kVector], int) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      max_abs = fmaxf(max_abs, fabsf(values[i]));
      chains[i % 4].add(kInFp32 ? mul_rn(values[i], sum_scale(kX)) : values[i]);
    }
  });
  const double sum = ExactSum::total(chains);
  return {warp_sum(kInFp32 ? sum : sum * static_cast<double>(sum_scale(kX))), warp_max(max_abs)};
}

// The sum of centring(x)^2: of eight as a tree in FP32, whose roundings are of as many signs as
// sums; of these with two-sums.
template <DType kX, int kInFlight>
__device__ __forceinline__ double warp_span_squares(const uint16_t* x, uint32_t size,
                                                    const Centring& centring) {
  Sum32 sum;
  for_each_eight<kX, kInFlight>(x, size, [&](const float(&values)[kVector], int count) {
    float squares[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float deviation = i < count ? centring(values[i]) : 0.f;
      squares[i] = mul_rn(deviation, deviation);
    }
    sum.add(tree_sum<kVector>(squares));
  });
  return warp_sum(sum.value());
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
