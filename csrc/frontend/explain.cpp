#include "explain.h"

#include <nlohmann/json.hpp>

#if GNSILU_WITH_CUDA
#include "cuda_device.h"
#include "tuned_config.h"
#endif

namespace gnsilu {

std::string explain(const Call& call) {
  check(call);
  Problem problem = problem_of(call);
  problem.needs_grad = needs_grad(call);
  Device device = no_device(call);
#if GNSILU_WITH_CUDA
  if (problem.on_cuda) device = cuda_device(call.x.device().index());
#endif
  Plan plan = checked_choose(call, problem, device);
  nlohmann::json config;  // null
#if GNSILU_WITH_CUDA
  if (plan.tunable()) {
    plan.config = known_config(plan, problem, device);
    config = {{"threads", plan.config.threads},
              {"vectors_in_flight", plan.config.vectors_in_flight}};
  }
#endif
  const nlohmann::json explanation = {{"route", to_string(plan.route)},
                                      {"reason", plan.reason},
                                      {"config", config},
                                      {"bytes_per_element", plan.bytes_per_element},
                                      {"workspace_bytes", plan.workspace_bytes}};
  return explanation.dump();
}

}  // namespace gnsilu
