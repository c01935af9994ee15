#include "tuner_file.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "shared_file.h"

namespace gnsilu {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // keeps the fields in the order that the header shows

constexpr const char* kFormat = "gnsilu tuner";
constexpr int kVersion = 1;
constexpr auto kLockPatience = std::chrono::seconds(5);

constexpr const char* kNamePrefix = "tuner-";
constexpr const char* kNameSuffix = ".json";
constexpr const char* kLockSuffix = ".lock";
constexpr size_t kMaxNameLength = 64;  // of the GPU's part; file systems allow 255 in all
constexpr size_t kHashDigits = 8;

// FNV-1a, 64 bits folded to 32.
std::string short_hash(const std::string& text) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  char digits[kHashDigits + 1];
  std::snprintf(digits, sizeof(digits), "%08x", static_cast<unsigned>(hash ^ (hash >> 32)));
  return digits;
}

bool is_safe(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '_';
}

bool is_tuner_file_name(const std::string& name) {
  const std::string prefix = kNamePrefix;
  const std::string suffix = kNameSuffix;
  if (name.size() < prefix.size() + 1 + kHashDigits + suffix.size()) return false;
  const size_t stem = name.size() - suffix.size();
  return name.compare(0, prefix.size(), prefix) == 0 &&
         name.compare(stem, suffix.size(), suffix) == 0 &&
         std::all_of(name.begin(), name.begin() + static_cast<std::ptrdiff_t>(stem), is_safe) &&
         name[stem - kHashDigits - 1] == '-' &&
         name.find_first_not_of("0123456789abcdef", stem - kHashDigits) == stem;
}

// JSON holds UTF-8 only: bytes that are none become U+FFFD.
std::string dump(const Json& json) {
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

// What a string becomes by being written and read again.
std::string as_stored(const std::string& text) {
  return Json::parse(dump(Json(text))).get<std::string>();
}

// A path as a message shows it, valid UTF-8 for whoever prints it.
std::string quoted(const std::string& path) { return "'" + as_stored(path) + "'"; }

// The fields of an entry; `ok` turns false at the first that is absent or not as it should be.
struct Fields {
  const Json& json;
  bool ok = true;

  const Json* field(const char* name) {
    const auto found = json.is_object() ? json.find(name) : json.end();
    if (found != json.end()) return &*found;
    ok = false;
    return nullptr;
  }

  int64_t integer(const char* name, int64_t least, int64_t most) {
    const Json* value = field(name);
    if (value != nullptr && value->is_number_integer()) {
      // An unsigned one above the largest int64_t would come out negative.
      const bool huge = value->is_number_unsigned() &&
                        value->get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()};
      const int64_t number = value->get<int64_t>();
      if (!huge && number >= least && number <= most) return number;
    }
    ok = false;
    return least;
  }

  int small_integer(const char* name, int least, int most = std::numeric_limits<int>::max()) {
    return static_cast<int>(integer(name, least, most));
  }

  std::string text(const char* name) {
    const Json* value = field(name);
    if (value != nullptr && value->is_string()) return value->get<std::string>();
    ok = false;
    return "";
  }

  double positive(const char* name) {
    const Json* value = field(name);
    const double number = value != nullptr && value->is_number() ? value->get<double>() : 0;
    ok = ok && std::isfinite(number) && number > 0;
    return number;
  }

  DType dtype(const char* name) {
    const std::string wanted = text(name);
    for (const DType dtype :
         {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64}) {
      if (wanted == to_string(dtype)) return dtype;
    }
    ok = false;
    return DType::kBFloat16;
  }

  Route route(const char* name) {
    const std::optional<Route> route = route_from_name(text(name));
    ok = ok && route.has_value();
    return route.value_or(Route::kThreePass);
  }

  Config config(const char* name) {
    static const Json kNone;
    const Json* value = field(name);
    Fields fields{value != nullptr ? *value : kNone};
    Config config;
    config.threads = fields.small_integer("threads", 32, 1024);
    config.vectors_in_flight = fields.small_integer("vectors_in_flight", 1);
    ok = ok && fields.ok && config.threads % 32 == 0;
    return config;
  }
};

