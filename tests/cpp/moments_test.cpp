// Mean and variance in one pass, on the host: chunks, scaling and merging against long double.
#include "gnsilu/moments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "moments_reference.h"

namespace gnsilu {
namespace {

float to_bf16(double value) { return float_from_bf16(bf16_from_float(static_cast<float>(value))); }
float to_fp16(double value) { return float_from_fp16(fp16_from_float(static_cast<float>(value))); }

// As one lane would: whole chunks of 32, then of 8, then single elements.
template <class Sum>
SpanMoments sum_span(const float* x, size_t size, float scale) {
  const auto pivot = static_cast<double>(mul_rn(x[0], scale));
  ChunkSums chunks;
  size_t i = 0;
  const auto add = [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    for (; i + kCount <= size; i += kCount) {
      float chunk[kCount];
      for (int k = 0; k < kCount; ++k) chunk[k] = mul_rn(x[i + static_cast<size_t>(k)], scale);
      chunks.add(chunk, pivot, [&] { return exact_sum<Sum>(chunk); });
    }
  };
  add(std::integral_constant<int, 32>());
  add(std::integral_constant<int, 8>());
  add(std::integral_constant<int, 1>());
  const auto count = static_cast<double>(size);
  return moments_of(chunks.sums, pivot, count, 1 / count);
}

template <class Sum>
SpanMoments span_moments(const float* x, size_t size) {
  const SpanMoments moments = sum_span<Sum>(x, size, 1.f);
  if (!needs_scaling(moments)) return moments;
  const bool is_fp16 = std::all_of(x, x + size, [](float v) { return v == to_fp16(v); });
  if (is_constant(moments, is_fp16 ? DType::kFloat16 : DType::kBFloat16)) {
    EXPECT_TRUE(std::all_of(x, x + size, [&](float v) { return v == x[0]; }));
    return {moments.mean, 0};
  }
  float max_abs = 0;
  for (size_t i = 0; i < size; ++i) max_abs = std::fmax(max_abs, std::fabs(x[i]));
  const int exponent = scaling_exponent(max_abs);
  return unscaled(sum_span<Sum>(x, size, power_of_two(-exponent)), exponent);
}

template <class Sum = ExactSum>
GroupMoments moments_of_group(const std::vector<float>& x, size_t span) {
  const double origin = span_moments<Sum>(x.data(), std::min(span, x.size())).mean;
  SpanSums sums;
  for (size_t start = 0; start < x.size(); start += span) {
    const size_t size = std::min(span, x.size() - start);
    sums.add(span_moments<Sum>(x.data() + start, size), static_cast<double>(size), origin);
  }
  return group_moments(sums, origin, 1.0 / static_cast<double>(x.size()));
}

// What GPUs with much FP64 take, and those with little.
const auto kWaysToSum = {&moments_of_group<Sum64>, &moments_of_group<Sum32>};

struct Distribution {
  const char* name;
  double mean;
  double sigma;
  bool fp16;
};

class OnePass : public testing::TestWithParam<Distribution> {};

TEST_P(OnePass, MatchesLongDouble) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal(GetParam().mean, GetParam().sigma);
  for (size_t size : {1u, 2u, 31u, 33u, 1000u, 20001u}) {
    std::vector<float> x(size);
    for (float& value : x)
      value = GetParam().fp16 ? to_fp16(normal(random)) : to_bf16(normal(random));
    const Reference want = reference_of(x);
    const double scale = std::fabs(GetParam().mean) + GetParam().sigma;
    for (const auto way : kWaysToSum) {
      const GroupMoments got = way(x, 2048);
      EXPECT_NEAR(got.centre.mean, static_cast<double>(want.mean), std::ldexp(scale, -44));
      EXPECT_NEAR(got.variance, static_cast<double>(want.variance),
                  static_cast<double>(want.variance) * 0x1p-21);
      EXPECT_LE(static_cast<double>(std::fabs(got.centre.mean32)) * 1.001,
                std::ldexp(2.0, got.centre.exponent));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Distributions, OnePass,
    testing::Values(Distribution{"standard", 0, 1, false}, Distribution{"offset", 1000, 1, false},
                    Distribution{"far", -30000, 4, false}, Distribution{"tiny", 0, 1e-30, false},
                    Distribution{"subnormal", 0, 3e-39, false},
                    Distribution{"huge", 0, 5e37, false},
                    Distribution{"huge_offset", 2e38, 1e36, false},
                    Distribution{"half", 0.3, 4, true}, Distribution{"half_offset", 1000, 1, true},
                    Distribution{"half_far", 60000, 40, true},
                    Distribution{"half_subnormal", 0, 3e-6, true}),
    [](const auto& info) { return info.param.name; });

// Where some cancel and leave x that is small beside them, a sum in FP32 would lose the mean.
TEST(OnePass, FewLargeValuesAmongTinyOnesLeaveTheMean) {
  for (const double large : {1.0, 1000.0, 60000.0}) {
    std::vector<float> x(8192, to_bf16(large * 0x1p-26));
    for (size_t i = 0; i < x.size(); i += 32) {
      x[i] = to_bf16(large);
      x[i + 16] = -x[i];
    }
    const auto want = static_cast<double>(reference_of(x).mean);
    for (const auto way : kWaysToSum) {
      EXPECT_NEAR(way(x, 2048).centre.mean, want, want * 0x1p-20);
    }
  }
}

// Both ways in which eight may come out: FP32 holds their sum, or FP64 is called for.
TEST(OnePass, Fp64IsCalledForWhereFp32RoundsAndNowhereElse) {
  struct Row {
    float values[8];
    bool fits;  // what FP32 adds two by two
  };
  const float largest = to_bf16(3.3e38);
  const Row rows[] = {
      {{1, 2, 3, 4, 5, 6, 7, 8}, true},
      {{1, 0, 0, 0, 0, 0, 0, 0x1p-23f}, true},
      {{1, 0, 0, 0, 0, 0, 0, 0x1p-24f}, false},
      {{1, 0x1p-30f, -1, 0, 0, 0, 0, 0}, false},
      {{0, -0.f, 0, -0.f, -0.f, -0.f, 0, 0}, true},
      {{0x1p-133f, -0x1p-132f, 0x1p-127f, 0, 0, 0, 0, 0}, true},
      {{0x1p-133f, 0x1p-100f, 0, 0, 0, 0, 0, 0}, false},
      {{largest, largest, -largest, -largest, 0, 0, 0, 0}, false},
      {{std::numeric_limits<float>::quiet_NaN(), 1, 1, 1, 1, 1, 1, 1}, false},
  };
  for (const Row& row : rows) {
    int calls = 0;
    ChunkSums chunks;
    chunks.add(row.values, 0, [&] {
      ++calls;
      return exact_sum<Sum64>(row.values);
    });
    EXPECT_EQ(calls, row.fits ? 0 : 1) << row.values[0] << ", " << row.values[1];
    if (std::isnan(row.values[0])) continue;
    long double want = 0;
    for (const float value : row.values) want += static_cast<long double>(value);
    EXPECT_EQ(chunks.sums.sum, static_cast<double>(want)) << row.values[0] << ", " << row.values[1];
  }
}

TEST(OnePass, TwoValuedInputsAreExact) {
  for (const auto& [low, high] : {std::pair{1000.f, 1008.f},
                                  {-to_bf16(3e38), to_bf16(3e38)},
                                  {60000.f, 60032.f},
                                  {-0x1p-133f, 0x1p-133f},
                                  {2048.f, 2050.f}}) {
    std::vector<float> x(10000, low);
    for (size_t i = 0; i < x.size(); i += 2) x[i] = high;
    const GroupMoments got = moments_of_group(x, 2048);
    const double half = (static_cast<double>(high) - low) / 2;
    EXPECT_DOUBLE_EQ(got.centre.mean, (static_cast<double>(high) + low) / 2);
    EXPECT_DOUBLE_EQ(got.variance, half * half);
  }
}

// What one-pass sums of x and x^2 get wrong: a single other value among 2^20.
TEST(OnePass, OneOtherValueAmongAMillion) {
  std::vector<float> x(1 << 20, 60000.f);
  x[12345] = 60032.f;
  const GroupMoments got = moments_of_group(x, 16384);
  EXPECT_NEAR(got.centre.mean, 60000 + 0x1p-15, 1e-9);
  EXPECT_NEAR(got.variance, 0x1p-10, 1e-9);
}

TEST(OnePass, ConstantsHaveNoVariance) {
  for (float value : {0.f, 255.5f, -65504.f, 1e30f, 3.3895314e38f, 0x1p-133f}) {
    for (size_t size : {1u, 3u, 147u, 4097u}) {
      const std::vector<float> x(size, to_bf16(value));
      const GroupMoments got = moments_of_group(x, 2048);
      EXPECT_EQ(got.centre.mean, static_cast<double>(x[0]));
      EXPECT_EQ(got.centre.mean32, x[0]);
      EXPECT_EQ(got.variance, 0.0);
    }
  }
}

TEST(OnePass, ScalingByAPowerOfTwoChangesNothingElse) {
  std::mt19937 random(4);
  std::normal_distribution<double> normal(0.3, 2);
  std::vector<float> x(5000);
  for (float& value : x) value = to_bf16(normal(random));
  const GroupMoments want = moments_of_group(x, 2048);
  for (int k : {-120, -60, -3, 5, 70, 120}) {
    std::vector<float> scaled(x);
    for (float& value : scaled) value = std::ldexp(value, k);
    const GroupMoments got = moments_of_group(scaled, 2048);
    EXPECT_EQ(got.centre.mean, std::ldexp(want.centre.mean, k)) << k;
    EXPECT_EQ(got.variance, std::ldexp(want.variance, 2 * k)) << k;
  }
}

// Where the scaling sets in, and where most values are tiny against the few that make the variance.
TEST(OnePass, ScalingWideSpreadValuesChangesNothingElse) {
  std::mt19937 random(6);
  std::normal_distribution<double> normal;
  std::vector<float> x(5000);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = to_bf16(std::ldexp(normal(random), i % 1000 == 500 ? 0 : -25));
  }
  const GroupMoments want = moments_of_group(x, 2048);
  for (int k = -80; k <= 100; ++k) {
    std::vector<float> scaled(x);
    for (float& value : scaled) value = std::ldexp(value, k);
    const GroupMoments got = moments_of_group(scaled, 2048);
    EXPECT_EQ(got.centre.mean, std::ldexp(want.centre.mean, k)) << k;
    EXPECT_EQ(got.variance, std::ldexp(want.variance, 2 * k)) << k;
  }
}

// Every chunk's mean is rounded the same way, and the pivot is far from all of them.
TEST(OnePass, TheFirstElementOfASpanMayBeAnOutlier) {
  for (const double unit : {1.0, 2048.0}) {  // of BF16 and of FP16
    for (size_t span : {512u, 2048u, 16384u}) {
      std::vector<float> x(4 * span, 0.f);
      for (size_t i = 0; i < x.size(); i += 32) {
        x[i] = static_cast<float>(unit);
        for (size_t lost : {1u, 2u, 4u, 8u, 16u}) x[i + lost] = to_bf16(unit * 0x1.fcp-25);
      }
      for (size_t i = 0; i < x.size(); i += span) {
        x[i] = to_bf16(unit * std::sqrt(static_cast<double>(span) / 32));
      }
      const auto want = static_cast<double>(reference_of(x).variance);
      for (const auto way : kWaysToSum) {
        EXPECT_NEAR(way(x, span).variance, want, want * 0x1p-21) << unit << " " << span;
      }
    }
  }
}

TEST(OnePass, TheMeanIsExactToFp64) {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> uniform(-60000, 60000);
  for (size_t size : {77u, 2048u, 20001u, 1u << 20}) {
    std::vector<float> x(size);
    for (float& value : x) value = to_fp16(uniform(random));
    const auto want = static_cast<double>(reference_of(x).mean);
    for (const auto way : kWaysToSum) {
      EXPECT_NEAR(way(x, 16384).centre.mean, want, 60000 * 0x1p-44) << size;
    }
  }
}

TEST(OnePass, NanAndInfinityReachTheVariance) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                    -std::numeric_limits<float>::infinity()}) {
    for (size_t at : {0u, 77u, 4999u}) {
      std::vector<float> x(5000, 1.f);
      x[at] = bad;
      for (const auto way : kWaysToSum) {
        EXPECT_TRUE(std::isnan(way(x, 2048).variance)) << bad << " at " << at;
      }
    }
  }
}

}  // namespace
}  // namespace gnsilu
