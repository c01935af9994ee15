// The CUDA routes: from a checked call to kernel launches on the current stream.
#pragma once

#include "call.h"

namespace gnsilu {

// The result by the route that choose() picks, the fallback included. x is on a CUDA device.
at::Tensor run_cuda(const Call& call);

// By three_pass with that configuration, one of its candidates: no choice of it changes a bit of
// the result, and this is how the tests know.
at::Tensor run_with_config(const Call& call, const Config& config);

}  // namespace gnsilu