std::optional<TunerEntry> entry_from_json(const Json& json, const std::string& gpu) {
  Fields fields{json};
  TunerEntry entry;
  entry.key.gpu = gpu;
  entry.key.sm_count = fields.small_integer("sm_count", 1);
  entry.key.driver_version = fields.small_integer("driver_version", 0);
  entry.key.kernels = fields.text("kernels");
  entry.key.route = fields.route("route");
  entry.key.channels_per_group =
      fields.integer("channels_per_group", 1, std::numeric_limits<int64_t>::max());
  entry.key.x_dtype = fields.dtype("x_dtype");
  entry.key.y_dtype = fields.dtype("y_dtype");
  entry.config = fields.config("config");
  entry.microseconds = fields.positive("microseconds");
  entry.made = fields.text("made");
  if (!fields.ok) return {};
  return entry;
}

Json to_json(const TunerEntry& entry) {
  return {
      {"sm_count", entry.key.sm_count},
      {"driver_version", entry.key.driver_version},
      {"kernels", entry.key.kernels},
      {"route", to_string(entry.key.route)},
      {"channels_per_group", entry.key.channels_per_group},
      {"x_dtype", to_string(entry.key.x_dtype)},
      {"y_dtype", to_string(entry.key.y_dtype)},
      {"config",
       {{"threads", entry.config.threads}, {"vectors_in_flight", entry.config.vectors_in_flight}}},
      {"microseconds", entry.microseconds},
      {"made", entry.made}};
}

// What the text of a file says; the fault without the path.
TunerFileContents parse(const std::string& text, const std::optional<std::string>& gpu) {
  TunerFileContents contents;
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) {
    contents.fault = "is not a JSON object";
    return contents;
  }
  Fields fields{json};
  const std::string format = fields.text("format");
  const int64_t version = fields.integer("version", 0, std::numeric_limits<int>::max());
  if (!fields.ok || format != kFormat || version != kVersion) {
    contents.fault = "is not a tuner's file of version " + std::to_string(kVersion);
    return contents;
  }
  const std::string stored_gpu = fields.text("gpu");
  const Json* entries = fields.field("entries");
  if (!fields.ok || !entries->is_array()) {
    contents.fault = "lacks the name of the GPU or the list of entries";
    return contents;
  }
  contents.gpu = stored_gpu;
  if (gpu && as_stored(*gpu) != stored_gpu) {
    contents.fault = "was made for another GPU";
    return contents;
  }
  for (const Json& item : *entries) {
    if (auto entry = entry_from_json(item, gpu.value_or(stored_gpu))) {
      contents.entries.push_back(std::move(*entry));
    }
  }
  const size_t malformed = entries->size() - contents.entries.size();
  if (malformed > 0) {
    contents.fault = "has " + std::to_string(malformed) + " malformed of " +
                     std::to_string(entries->size()) + " entries";
  }
  return contents;
}

// The old entries and the new one, of which the key's is the new; the oldest dropped where they
// are too many.
Json merged(const std::vector<TunerEntry>& old_entries, const TunerEntry& entry) {
  std::map<TunerKey, TunerEntry, TunerKeyLess> by_key;
  for (const TunerEntry& old : old_entries) by_key[old.key] = old;
  by_key.erase(entry.key);
  while (by_key.size() >= kMaxTunerEntries) {
    by_key.erase(std::min_element(by_key.begin(), by_key.end(), [](const auto& a, const auto& b) {
      return a.second.made < b.second.made;  // ISO 8601 sorts by time
    }));
  }
  by_key[entry.key] = entry;
  Json entries = Json::array();
  for (const auto& [key, value] : by_key) entries.push_back(to_json(value));
  return {{"format", kFormat},
          {"version", kVersion},
          {"gpu", entry.key.gpu},
          {"entries", std::move(entries)}};
}

// Empty where directory cannot be read.
std::vector<fs::path> files_in(const fs::path& directory) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    found.push_back(it->path());
  }
  return found;
}

