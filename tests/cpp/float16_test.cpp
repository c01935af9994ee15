// BF16 and FP16 conversions over all of their values and every tie between two of them.
#include "gnsilu/float16.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <limits>

namespace gnsilu {
namespace {

struct Format {
  float (*widen)(uint16_t);
  uint16_t (*round)(float);
  uint16_t infinity;
};

const Format kBf16{float_from_bf16, bf16_from_float, 0x7f80};
const Format kFp16{float_from_fp16, fp16_from_float, 0x7c00};

void expect_round_trip(const Format& format) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto value = static_cast<uint16_t>(bits);
    const bool is_nan = (value & 0x7fff) > format.infinity;
    const float wide = format.widen(value);
    ASSERT_EQ(std::isnan(wide), is_nan) << bits;
    ASSERT_EQ(format.round(wide), is_nan ? 0x7fff : value) << bits;
  }
}

// Between neighbours a < b: the tie goes to the even one, what is next to it to the nearer one.
void expect_ties_to_even(const Format& format) {
  for (uint16_t a = 0; a + 1 < format.infinity; ++a) {
    const auto b = static_cast<uint16_t>(a + 1);
    const float tie =
        static_cast<float>((static_cast<double>(format.widen(a)) + format.widen(b)) / 2);
    const uint16_t even = a % 2 == 0 ? a : b;
    ASSERT_EQ(format.round(tie), even) << a;
    ASSERT_EQ(format.round(std::nextafter(tie, 0.f)), a) << a;
    ASSERT_EQ(format.round(std::nextafter(tie, std::numeric_limits<float>::infinity())), b) << a;
    ASSERT_EQ(format.round(-tie), even | 0x8000) << a;
  }
}

TEST(BFloat16, RoundTripsAllValues) { expect_round_trip(kBf16); }
TEST(BFloat16, RoundsTiesToEven) { expect_ties_to_even(kBf16); }
TEST(Float16, RoundTripsAllValues) { expect_round_trip(kFp16); }
TEST(Float16, RoundsTiesToEven) { expect_ties_to_even(kFp16); }

TEST(BFloat16, OverflowsFromHalfwayPastTheLargest) {
  EXPECT_EQ(bf16_from_float(3.3961775e38f), 0x7f80);  // 2^128 - 2^119, a tie
  EXPECT_EQ(bf16_from_float(std::nextafter(3.3961775e38f, 0.f)), 0x7f7f);
  EXPECT_EQ(bf16_from_float(-std::numeric_limits<float>::infinity()), 0xff80);
}

TEST(Float16, OverflowsFromHalfwayPastTheLargest) {
  EXPECT_EQ(fp16_from_float(65520.f), 0x7c00);
  EXPECT_EQ(fp16_from_float(std::nextafter(65520.f, 0.f)), 0x7bff);
  EXPECT_EQ(fp16_from_float(-1e30f), 0xfc00);
}

TEST(Float32, AddsDownAndUp) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float largest = std::numeric_limits<float>::max();
  struct Row {
    float a, b, down, up;
  };
  for (const Row& row : {Row{1, 2, 3, 3},
                         {1, 0x1p-30f, 1, 1 + 0x1p-23f},
                         {1, -0x1p-30f, 1 - 0x1p-24f, 1},
                         {0x1p-149f, 0x1p-149f, 0x1p-148f, 0x1p-148f},
                         {largest, largest, largest, infinity},
                         {-largest, -largest, -infinity, -largest},
                         {infinity, 1, infinity, infinity}}) {
    EXPECT_EQ(add_down(row.a, row.b), row.down) << row.a << " + " << row.b;
    EXPECT_EQ(add_up(row.a, row.b), row.up) << row.a << " + " << row.b;
    EXPECT_EQ(std::fegetround(), FE_TONEAREST) << "as before";
  }
}

TEST(Float16, KeepsSubnormalsAndTheSignOfZero) {
  EXPECT_EQ(fp16_from_float(0x1p-24f), 1);
  EXPECT_EQ(fp16_from_float(0x1p-25f), 0);  // a tie, to even
  EXPECT_EQ(fp16_from_float(std::nextafter(0x1p-25f, 1.f)), 1);
  EXPECT_EQ(fp16_from_float(-0x1p-26f), 0x8000);
  EXPECT_EQ(bf16_from_float(0x1p-133f), 1);
  EXPECT_EQ(bf16_from_float(-0x1p-140f), 0x8000);
  EXPECT_EQ(float_from_bf16(1), 0x1p-133f);
}

}  // namespace
}  // namespace gnsilu
