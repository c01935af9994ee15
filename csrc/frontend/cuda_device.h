// CUDA devices as the core sees them.
#pragma once

#include <c10/core/Device.h>

#include "gnsilu/device.h"

namespace gnsilu {

// Facts about a CUDA device, read once. Warns once per device when this build holds no kernel
// image for it.
const Device& cuda_device(c10::DeviceIndex index);

}  // namespace gnsilu
