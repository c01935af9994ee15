// The fallback: PyTorch's own operators, in FP32, or FP64 for FP64 x; whatever autocast says.
#pragma once

#include "call.h"

namespace gnsilu {

// As one expression of PyTorch's operators, differentiable. Sizes may be symbolic.
at::Tensor decomposed(const Call& call);

// decomposed(), in the memory format that every call's result has.
at::Tensor differentiable(const Call& call);

// Without a gradient: through the (sample, group) pairs in slices whose FP32 copy is at most
// 64 MiB, so that the temporaries stay small beside the result; a larger group is a slice of its
// own.
at::Tensor fallback(const Call& call);

}  // namespace gnsilu