// What killed writers of the file left, where the lock is held.
std::vector<fs::path> unfinished_files(const fs::path& path) {
  std::vector<fs::path> found;
  for (const fs::path& other : files_in(path.parent_path())) {
    if (is_unfinished(other.filename().string(), path.filename().string())) found.push_back(other);
  }
  return found;
}

// The name of the tuner's file that name is of, is the lock of or an unfinished one for; empty
// for what is not ours.
std::string base_name(const std::string& name) {
  const std::string base = name.substr(0, name.rfind(kNameSuffix)) + kNameSuffix;
  const bool ours = name == base || name == base + kLockSuffix || is_unfinished(name, base);
  return ours && is_tuner_file_name(base) ? base : "";
}

std::string write_locked(const std::string& path, const TunerEntry& entry) {
  fs::create_directories(fs::path(path).parent_path());
  const FileLock lock(path + kLockSuffix, kLockPatience);
  if (lock.state() == FileLock::State::kFailed) {
    return quoted(path + kLockSuffix) + " " + lock.fault();
  }
  if (lock.state() == FileLock::State::kHeld) {
    for (const fs::path& leftover : unfinished_files(path)) ::remove(leftover.c_str());
  }
  // A fault of the old contents is no reason to stop: what can be read is kept, the rest replaced.
  const TunerFileContents old = read_tuner_file(path, entry.key.gpu);
  const std::string fault = replace_file(path, dump(merged(old.entries, entry)));
  return fault.empty() ? "" : quoted(path) + " " + fault;
}

void remove_into(const fs::path& path, RemovedTunerFiles& result) {
  std::error_code error;
  if (fs::remove(path, error)) result.paths.push_back(path.string());
  if (error) result.faults.push_back(quoted(path.string()) + ": " + error.message());
}

}  // namespace

std::string tuner_file_path(const std::string& directory, const std::string& gpu) {
  std::string name = gpu.substr(0, kMaxNameLength);
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !is_safe(c); }, '_');
  return (fs::path(directory) / (kNamePrefix + name + "-" + short_hash(gpu) + kNameSuffix))
      .string();
}

std::vector<std::string> tuner_files(const std::string& directory) {
  std::vector<std::string> found;
  for (const fs::path& path : files_in(directory)) {
    if (is_tuner_file_name(path.filename().string())) found.push_back(path.string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

TunerFileContents read_tuner_file(const std::string& path, const std::optional<std::string>& gpu) {
  TunerFileContents contents;
  try {
    std::string fault;
    const std::optional<std::string> text = read_file(path, kMaxTunerFileBytes, &fault);
    if (text) contents = parse(*text, gpu);
    if (!text) contents.fault = fault;
  } catch (const std::exception& error) {
    contents = {};
    contents.fault = std::string("cannot be read: ") + error.what();
  }
  if (!contents.fault.empty()) contents.fault = quoted(path) + " " + contents.fault;
  return contents;
}

std::string write_tuner_entry(const std::string& path, const TunerEntry& entry) {
  try {
    return write_locked(path, entry);
  } catch (const std::exception& error) {
    return quoted(path) + " cannot be written: " + error.what();
  }
}

RemovedTunerFiles remove_tuner_files(const std::string& directory) {
  RemovedTunerFiles result;
  try {
    std::set<std::string> paths;  // of the files, of which only a lock may be there
    for (const fs::path& path : files_in(directory)) {
      const std::string base = base_name(path.filename().string());
      if (!base.empty()) paths.insert((path.parent_path() / base).string());
    }
    for (const std::string& path : paths) {
      const FileLock lock(path + kLockSuffix, kLockPatience);
      if (lock.state() == FileLock::State::kFailed) {
        result.faults.push_back(quoted(path + kLockSuffix) + " " + lock.fault());
        continue;
      }
      remove_into(path, result);
      for (const fs::path& leftover : unfinished_files(path)) remove_into(leftover, result);
      remove_into(path + kLockSuffix, result);  // last: until then it keeps writers out
    }
  } catch (const std::exception& error) {
    result.faults.push_back(quoted(directory) + ": " + error.what());
  }
  return result;
}

}  // namespace gnsilu
