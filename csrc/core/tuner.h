// The launch tuner: times the candidates of a route once per key and remembers the fastest, in
// memory per device and in one file per GPU model. Knows neither CUDA nor torch: the timer is
// handed in, so that tests can invent it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "gnsilu/device.h"
#include "gnsilu/plan.h"
#include "gnsilu/problem.h"

namespace gnsilu {

// Everything that a timing depends on. Lengths and resolutions are not part of it.
struct TunerKey {
  std::string gpu;   // Device::name
  int sm_count = 0;  // a slice of a GPU (MIG) bears the whole one's name
  int driver_version = 0;
  std::string kernels;  // version of the kernels: kernel_version() of this build
  Route route = Route::kThreePass;
  int64_t channels_per_group = 0;
  DType x_dtype = DType::kBFloat16;
  DType y_dtype = DType::kBFloat16;

  bool operator==(const TunerKey& other) const;
};

// A TunerKey whose strings lie elsewhere: looking one up allocates nothing.
struct TunerKeyView {
  std::string_view gpu;
  int sm_count = 0;
  int driver_version = 0;
  std::string_view kernels;
  Route route = Route::kThreePass;
  int64_t channels_per_group = 0;
  DType x_dtype = DType::kBFloat16;
  DType y_dtype = DType::kBFloat16;

  TunerKeyView() = default;
  TunerKeyView(const TunerKey& key);  // implicit: a key serves wherever a view does
};

struct TunerKeyLess {
  using is_transparent = void;
  bool operator()(const TunerKeyView& a, const TunerKeyView& b) const;
};

// The view refers to device.name, so device has to outlive it.
TunerKeyView tuner_key_view(const Problem& problem, const Device& device, Route route);
TunerKey tuner_key(const Problem& problem, const Device& device, Route route);

// A stored decision.
struct TunerEntry {
  TunerKey key;
  Config config;
  double microseconds = 0;  // median of the winner, on the activation it was timed with
  std::string made;         // UTC, ISO 8601
};

// Median time of one launch with that configuration in microseconds, or nothing where the
// candidate failed. An exception ends the tuning and reaches the caller (a sticky CUDA error).
using CandidateTimer = std::function<std::optional<double>(const Config&)>;

// Thread-safe, also in a process forked from one whose threads were using it.
// Serves all devices: the keys name the GPU.
class Tuner {
 public:
  // directory: where the files lie, empty for memory only. warn: called once per file that could
  // not be read or written, never with a lock held; the tuner goes on in memory, and after a failed
  // write no longer writes that file.
  Tuner(std::string directory, std::function<void(const std::string&)> warn);

  // The remembered configuration for key: from memory, else from the GPU's file (read once and
  // again after clear()). Entries outside candidates(key.route) count as absent. Once the file is
  // read a call allocates nothing.
  std::optional<Config> find(const TunerKeyView& key);

  // find(), else times every candidate and stores the fastest, in memory and in the file.
  // Another thread that asks for the same key meanwhile gets the default without waiting.
  // A candidate without a time, or with one that is not finite and above 0, is passed over; if
  // none is left the default is used and only memory remembers it. budget_seconds bounds the
  // whole: no further candidate is begun once it is spent.
  Config tune(const TunerKey& key, const CandidateTimer& timer, double budget_seconds = 1.0);

  // Forgets what is in memory, failed writes included (the file stays).
  void clear();

 private:
  std::optional<Config> find_in_memory(const TunerKeyView& key);
  bool begin_tuning(const TunerKey& key);
  void end_tuning(const TunerKey& key);
  void write(const TunerKey& key, const Config& config, double microseconds);
  void warn_once(const std::string& path, const std::string& fault);

  const std::string directory_;
  const std::function<void(const std::string&)> warn_;
  // All below is guarded by the mutex in tuner.cpp.
  std::map<TunerKey, Config, TunerKeyLess> known_;
  std::set<TunerKey, TunerKeyLess> tuning_;  // keys that a thread is timing just now
  uint64_t tuning_process_ = 0;              // the process (see tuner.cpp) that tuning_ is about
  std::set<std::string, std::less<>> read_gpus_;  // GPU names whose file has been read
  std::set<std::string> unwritable_;              // files whose writing failed
  std::set<std::string> warned_;                  // files that were warned about
};

// Where the tuner's files lie: GNSILU_CACHE_DIR, else gnsilu below the platform's user cache
// folder (XDG_CACHE_HOME or ~/.cache; ~/Library/Caches; LOCALAPPDATA), the home found without
// HOME through the user database. Empty where there is no such home: memory only.
std::string cache_directory();

// Hash of the kernel sources this library was built from, short.
const char* kernel_version();

}  // namespace gnsilu
