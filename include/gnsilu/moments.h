// Mean and variance in one pass, without cancellation, for host and device alike.
//
// The sum is exact. Eight elements at a time are summed in FP32 twice, rounded down and rounded up:
// where the two agree, nothing was rounded. Where they do not (of N(0,1) one eight in 9000 in BF16,
// one in 1200 in FP16), the chunk is summed anew, in FP64 or with two-sums (ExactSum).
//
// Squares are summed in FP32, chunks of up to 32 elements about the mean of the chunk's first 8:
// all these centres together are off by at most twice x's own deviations, root mean square,
// whatever x does. From there on all is FP64: chunks are moved to a pivot, an element of the span,
// and spans merge (Chan, Golub, LeVeque: The American Statistician 37, 1983). Where a large mean
// would make FP32 cancel, the elements share their exponent, and their difference from the centre
// is exact or nearly so. The pivot costs log2(n) bits of FP64 at most, since (mean - pivot)^2 <= (n
// - 1) * variance.
#pragma once

#include "gnsilu/numerics.h"

namespace gnsilu {

constexpr int kChunk = 32;  // elements that are centred on one FP32 mean

// Of one span of n elements.
struct SpanMoments {
  double mean;
  double squares;  // the sum of (x - mean)^2
};

enum class Rounding { kNearest, kDown, kUp };

// The sum of kCount values, as a binary tree: each rounding error is of a small partial sum.
template <int kCount, Rounding kRounding = Rounding::kNearest>
GNSILU_HD float tree_sum(const float* values) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    const float a = tree_sum<kCount / 2, kRounding>(values);
    const float b = tree_sum<kCount - kCount / 2, kRounding>(values + kCount / 2);
    return kRounding == Rounding::kDown ? add_down(a, b)
           : kRounding == Rounding::kUp ? add_up(a, b)
                                        : add_rn(a, b);
  }
}

// A sum in FP64 of values that came from 16 bits. Their FP32 bits, shifted, are the upper half of
// an FP64 number, 2^896 times smaller (zero and subnormals included): two integer operations, where
// the conversion instruction would share the unit that computes SiLU's exponentials.
struct Sum64 {
  double scaled = 0;  // times 2^-896; an infinity or a NaN counts as some number

  GNSILU_HD void add(float value) {
    const auto bits = static_cast<uint64_t>(shifted(static_cast<int32_t>(float_bits(value))));
    scaled += double_from_bits(bits & 0x8fffffffffffffffu);  // the sign once, not four times
  }

  // bits * 2^29, as one multiplication.
  static GNSILU_HD int64_t shifted(int32_t bits) {
#if defined(__CUDA_ARCH__)
    int64_t product;
    asm("mul.wide.s32 %0, %1, 536870912;" : "=l"(product) : "r"(bits));
    return product;
#else
    return int64_t{bits} * (1 << 29);
#endif
  }

  template <int kCount>
  static GNSILU_HD double total(const Sum64 (&parts)[kCount]) {
    double sum = parts[0].scaled;
    for (int i = 1; i < kCount; ++i) sum += parts[i].scaled;
    return sum * power_of_two_fp64(896);
  }
};

// Both are exact for all but adversarial ranges of exponents; a GPU takes what it is quick at.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900 && __CUDA_ARCH__ != 1000
using ExactSum = Sum32;  // two FP64 operations a clock and multiprocessor
#else
using ExactSum = Sum64;
#endif

// Sums over the chunks of one lane, of one chain (warp_moments.cuh), of a span.
struct LaneSums {
  double sum = 0;      // of x
  double squares = 0;  // of (x - pivot)^2

  GNSILU_HD void add(const LaneSums& other) {
    sum += other.sum;
    squares += other.squares;
  }
};

// Of values whose FP32 sum would be rounded.
template <class Sum, int kCount>
GNSILU_HD double exact_sum(const float (&x)[kCount]) {
  constexpr int kRuns = kCount < 4 ? 1 : 4;  // independent, so that no sum waits for the last
  Sum runs[kRuns];
  for (int i = 0; i < kCount; ++i) runs[i % kRuns].add(x[i]);
  return Sum::total(runs);
}

