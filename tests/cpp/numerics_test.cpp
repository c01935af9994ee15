// The kernels' arithmetic, on the host: sums against exact integers, statistics and SiLU against
// long double.
#include "gnsilu/numerics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "moments_reference.h"

namespace gnsilu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ------------------------------------------------------------------------------------- sums

// FP16 values are multiples of 2^-24: their sum is an exact integer in those units.
TEST(Sum32, CarriesWhatRoundingLoses) {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 50; ++repeat) {
    Sum32 sum;
    int64_t exact = 0;
    double magnitudes = 0;
    for (int i = 0; i < 65536; ++i) {
      const float value = float_from_fp16(static_cast<uint16_t>(random() & 0xfbff));
      if (!std::isfinite(value)) continue;
      sum.add(value);
      exact += static_cast<int64_t>(std::ldexp(static_cast<double>(value), 24));
      magnitudes += std::fabs(value);
    }
    const double want = std::ldexp(static_cast<double>(exact), -24);
    // What is left is the rounding of the low part; plain FP32 is off by 2^-24 here.
    EXPECT_NEAR(sum.value(), want, magnitudes * 0x1p-41);
  }
}

TEST(Sum32, IsExactWhereFp32Cancels) {
  Sum32 sum;
  for (float value : {16777216.f, 1.f, 1.f, 1.f, -16777216.f}) sum.add(value);
  EXPECT_EQ(sum.value(), 3.0);  // plain FP32 gives 0 or 4
}

TEST(Sum32, TakesTheLargestBf16ValuesScaled) {
  const float largest = float_from_bf16(0x7f7f);
  Sum32 sum;
  for (int i = 0; i < 65536; ++i) sum.add(mul_rn(largest, sum_scale(DType::kBFloat16)));
  EXPECT_EQ(sum.value(), static_cast<double>(largest));
  EXPECT_EQ(mul_rn(float_from_bf16(1), sum_scale(DType::kBFloat16)), 0x1p-149f);  // nothing lost
}

TEST(Sum32, PassesNanAndInfinityOn) {
  Sum32 sum;
  sum.add(kInfinity);
  sum.add(1.f);
  EXPECT_FALSE(std::isfinite(sum.value()));
}

// ------------------------------------------------------------------------------- statistics

struct Statistics {
  Centre centre;
  double variance;
};

// As the kernels do it: spans of `span` elements, four chains a span, partial results merged.
Statistics statistics_of(const std::vector<float>& x, DType dtype, size_t span) {
  double total = 0;
  float max_abs = 0;
  for (size_t start = 0; start < x.size(); start += span) {
    Sum32 chains[4];
    for (size_t i = start; i < std::min(start + span, x.size()); ++i) {
      chains[i % 4].add(mul_rn(x[i], sum_scale(dtype)));
      max_abs = std::fmax(max_abs, std::fabs(x[i]));
    }
    for (const Sum32& chain : chains) total += chain.value();
  }
  const auto size = static_cast<int64_t>(x.size());
  const Centre centre = centre_of(total, max_abs, size, dtype);
  const Centring centred = centring(centre.mean32, centre.exponent);
  double squares = 0;
  for (size_t start = 0; start < x.size(); start += span) {
    Sum32 chains[4];
    for (size_t i = start; i < std::min(start + span, x.size()); ++i) {
      const float deviation = centred(x[i]);
      chains[i % 4].add(mul_rn(deviation, deviation));
    }
    for (const Sum32& chain : chains) squares += chain.value();
  }
  return {centre, variance_of(squares, centre, size)};
}

struct Distribution {
  const char* name;
  double mean;
  double sigma;
};

class Moments : public testing::TestWithParam<Distribution> {};

TEST_P(Moments, MatchFp64) {
  std::mt19937 random(2);
  std::normal_distribution<double> normal(GetParam().mean, GetParam().sigma);
  std::vector<float> x(20000);
  for (float& value : x) {
    value = float_from_bf16(bf16_from_float(static_cast<float>(normal(random))));
  }
  const Reference want = reference_of(x);
  const Statistics got = statistics_of(x, DType::kBFloat16, 4096);
  const double scale = std::fabs(GetParam().mean) + GetParam().sigma;
  EXPECT_NEAR(got.centre.mean, static_cast<double>(want.mean), std::ldexp(scale, -44));
  // Each deviation and square is rounded to FP32; rounding errors average out.
  EXPECT_NEAR(got.variance / static_cast<double>(want.variance), 1.0, std::ldexp(1.0, -23));
}

