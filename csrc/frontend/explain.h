// What a call would do, as JSON; launches nothing.
#pragma once

#include <string>

#include "call.h"

namespace gnsilu {

// {"route", "reason", "config": {"threads", "vectors_in_flight"} or null,
//  "bytes_per_element", "workspace_bytes"}
std::string explain(const Call& call);

}  // namespace gnsilu
