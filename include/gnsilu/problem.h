// What a call asks for, as plain numbers: the front end makes a Problem from tensors, everything
// behind it (choosing, tuning, launching) sees only this.
#pragma once

#include <cstdint>

namespace gnsilu {

enum class DType : int8_t { kBFloat16, kFloat16, kFloat32, kFloat64 };

// The activation applied to the normalised value z: y = z or y = z * sigmoid(z).
enum class Activation : int8_t { kNone, kSilu };

constexpr bool is_16_bit(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

constexpr int64_t size_in_bytes(DType dtype) {
  return is_16_bit(dtype) ? 2 : dtype == DType::kFloat32 ? 4 : 8;
}

constexpr const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
  }
  return "?";
}

// x is [samples, channels, spatial_size], the spatial dimensions flattened; in NCHW memory a group
// of one sample is group_size() consecutive elements.
struct Problem {
  int64_t samples = 0;
  int64_t channels = 0;
  int64_t spatial_size = 0;  // H * W, or D * H * W; 1 for a 2-D x
  int64_t num_groups = 1;    // divides channels
  DType x_dtype = DType::kBFloat16;
  DType y_dtype = DType::kBFloat16;
  Activation activation = Activation::kSilu;

  // Facts about the tensors that decide the route.
  bool on_cuda = false;
  bool contiguous = true;   // x is dense in NCHW order
  bool aligned = true;      // x and y begin at multiples of 16 bytes
  bool needs_grad = false;  // a gradient (or a forward tangent) has to flow

  constexpr int64_t channels_per_group() const { return channels / num_groups; }
  // Groups of all samples: the number of independent normalisations.
  constexpr int64_t group_count() const { return samples * num_groups; }
  constexpr int64_t group_size() const { return channels_per_group() * spatial_size; }
  constexpr int64_t numel() const { return samples * channels * spatial_size; }
};

}  // namespace gnsilu
