// From run-time types and configurations to template arguments.
#pragma once

#include <type_traits>

#include "gnsilu/plan.h"
#include "gnsilu/problem.h"

namespace gnsilu {

template <DType kValue>
using DTypeConstant = std::integral_constant<DType, kValue>;

// Calls f with the DTypeConstant of a 16-bit x.
template <class F>
auto dispatch_x(DType dtype, F f) {
  if (dtype == DType::kBFloat16) return f(DTypeConstant<DType::kBFloat16>());
  return f(DTypeConstant<DType::kFloat16>());
}

template <class F>
auto dispatch_y(DType dtype, F f) {
  if (dtype == DType::kBFloat16) return f(DTypeConstant<DType::kBFloat16>());
  if (dtype == DType::kFloat16) return f(DTypeConstant<DType::kFloat16>());
  return f(DTypeConstant<DType::kFloat32>());
}

template <class F>
auto dispatch_activation(Activation activation, F f) {
  if (activation == Activation::kSilu) {
    return f(std::integral_constant<Activation, Activation::kSilu>());
  }
  return f(std::integral_constant<Activation, Activation::kNone>());
}

template <class F>
auto dispatch_in_flight(const Config& config, F f) {
  if (config.vectors_in_flight == 4) return f(std::integral_constant<int, 4>());
  return f(std::integral_constant<int, 8>());
}

}  // namespace gnsilu