// What one lane gathers of its chunks.
struct ChunkSums {
  LaneSums sums;

  // Adds a chunk of kCount elements, a power of two, at most kChunk. exact() is their sum in FP64,
  // which is seldom called for.
  template <int kCount, class Exact>
  GNSILU_HD void add(const float (&x)[kCount], double pivot, Exact exact) {
    static_assert(kCount <= kChunk && kChunk % kCount == 0, "a chunk is a part of 32 elements");
    constexpr auto kSize = static_cast<double>(kCount);
    constexpr int kPart = kCount < 8 ? kCount : 8;
    constexpr int kParts = kCount / kPart;
    float parts[kParts];
    bool is_exact = true;
    for (int k = 0; k < kParts; ++k) {
      parts[k] = tree_sum<kPart, Rounding::kDown>(x + kPart * k);
      is_exact &= parts[k] == tree_sum<kPart, Rounding::kUp>(x + kPart * k);  // not of a NaN
    }
    const float centre = mul_rn(parts[0], 1.f / kPart);
    constexpr int kRuns = kCount < 4 ? 1 : 4;
    float runs[kRuns] = {};
    for (int i = 0; i < kCount; ++i) {
      const float deviation = sub_rn(x[i], centre);
      runs[i % kRuns] = fma_rn(deviation, deviation, runs[i % kRuns]);
    }
    // Behind the last use of x, so that exact() has its registers.
    double sum = parts[0];
    if (is_exact) {
      for (int k = 1; k < kParts; ++k) sum += static_cast<double>(parts[k]);
    } else {
      sum = exact();
    }
    const double from_pivot = static_cast<double>(centre) - pivot;
    const double deviations = fma(-kSize, static_cast<double>(centre), sum);
    sums.sum += sum;
    // (x - pivot)^2 = (x - centre)^2 + from_pivot * (2 * (x - centre) + from_pivot)
    sums.squares += static_cast<double>(tree_sum<kRuns>(runs));
    sums.squares = fma(from_pivot, fma(kSize, from_pivot, 2 * deviations), sums.squares);
  }
};

// sums: over all lanes; inverse_size: 1 / size.
GNSILU_HD SpanMoments moments_of(const LaneSums& sums, double pivot, double size,
                                 double inverse_size) {
  const double deviations = fma(-size, pivot, sums.sum);
  const double shift = deviations * inverse_size;
  const double about_mean = fma(-deviations, shift, sums.squares);
  return {pivot + shift, about_mean < 0 ? 0 : about_mean};  // a NaN stays
}

// Whether FP32 may have overflowed or lost squares to underflow: then the span is summed again,
// scaled. From 2^-60 on, what 2^23 elements can lose below 2^-149 is out of sight even in FP64, so
// that a power of two on x changes no bit. A span without squares may be constant or tiny.
GNSILU_HD bool needs_scaling(const SpanMoments& moments) {
  return !(moments.squares >= 0x1p-60 && moments.squares <= 0x1p120);
}

// Whether a span without squares in FP32 is constant for certain: then no deviation reaches 2^-74,
// and 16-bit values that differ, do so by more.
GNSILU_HD bool is_constant(const SpanMoments& moments, DType x_dtype) {
  return moments.squares == 0 && (x_dtype == DType::kFloat16 || fabs(moments.mean) >= 0x1p-60);
}

// The exponent by which a span with that largest |x| is scaled: then it is at most 4 (1 below
// 2^126), and every deviation that matters is far from underflow. 2^-exponent is a normal FP32
// number.
GNSILU_HD int scaling_exponent(float max_abs) {
  return clamp_exponent(exponent_above(static_cast<double>(max_abs)), -126, 126);
}

// Undoes the scaling by 2^-exponent. Squares that are infinite even so are of an infinite x: NaN.
GNSILU_HD SpanMoments unscaled(const SpanMoments& scaled, int exponent) {
  return {scaled.mean * power_of_two_fp64(exponent),
          fma(0.0, scaled.squares, scaled.squares) * power_of_two_fp64(2 * exponent)};
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
