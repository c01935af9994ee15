// Mean and variance in one pass, without cancellation, for host and device alike.
//
// The mean is summed exactly, with two-sums. For the variance a chunk of up to 32 elements is
// centred on its own FP32 mean: the squares about it are summed in FP32, those of the chunk's mean
// in FP64, about a pivot, an element of the span. Spans merge in FP64 (Chan, Golub, LeVeque: The
// American Statistician 37, 1983). Where a large mean would make FP32 cancel, the elements share
// their exponent and the sum of 32 of them is exact: 5 bits more than BF16's 8 or FP16's 11, of 24.
// The pivot costs log2(n) bits of FP64 at most, since (mean - pivot)^2 <= (n - 1) * variance.
#pragma once

#include "gnsilu/numerics.h"

namespace gnsilu {

constexpr int kChunk = 32;  // elements that are centred on one FP32 mean

// Of one span of n elements.
struct SpanMoments {
  double mean;
  double squares;  // the sum of (x - mean)^2
};

// The sum of kCount values, as a binary tree: each rounding error is of a small partial sum.
template <int kCount>
GNSILU_HD float tree_sum(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return add_rn(tree_sum<kCount / 2>(values), tree_sum<kCount - kCount / 2>(values + kCount / 2));
  }
}

// What one lane gathers of its chunks.
struct ChunkSums {
  // Of x, exactly. From the chunks' means, which are rounded to FP32, the group's mean would be off
  // by 2^-40 deviations: an element that near to it shows that, in a BF16 or FP32 result without
  // bias.
  Sum32 sum[4];
  // Of the chunks' rounded means, in units of kChunk elements.
  double deviations = 0;  // sum of (chunk mean - pivot)
  double squares = 0;     // sum of (chunk mean - pivot)^2
  double within = 0;      // sum of (x - chunk mean)^2

  // Adds a chunk of kCount elements, a power of two, at most kChunk.
  template <int kCount>
  GNSILU_HD void add(const float (&x)[kCount], double pivot) {
    static_assert(kCount <= kChunk && kChunk % kCount == 0, "a chunk is a part of 32 elements");
    constexpr double kWeight = static_cast<double>(kCount) / kChunk;
    const float mean = mul_rn(tree_sum<kCount>(x), 1.f / kCount);
    constexpr int kRuns = kCount < 4 ? 1 : 4;  // independent, so that no sum waits for the last
    float runs[kRuns] = {};
    for (int i = 0; i < kCount; ++i) {
      const float deviation = sub_rn(x[i], mean);
      runs[i % kRuns] = fma_rn(deviation, deviation, runs[i % kRuns]);
      sum[i % 4].add(x[i]);
    }
    const double deviation = static_cast<double>(mean) - pivot;
    deviations = fma(kWeight, deviation, deviations);
    squares = fma(kWeight * deviation, deviation, squares);
    within += static_cast<double>(tree_sum<kRuns>(runs));
  }
};

// From the sums over all lanes: of x; of (chunk mean - pivot), an element each; of the squares
// about the pivot. inverse_size: 1 / size. The chunk means' sum is not quite that of x, and it is
// about their own mean that their squares do not cancel.
GNSILU_HD SpanMoments moments_of(double sum, double deviations, double squares, double pivot,
                                 double size, double inverse_size) {
  const double shift = fma(-size, pivot, sum) * inverse_size;
  const double about_mean = fma(-deviations, deviations * inverse_size, squares);
  return {pivot + shift, about_mean < 0 ? 0 : about_mean};  // a NaN stays
}

// Whether FP32 may have overflowed or lost squares to underflow: then the span is summed again,
// scaled. From 2^-60 on, what 2^23 elements can lose below 2^-149 is out of sight even in FP64, so
// that a power of two on x changes no bit. A constant span, which has no squares at all, cannot be
// told from a tiny one.
GNSILU_HD bool needs_scaling(const SpanMoments& moments) {
  return !(moments.squares >= 0x1p-60 && moments.squares <= 0x1p120);
}

// The exponent by which a span with that largest |x| is scaled: then it is at most 4 (1 below
// 2^126), and every deviation that matters is far from underflow. 2^-exponent is a normal FP32
// number.
GNSILU_HD int scaling_exponent(float max_abs) {
  return clamp_exponent(exponent_above(static_cast<double>(max_abs)), -126, 126);
}

// Undoes the scaling by 2^-exponent.
GNSILU_HD SpanMoments unscaled(const SpanMoments& scaled, int exponent) {
  return {scaled.mean * power_of_two_fp64(exponent),
          scaled.squares * power_of_two_fp64(2 * exponent)};
}

// Sums over the spans of a group, about the first span's mean.
struct SpanSums {
  double deviations = 0;  // of size * (mean - origin)
  double squares = 0;     // of (x - origin)^2

  GNSILU_HD void add(const SpanMoments& span, double size, double origin) {
    const double deviation = span.mean - origin;
    const double weighted = size * deviation;
    deviations += weighted;
    squares += fma(weighted, deviation, span.squares);
  }
};

// Mean, for the apply pass, and variance of a group.
struct GroupMoments {
  Centre centre;
  double variance;
};

// inverse_size: 1 / elements of the group.
GNSILU_HD GroupMoments group_moments(const SpanSums& sums, double origin, double inverse_size) {
  const double shift = sums.deviations * inverse_size;
  const double squares = fma(-shift, sums.deviations, sums.squares);  // about the mean
  GroupMoments group;
  group.variance = squares < 0 ? 0 : squares * inverse_size;
  group.centre.mean = origin + shift;
  group.centre.mean32 = static_cast<float>(group.centre.mean);
  // |x - mean| <= sqrt(squares), whose exponent is half of that of squares, rounded up.
  const int of_mean = exponent_above(2 * fabs(group.centre.mean));
  const int of_deviation = (exponent_above(squares) + 1) / 2;
  const int larger = of_mean > of_deviation ? of_mean : of_deviation;
  group.centre.exponent = clamp_exponent(larger + 1, -126, 129);
  return group;
}

}  // namespace gnsilu
