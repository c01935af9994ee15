// Between the tuner (csrc/core/tuner.h) and the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "gnsilu/launch.h"
#include "gnsilu/plan.h"

namespace gnsilu {

// The configuration to launch plan with. Tunes where that is wanted, due and allowed: then the
// candidates run on stream, on at most 256 MiB of arguments.y, which the launch proper overwrites
// afterwards, so that tuning takes no memory of its own.
Config tuned_config(const Plan& plan, const Problem& problem, const Arguments& arguments,
                    const Device& device, cudaStream_t stream);

// What tuned_config would use as things stand, without tuning.
Config known_config(const Plan& plan, const Problem& problem, const Device& device);

}  // namespace gnsilu
