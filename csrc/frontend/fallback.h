// The fallback: PyTorch's own operators, whatever autocast says. Without a gradient 16-bit x is
// computed in FP64, as exact as the kernels are; all else in FP32, or FP64 for FP64 x.
#pragma once

#include "call.h"

namespace gnsilu {

// Differentiable: FP32, or FP64 for FP64 x. In the memory format that every call's result has.
// Sizes may be symbolic.
at::Tensor differentiable(const Call& call);

// Of operators that have batching rules: 16-bit x in FP64, as without vmap.
at::Tensor vmapped(const Call& call);

// Without a gradient: through the (sample, group) pairs in slices whose wide copy is at most 64 MiB
// (4 MiB on a CPU), so that the temporaries stay small beside the result; a larger group is a slice
// of its own.
at::Tensor fallback(const Call& call);

}  // namespace gnsilu
