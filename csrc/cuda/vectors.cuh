// Vectors of 8 16-bit elements: the unit in which all kernels read x and write y.
#pragma once

#include <cstdint>

#include "gnsilu/numerics.h"

namespace gnsilu {

constexpr int kWarp = 32;
constexpr int kVector = 8;  // elements; 16 bytes of a 16-bit type

template <DType kX>
__device__ __forceinline__ float to_float(uint16_t bits) {
  return kX == DType::kBFloat16 ? float_from_bf16(bits) : float_from_fp16(bits);
}

struct Vector {
  uint4 bits;

  template <DType kX>
  __device__ __forceinline__ void unpack(float (&values)[kVector]) const {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = to_float<kX>(static_cast<uint16_t>(words[i]));
      values[2 * i + 1] = kX == DType::kBFloat16
                              ? float_from_bits(words[i] & 0xffff0000u)
                              : to_float<kX>(static_cast<uint16_t>(words[i] >> 16));
    }
  }
};

// Largest access, in bytes, that the address allows: 16, 8, 4 or 2.
__device__ __forceinline__ int access_width(const uint16_t* address) {
  const uint32_t low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address));
  const uint32_t width = (low | 16u) & -(low | 16u);
  return static_cast<int>(width);
}

__device__ __forceinline__ Vector load_aligned(const uint16_t* x) {
  return {*reinterpret_cast<const uint4*>(x)};
}

// A vector at an address of any alignment, never touching memory outside of it.
__device__ __forceinline__ Vector load_vector(const uint16_t* x, int width) {
  if (width == 16) return load_aligned(x);
  uint4 v;
  if (width == 8) {
    const uint2* p = reinterpret_cast<const uint2*>(x);
    const uint2 a = p[0], b = p[1];
    v = {a.x, a.y, b.x, b.y};
  } else if (width == 4) {
    const uint32_t* p = reinterpret_cast<const uint32_t*>(x);
    v = {p[0], p[1], p[2], p[3]};
  } else {
    uint32_t e[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) e[i] = x[i];
    v = {e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16};
  }
  return {v};
}

// Calls visit(vector) for the vectors lane, lane + lanes, lane + 2 * lanes, … below count, in that
// order whatever kInFlight is: the number of loads issued before the first is used.
template <int kInFlight, class Visit>
__device__ __forceinline__ void for_each_vector(const uint16_t* x, uint32_t count, uint32_t lane,
                                                uint32_t lanes, Visit visit) {
  const int width = access_width(x);
  uint32_t v = lane;
  if (width == 16) {
    for (; v + lanes * (kInFlight - 1) < count; v += lanes * kInFlight) {
      Vector loaded[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) loaded[i] = load_aligned(x + kVector * (v + lanes * i));
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) visit(loaded[i], v + lanes * i);
    }
  }
  for (; v < count; v += lanes) visit(load_vector(x + kVector * v, width), v);
}

// The smaller or larger element of each half; of a number and a NaN the number. From 8.0 on.
template <DType kX>
__device__ __forceinline__ uint32_t least_of_pairs(uint32_t a, uint32_t b) {
  uint32_t least;
  if constexpr (kX == DType::kBFloat16) {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  } else {
    asm("min.f16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  }
  return least;
}
template <DType kX>
__device__ __forceinline__ uint32_t greatest_of_pairs(uint32_t a, uint32_t b) {
  uint32_t greatest;
  if constexpr (kX == DType::kBFloat16) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(greatest) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(greatest) : "r"(a), "r"(b));
  }
  return greatest;
}

// ------------------------------------------------------------------------------------ writing

// The type that y is stored as: bits for BF16 and FP16.
template <DType kY>
struct Stored {
  using Type = uint16_t;
};
template <>
struct Stored<DType::kFloat32> {
  using Type = float;
};

template <DType kY>
__device__ __forceinline__ void store_element(typename Stored<kY>::Type* y, float value) {
  if constexpr (kY == DType::kFloat32) {
    *y = value;
  } else {
    *y = kY == DType::kBFloat16 ? bf16_from_float(value) : fp16_from_float(value);
  }
}

template <DType kY>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (kY == DType::kFloat16) {
    return bit_cast<uint32_t>(__floats2half2_rn(low, high));
  } else {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return bf16_from_float(low) | static_cast<uint32_t>(bf16_from_float(high)) << 16;
#endif
  }
}

// y is aligned to the vector (16 bytes of a 16-bit type, 32 of FP32).
template <DType kY>
__device__ __forceinline__ void store_vector(typename Stored<kY>::Type* y,
                                             const float (&v)[kVector]) {
  if constexpr (kY == DType::kFloat32) {
    reinterpret_cast<float4*>(y)[0] = {v[0], v[1], v[2], v[3]};
    reinterpret_cast<float4*>(y)[1] = {v[4], v[5], v[6], v[7]};
  } else {
    *reinterpret_cast<uint4*>(y) = {pack_pair<kY>(v[0], v[1]), pack_pair<kY>(v[2], v[3]),
                                    pack_pair<kY>(v[4], v[5]), pack_pair<kY>(v[6], v[7])};
  }
}

}  // namespace gnsilu
