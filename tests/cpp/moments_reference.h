// Mean and variance of a few thousand elements in long double: two passes.
#pragma once

#include <vector>

namespace gnsilu {

struct Reference {
  long double mean = 0;
  long double variance = 0;
};

inline Reference reference_of(const std::vector<float>& x) {
  Reference reference;
  for (float value : x) reference.mean += value;
  reference.mean /= static_cast<long double>(x.size());
  for (float value : x) {
    const long double deviation = value - reference.mean;
    reference.variance += deviation * deviation;
  }
  reference.variance /= static_cast<long double>(x.size());
  return reference;
}

}  // namespace gnsilu