INSTANTIATE_TEST_SUITE_P(
    Distributions, Moments,
    testing::Values(Distribution{"standard", 0, 1}, Distribution{"offset", 1000, 1},
                    Distribution{"far", -30000, 4}, Distribution{"tiny", 0, 1e-30},
                    Distribution{"subnormal", 0, 3e-39}, Distribution{"huge", 0, 5e37},
                    Distribution{"huge_offset", 2e38, 1e36}),
    [](const auto& info) { return info.param.name; });

TEST(Statistics, TwoValuedInputsAreExact) {
  for (const auto& [low, high] : {std::pair{1000.f, 1008.f},
                                  {-3e38f, 3e38f},
                                  {60000.f, 60032.f},
                                  {-0x1p-133f, 0x1p-133f},
                                  {2048.f, 2050.f}}) {
    std::vector<float> x(10000, low);
    for (size_t i = 0; i < x.size(); i += 2) x[i] = high;
    const Statistics got = statistics_of(x, DType::kBFloat16, 4096);
    const double half = (static_cast<double>(high) - low) / 2;
    EXPECT_EQ(got.centre.mean, (static_cast<double>(high) + low) / 2);
    EXPECT_NEAR(got.variance, half * half, half * half * 0x1p-22);
  }
}

TEST(Statistics, ConstantsHaveNoVariance) {
  for (float value : {0.f, 255.5f, -65504.f, 1e30f, 3.3895314e38f, 0x1p-133f}) {
    for (size_t size : {1u, 3u, 147u, 4097u}) {
      const float constant = float_from_bf16(bf16_from_float(value));
      const Statistics got =
          statistics_of(std::vector<float>(size, constant), DType::kBFloat16, 4096);
      EXPECT_EQ(got.centre.mean, constant);
      EXPECT_EQ(got.variance, 0);
      for (double eps : {1e-12, 1e-5, 1.0}) {
        const Normalisation n = normalisation_of(got.variance, got.centre, eps);
        const Affine affine = affine_of(n, 2.0, 0.75);
        EXPECT_EQ(fma_rn(n.centring(constant), affine.scale, affine.shift), 0.75f)
            << value << " " << eps;
      }
    }
  }
}

TEST(Statistics, VarianceIsNeverNegative) {
  EXPECT_EQ(variance_of(0.0, Centre{1.00000001, 1.f, 1}, 100), 0.0);
}

TEST(Statistics, ANanOrInfinityReachesTheVariance) {
  for (float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> x(100, 1.f);
    x[50] = bad;
    EXPECT_TRUE(std::isnan(statistics_of(x, DType::kBFloat16, 4096).variance));
  }
}

// z of single elements against long double, over magnitudes from subnormal to the largest.
TEST(Normalisation, HoldsAtEveryMagnitude) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  for (int exponent : {-130, -126, -100, -60, -20, 0, 20, 60, 100, 124}) {
    std::vector<float> x(5000);
    for (float& value : x) {
      value = float_from_bf16(
          bf16_from_float(static_cast<float>(std::ldexp(normal(random), exponent))));
    }
    const Reference want = reference_of(x);
    const Statistics got = statistics_of(x, DType::kBFloat16, 4096);
    for (long double eps : {0.0L, want.variance / 3}) {
      const Normalisation n = normalisation_of(got.variance, got.centre, static_cast<double>(eps));
      const Affine affine = affine_of(n, 0.7, 0.1);
      for (float value : x) {
        const long double xhat = (value - want.mean) / std::sqrt(want.variance + eps);
        const float z = fma_rn(n.centring(value), affine.scale, affine.shift);
        const long double tolerance = 0x1p-21L * (0.7L * std::fabs(xhat) + 0.1L);
        ASSERT_NEAR(z, static_cast<double>(0.7L * xhat + 0.1L), static_cast<double>(tolerance))
            << exponent;
      }
    }
  }
}

TEST(Affine, ShiftCarriesTheRoundingOfTheMean) {
  Centre centre{1000.00001, 1000.f, 11};
  const Normalisation n = normalisation_of(16.0, centre, 0.0);
  EXPECT_FLOAT_EQ(affine_of(n, 1.0, 0.0).shift, -0.00001f / 4);
}

