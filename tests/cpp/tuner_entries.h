// An entry for the tests of the tuner's file.
#pragma once

#include <string>

#include "tuner_file.h"

namespace gnsilu {

constexpr const char* kGpu = "NVIDIA Invented";

inline TunerEntry entry_of(int64_t channels_per_group, const std::string& gpu = kGpu) {
  TunerEntry entry;
  entry.key.gpu = gpu;
  entry.key.sm_count = 132;
  entry.key.driver_version = 13000;
  entry.key.kernels = "1f0c";
  entry.key.channels_per_group = channels_per_group;
  entry.key.x_dtype = DType::kFloat16;
  entry.key.y_dtype = DType::kFloat32;
  entry.config = {128, 4};
  entry.microseconds = 512.25;
  entry.made = "2026-01-31T12:00:00Z";
  return entry;
}

}  // namespace gnsilu
