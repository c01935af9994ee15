#include "tuner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "tuner_file.h"

#ifndef _WIN32
#include <pthread.h>
#endif

namespace gnsilu {
namespace {

// One mutex for all tuners, held for a look-up or an insertion only, never while a file is read
// or a candidate timed. fork() waits for it (below), so that a child never inherits it locked by
// a thread that it does not have.
std::mutex mutex;
// Counts the forks that led to this process: a child's tuners tell by it that the threads which
// were timing keys stayed behind in the parent.
uint64_t process_generation = 0;

void register_fork_handlers() {
#ifndef _WIN32
  static const int registered = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                                               [] {
                                                 ++process_generation;
                                                 mutex.unlock();
                                               });
  static_cast<void>(registered);
#endif
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
#ifdef _WIN32
  gmtime_s(&parts, &now);
#else
  gmtime_r(&now, &parts);
#endif
  char text[sizeof "2026-01-31T12:00:00Z"] = "";
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

struct Timed {
  Config config;
  double microseconds = 0;
};

std::optional<Timed> fastest(const std::vector<Config>& configs, const CandidateTimer& timer,
                             double budget_seconds) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::optional<Timed> best;
  for (const Config& config : configs) {
    const std::chrono::duration<double> spent = Clock::now() - start;
    if (!(spent.count() < budget_seconds)) break;
    const std::optional<double> time = timer(config);
    if (!time || !std::isfinite(*time) || *time <= 0) continue;
    if (!best || *time < best->microseconds) best = Timed{config, *time};
  }
  return best;
}

auto ordered(const TunerKeyView& key) {
  return std::make_tuple(key.channels_per_group, key.x_dtype, key.y_dtype, key.route, key.sm_count,
                         key.driver_version, key.gpu, key.kernels);
}

}  // namespace

bool TunerKey::operator==(const TunerKey& other) const { return ordered(*this) == ordered(other); }

TunerKeyView::TunerKeyView(const TunerKey& key)
    : gpu(key.gpu),
      sm_count(key.sm_count),
      driver_version(key.driver_version),
      kernels(key.kernels),
      route(key.route),
      channels_per_group(key.channels_per_group),
      x_dtype(key.x_dtype),
      y_dtype(key.y_dtype) {}

bool TunerKeyLess::operator()(const TunerKeyView& a, const TunerKeyView& b) const {
  return ordered(a) < ordered(b);
}

TunerKeyView tuner_key_view(const Problem& problem, const Device& device, Route route) {
  TunerKeyView key;
  key.gpu = device.name;
  key.sm_count = device.sm_count;
  key.driver_version = device.driver_version;
  key.kernels = kernel_version();
  key.route = route;
  key.channels_per_group = problem.channels_per_group();
  key.x_dtype = problem.x_dtype;
  key.y_dtype = problem.y_dtype;
  return key;
}

TunerKey tuner_key(const Problem& problem, const Device& device, Route route) {
  const TunerKeyView view = tuner_key_view(problem, device, route);
  return {std::string(view.gpu),
          view.sm_count,
          view.driver_version,
          std::string(view.kernels),
          view.route,
          view.channels_per_group,
          view.x_dtype,
          view.y_dtype};
}

Tuner::Tuner(std::string directory, std::function<void(const std::string&)> warn)
    : directory_(std::move(directory)), warn_(std::move(warn)) {
  register_fork_handlers();
}

std::optional<Config> Tuner::find(const TunerKeyView& key) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const std::optional<Config> config = find_in_memory(key);
    if (config || directory_.empty() || read_gpus_.count(key.gpu) > 0) return config;
  }
  const std::string gpu(key.gpu);
  const std::string path = tuner_file_path(directory_, gpu);
  const TunerFileContents contents = read_tuner_file(path, gpu);
  std::optional<Config> config;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const TunerEntry& entry : contents.entries) {
      if (is_candidate(entry.key.route, entry.config)) known_.emplace(entry.key, entry.config);
    }
    read_gpus_.insert(gpu);
    config = find_in_memory(key);
  }
  warn_once(path, contents.fault);
  return config;
}

std::optional<Config> Tuner::find_in_memory(const TunerKeyView& key) {
  const auto found = known_.find(key);
  if (found == known_.end()) return {};
  return found->second;
}

Config Tuner::tune(const TunerKey& key, const CandidateTimer& timer, double budget_seconds) {
  const std::vector<Config>& configs = candidates(key.route);
  if (configs.empty()) return Config();
  if (const std::optional<Config> known = find(key)) return *known;
  if (!begin_tuning(key)) return find(key).value_or(configs.front());

  struct EndTuning {
    Tuner& tuner;
    const TunerKey& key;
    ~EndTuning() { tuner.end_tuning(key); }
  };
  std::optional<Timed> best;
  {
    const EndTuning end_tuning{*this, key};
    best = fastest(configs, timer, budget_seconds);
    const std::lock_guard<std::mutex> lock(mutex);
    known_[key] = best ? best->config : configs.front();
  }
  if (!best) return configs.front();
  write(key, best->config, best->microseconds);
  return best->config;
}

bool Tuner::begin_tuning(const TunerKey& key) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (tuning_process_ != process_generation) tuning_.clear();
  tuning_process_ = process_generation;
  // Known by now where another thread has finished since this one looked.
  return !find_in_memory(key) && tuning_.insert(key).second;
}

void Tuner::end_tuning(const TunerKey& key) {
  const std::lock_guard<std::mutex> lock(mutex);
  tuning_.erase(key);
}

void Tuner::write(const TunerKey& key, const Config& config, double microseconds) {
  if (directory_.empty()) return;
  const std::string path = tuner_file_path(directory_, key.gpu);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (unwritable_.count(path) > 0) return;
  }
  const std::string fault = write_tuner_entry(path, {key, config, microseconds, utc_now()});
  if (fault.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    unwritable_.insert(path);
  }
  warn_once(path, fault);
}

void Tuner::clear() {
  const std::lock_guard<std::mutex> lock(mutex);
  known_.clear();
  read_gpus_.clear();
  unwritable_.clear();
}

void Tuner::warn_once(const std::string& path, const std::string& fault) {
  if (fault.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!warned_.insert(path).second) return;
  }
  if (warn_) warn_("gnsilu: launch tuner: " + fault + "; going on without it");
}

const char* kernel_version() { return GNSILU_KERNEL_VERSION; }

}  // namespace gnsilu
