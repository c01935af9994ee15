// The CUDA routes: from a checked call to kernel launches on the current stream.
#pragma once

#include "call.h"

namespace gnsilu {

// The result by the route that choose() picks, the fallback included. x is on a CUDA device.
at::Tensor run_cuda(const Call& call);

// By that route with that configuration, one of its candidates, and that many blocks a group (0: as
// chosen): no choice of these changes a bit of the result, and this is how the tests know.
at::Tensor run_with_config(const Call& call, Route route, const Config& config, int64_t blocks);

}  // namespace gnsilu
