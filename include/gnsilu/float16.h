// BF16 and FP16 as bits, and the FP32 operations that the numerics are made of, for host and
// device. BF16 is read and written as bits, so that GPUs without BF16 arithmetic agree.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define GNSILU_HD __host__ __device__ inline
#else
#define GNSILU_HD inline
#endif

namespace gnsilu {

template <class To, class From>
GNSILU_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

GNSILU_HD float float_from_bits(uint32_t bits) { return bit_cast<float>(bits); }
GNSILU_HD uint32_t float_bits(float value) { return bit_cast<uint32_t>(value); }
GNSILU_HD double double_from_bits(uint64_t bits) { return bit_cast<double>(bits); }
GNSILU_HD uint64_t double_bits(double value) { return bit_cast<uint64_t>(value); }

// Rounded operations that no compiler may contract into a fused multiply-add.
#if defined(__CUDA_ARCH__)
GNSILU_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
GNSILU_HD float add_down(float a, float b) { return __fadd_rd(a, b); }
GNSILU_HD float add_up(float a, float b) { return __fadd_ru(a, b); }
GNSILU_HD float sub_rn(float a, float b) { return __fsub_rn(a, b); }
GNSILU_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
GNSILU_HD float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// 2 units in the last place, subnormal results flushed.
GNSILU_HD float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 unit in the last place.
GNSILU_HD float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 unit in the last place; shorter by half than a square root and a division.
GNSILU_HD double reciprocal_sqrt(double x) { return rsqrt(x); }
#else
GNSILU_HD double reciprocal_sqrt(double x) { return 1.0 / sqrt(x); }
GNSILU_HD float add_rn(float a, float b) { return a + b; }
inline float add_rounded(float a, float b, int rounding) {
  const int before = std::fegetround();
  std::fesetround(rounding);
  volatile float first = a;  // so that the sum is formed here and now
  volatile float sum = first + b;
  std::fesetround(before);
  return sum;
}
GNSILU_HD float add_down(float a, float b) { return add_rounded(a, b, FE_DOWNWARD); }
GNSILU_HD float add_up(float a, float b) { return add_rounded(a, b, FE_UPWARD); }
GNSILU_HD float sub_rn(float a, float b) { return a - b; }
GNSILU_HD float mul_rn(float a, float b) { return a * b; }
GNSILU_HD float fma_rn(float a, float b, float c) { return fmaf(a, b, c); }
GNSILU_HD float exp2_approx(float x) { return exp2f(x); }
GNSILU_HD float reciprocal_approx(float x) { return 1.f / x; }
#endif

// ------------------------------------------------------------------------------------ BF16

GNSILU_HD float float_from_bf16(uint16_t bits) {
  return float_from_bits(static_cast<uint32_t>(bits) << 16);
}

// To nearest, ties to even; a NaN becomes 0x7fff as the hardware's conversion does.
GNSILU_HD uint16_t bf16_from_float(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint16_t rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  return rounded;
#else
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// ------------------------------------------------------------------------------------ FP16

GNSILU_HD float float_from_fp16(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(bits));
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, or NaN with its payload
    return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  if (magnitude < 0x400u) {  // subnormal: a multiple of 2^-24
    return float_from_bits(sign | float_bits(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return float_from_bits(sign | ((magnitude << 13) + (uint32_t{112} << 23)));
#endif
}

// To nearest, ties to even; 65520 and above to infinity; a NaN becomes 0x7fff.
GNSILU_HD uint16_t fp16_from_float(float value) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // from 65520
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, rounded by adding at 2^-24's place
    const float shifted = float_from_bits(magnitude) + 0.5f;  // 0.5 + k * 2^-24
    return static_cast<uint16_t>(sign | (float_bits(shifted) - float_bits(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (uint32_t{112} << 23)) >> 13));
#endif
}

}  // namespace gnsilu
