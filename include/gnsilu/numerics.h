// The arithmetic of all kernels, for host and device alike: what the GPU runs is what the tests
// check on a CPU. Exactness rests on IEEE arithmetic: never compile this with -ffast-math, with
// floating-point contraction or with denormals flushed to zero.
#pragma once

#include <cmath>
#include <cstdint>

#include "gnsilu/float16.h"
#include "gnsilu/problem.h"

namespace gnsilu {

constexpr float kLargestFloat = 3.402823466e38f;
constexpr double kLargestDouble = 1.7976931348623157e308;

// ------------------------------------------------------------------------------- exact sums

struct Sum32 {
  float high = 0.f;  // the running sum, rounded
  float low = 0.f;   // the sum of its rounding errors

  // Two-sum (Knuth, TAOCP 2, 4.2.2, theorem B): high + value = new high + error, exactly.
  GNSILU_HD void add(float value) {
    const float sum = add_rn(high, value);
    const float from_value = sub_rn(sum, high);
    const float from_high = sub_rn(sum, from_value);
    low = add_rn(low, add_rn(sub_rn(high, from_high), sub_rn(value, from_value)));
    high = sum;
  }

  GNSILU_HD double value() const { return static_cast<double>(high) + static_cast<double>(low); }

  template <int kCount>
  static GNSILU_HD double total(const Sum32 (&parts)[kCount]) {
    double sum = parts[0].value();
    for (int i = 1; i < kCount; ++i) sum += parts[i].value();
    return sum;
  }
};

// --------------------------------------------------------------------------- scaling of sums

// x is summed times this. A BF16 value times 2^-16 is exact even where it is subnormal (BF16's
// last place is 2^-133, FP32's 2^-149), and 2^16 of them cannot overflow. FP16 needs no scaling.
GNSILU_HD constexpr float sum_scale(DType x_dtype) {
  return x_dtype == DType::kBFloat16 ? 1.f / 65536.f : 1.f;
}

// 2^exponent for -149 <= exponent <= 127, subnormal below -126.
GNSILU_HD float power_of_two(int exponent) {
  const uint32_t bits = exponent >= -126 ? static_cast<uint32_t>(exponent + 127) << 23
                                         : uint32_t{1} << (exponent + 149);
  return float_from_bits(bits);
}

// 2^exponent for -1022 <= exponent <= 1023.
GNSILU_HD double power_of_two_fp64(int exponent) {
  return double_from_bits(static_cast<uint64_t>(exponent + 1023) << 52);
}

// The exponent e with 2^(e-1) <= value < 2^e, for positive normal FP64; -1022 for 0 and below
// that; 1025 for infinities and NaN.
GNSILU_HD int exponent_above(double value) {
  return static_cast<int>((double_bits(value) >> 52) & 0x7ff) - 1022;
}

GNSILU_HD int clamp_exponent(int exponent, int low, int high) {
  return exponent < low ? low : exponent > high ? high : exponent;
}

// ------------------------------------------------------------------------- statistics of a group

// The centre of a group, known after the first pass.
struct Centre {
  double mean;   // exact to FP64
  float mean32;  // the mean rounded to FP32: what is subtracted from x
  int exponent;  // 2^exponent is at least max|x| + |mean32|, the largest |x - mean32|
};

// sum: of all x times sum_scale. max_abs: of all x.
GNSILU_HD Centre centre_of(double sum, float max_abs, int64_t group_size, DType x_dtype) {
  Centre centre;
  centre.mean = sum / static_cast<double>(group_size) / static_cast<double>(sum_scale(x_dtype));
  centre.mean32 = static_cast<float>(centre.mean);
  const double largest = static_cast<double>(max_abs) + fabs(static_cast<double>(centre.mean32));
  // From -126, so that 2^-exponent is an FP32 number; BF16's smallest value, 2^-133, is then
  // 2^-7 and its square far from underflow.
  centre.exponent = clamp_exponent(exponent_above(largest), -126, 129);
  return centre;
}

// (x - mean32) * 2^-exponent as x * scale + offset: one rounding, no overflow.
struct Centring {
  float scale;
  float offset;