// A constant group and the smallest eps: 0 * scale, never 0 * infinity.
TEST(Affine, ScaleStaysFiniteForTinyEps) {
  for (float constant : {1.f, 0.f, 3.3895314e38f}) {
    for (double eps : {1e-76, 1e-160, 1e-300}) {
      const Statistics got =
          statistics_of(std::vector<float>(100, constant), DType::kBFloat16, 4096);
      const Normalisation n = normalisation_of(got.variance, got.centre, eps);
      const Affine affine = affine_of(n, -1.0, 0.25);
      EXPECT_EQ(fma_rn(n.centring(constant), affine.scale, affine.shift), 0.25f) << eps;
    }
  }
}

TEST(Affine, TakesTheLargestWeights) {
  std::vector<float> x(1000, -2.f);
  for (size_t i = 0; i < x.size(); i += 2) x[i] = 2.f;
  const Statistics got = statistics_of(x, DType::kBFloat16, 4096);
  const Normalisation n = normalisation_of(got.variance, got.centre, 0);
  for (double weight : {1.71e38, 3e38, 1e30, 1e-30}) {
    const Affine affine = affine_of(n, weight, 0);
    const float want = static_cast<float>(weight);
    EXPECT_NEAR(fma_rn(n.centring(2.f), affine.scale, affine.shift), want, want * 1e-6);
    EXPECT_EQ(fma_rn(n.centring(0.f), affine.scale, affine.shift), 0.f);
    EXPECT_EQ(affine.lowest_z(), -std::numeric_limits<float>::max());
  }
  EXPECT_EQ(affine_of(n, 1, -std::numeric_limits<double>::infinity()).lowest_z(), -kInfinity);
  EXPECT_TRUE(std::isnan(affine_of(n, NAN, 0).scale));
}

TEST(Exponents, BoundTheirValue) {
  for (double value : {1e-300, 0.5, 1.0, 1.5, 3e38, 6.8e38}) {
    const int e = exponent_above(value);
    EXPECT_LT(value, std::ldexp(1.0, e));
    EXPECT_GE(value, std::ldexp(0.5, e));
  }
  for (int e = -149; e <= 127; ++e) EXPECT_EQ(power_of_two(e), std::ldexp(1.f, e));
  for (int e : {-300, -1, 0, 258}) EXPECT_EQ(power_of_two_fp64(e), std::ldexp(1.0, e));
}

// ------------------------------------------------------------------------------------- SiLU

long double exact_silu(float z) { return z / (1 + std::exp(-static_cast<long double>(z))); }

// Every 1009th FP32 value; the rounding of z * log2(e) costs |z| / 2 units in the last place.
TEST(Silu, MatchesLongDoubleOverFp32) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 1009) {
    const float z = float_from_bits(static_cast<uint32_t>(bits));
    if (std::isnan(z)) {
      ASSERT_TRUE(std::isnan(silu(z)));
      continue;
    }
    if (std::isinf(z)) continue;
    const long double want = exact_silu(z);
    const long double relative = 0x1p-23L * (3 + std::fabs(std::fmin(z, 0.f)));
    ASSERT_NEAR(silu(z), static_cast<double>(want),
                static_cast<double>(std::fabs(want) * relative + 0x1p-149L))
        << z;
    ASSERT_EQ(std::signbit(silu(z)), std::signbit(z)) << z;
  }
}

TEST(Silu, TailNeitherFlushesNorBreaks) {
  EXPECT_EQ(bf16_from_float(silu(-88.f)), bf16_from_float(-5.3191e-37f));
  EXPECT_LT(silu(-90.f), 0.f);
  for (float z : {-104.5f, -174.f, -250.f, -1e5f, -std::numeric_limits<float>::max()}) {
    EXPECT_GE(silu(z), -1e-42f);
    EXPECT_TRUE(std::signbit(silu(z))) << z;
  }
  EXPECT_TRUE(std::isnan(silu(-kInfinity)));  // -inf * 0, as PyTorch
  EXPECT_EQ(silu(kInfinity), kInfinity);
  EXPECT_EQ(silu(std::numeric_limits<float>::max()), std::numeric_limits<float>::max());
}

TEST(Silu, KnownValues) {
  EXPECT_EQ(bf16_from_float(silu(-1.f)), bf16_from_float(-0.26953125f));
  EXPECT_EQ(bf16_from_float(silu(1.f)), bf16_from_float(0.73046875f));
  EXPECT_EQ(fp16_from_float(silu(-1.f)), fp16_from_float(-0.26904296875f));
  EXPECT_EQ(fp16_from_float(silu(1.f)), fp16_from_float(0.73095703125f));
  EXPECT_EQ(silu(0.f), 0.f);
}

}  // namespace
}  // namespace gnsilu
