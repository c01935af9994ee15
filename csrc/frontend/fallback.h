// The fallback: PyTorch's own operators, whatever autocast says. Without a gradient 16-bit x is
// computed in FP64, as exact as the kernels are; all else in FP32, or FP64 for FP64 x.
#pragma once

#include "call.h"

namespace gnsilu {

// As one expression of PyTorch's operators, differentiable. Sizes may be symbolic.
at::Tensor decomposed(const Call& call);

// decomposed(), in the memory format that every call's result has.
at::Tensor differentiable(const Call& call);

// Without a gradient: through the (sample, group) pairs in slices whose wide copy is at most 64 MiB
// (4 MiB on a CPU), so that the temporaries stay small beside the result; a larger group is a slice
// of its own.
at::Tensor fallback(const Call& call);

}  // namespace gnsilu