  GNSILU_HD float operator()(float x) const { return fma_rn(x, scale, offset); }
};

GNSILU_HD Centring centring(float mean32, int exponent) {
  const float scale = power_of_two(-exponent);
  return {scale, -mul_rn(mean32, scale)};
}

// squares: the sum of centring(x)^2 with centre.exponent. The variance about the true mean is that
// about mean32 less the square of their difference: E[(x - a)^2] = Var(x) + (E[x] - a)^2.
GNSILU_HD double variance_of(double squares, const Centre& centre, int64_t group_size) {
  const double about_mean32 =
      squares / static_cast<double>(group_size) * power_of_two_fp64(2 * centre.exponent);
  const double difference = centre.mean - static_cast<double>(centre.mean32);
  const double variance = about_mean32 - difference * difference;
  return variance < 0 ? 0 : variance;  // a NaN stays
}

// Everything that the apply pass needs of a group.
struct Normalisation {
  double rstd;        // 1 / sqrt(variance + eps)
  double correction;  // mean32 - mean
  Centring centring;  // x to (x - mean32) * 2^-exponent, of order 1 for ordinary values
  int exponent;
};

GNSILU_HD Normalisation normalisation_of(double variance, const Centre& centre, double eps) {
  Normalisation n;
  n.rstd = reciprocal_sqrt(variance + eps);
  const double spread = (variance + eps) * n.rstd;
  n.correction = static_cast<double>(centre.mean32) - centre.mean;
  // Units of the spread, rounded down, so that |scale| stays at or below |weight|; but not so fine
  // that max|x| overflows.
  const int finest = centre.exponent - 126 > -126 ? centre.exponent - 126 : -126;
  n.exponent = clamp_exponent(exponent_above(spread) - 1, finest, 128);
  n.centring = centring(centre.mean32, n.exponent);
  return n;
}

// z = centring(x) * scale + shift for one channel.
struct Affine {
  float scale;
  float shift;

  // The lowest z of a finite x: below it FP32 overflows, and silu(-infinity) is NaN where silu of
  // the true z is -0. An infinite parameter is another matter.
  GNSILU_HD float lowest_z() const {
    const bool finite = fabsf(scale) <= kLargestFloat && fabsf(shift) <= kLargestFloat;
    return finite ? -kLargestFloat : float_from_bits(0xff800000u);
  }
};

// shift carries the rounding of the mean: bias + (mean32 - mean) * rstd * weight. Without that
// term one BF16 result in a hundred is misrounded at mean 1000 and deviation 4.
GNSILU_HD Affine affine_of(const Normalisation& n, double weight, double bias) {
  const double scale = n.rstd * weight;
  Affine affine;
  affine.scale = static_cast<float>(scale * power_of_two_fp64(n.exponent));
  // Beyond FP32 only where a constant group meets a tiny eps: x - mean is 0 there, not 0 *
  // infinity.
  if (fabs(scale) <= kLargestDouble && fabsf(affine.scale) > kLargestFloat) {
    affine.scale = affine.scale > 0 ? kLargestFloat : -kLargestFloat;
  }
  // A mean that is exact leaves the bias alone, also where the scale is infinite (eps 0).
  affine.shift = static_cast<float>(n.correction == 0 ? bias : bias + n.correction * scale);
  return affine;
}

// ------------------------------------------------------------------------------------- SiLU

// Where the short form of silu() holds: e^-z and 1 / (1 + e^-z) are normal FP32 numbers.
constexpr float kSiluShortLimit = 87.f;

// z * sigmoid(z) for |z| < 87: q = z * r with r about 1 / (1 + e^-z), then one correction of the
// quotient by its remainder (Markstein, IBM J. Res. Dev. 34, 1990), as good as a division.
GNSILU_HD float silu_short(float z) {
  const float denominator = add_rn(1.f, exp2_approx(mul_rn(z, -1.4426950408889634f)));
  const float reciprocal = reciprocal_approx(denominator);
  const float quotient = mul_rn(z, reciprocal);
  return fma_rn(fma_rn(-quotient, denominator, z), reciprocal, quotient);
}

// z * sigmoid(z) for every z. Above the limit the sigmoid rounds to 1; below, 1 + e^-z is e^-z to
// FP32, and z * e^z is formed as (z * h) * h with h = e^(z/2), so that it underflows only once.
// NaN and -infinity give NaN (-infinity * 0), as PyTorch's FP32 silu does.
GNSILU_HD float silu(float z) {
  if (fabsf(z) < kSiluShortLimit) return silu_short(z);
  if (z > 0) return z;
  const float half = exp2_approx(mul_rn(z, 0.5f * 1.4426950408889634f));
  return mul_rn(mul_rn(z, half), half);
}

}  // namespace gnsilu
