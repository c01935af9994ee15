#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "tuner.h"

#ifndef _WIN32
#include <pwd.h>
#include <unistd.h>

#include <vector>
#endif

namespace gnsilu {
namespace {

namespace fs = std::filesystem;

fs::path environment_path(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? fs::path() : fs::path(value);
}

#ifndef _WIN32
// The user's home, empty where there is no such folder (accounts of services name one that does
// not exist, and making it is not our business).
fs::path home_directory() {
  fs::path home = environment_path("HOME");
  if (home.empty()) {
    passwd record{};
    passwd* found = nullptr;
    std::vector<char> buffer(size_t{1} << 14);
    if (getpwuid_r(getuid(), &record, buffer.data(), buffer.size(), &found) == 0 &&
        found != nullptr) {
      home = found->pw_dir;
    }
  }
  std::error_code error;
  return home.is_absolute() && fs::is_directory(home, error) ? home : fs::path();
}
#endif

fs::path user_cache_directory() {
#ifdef _WIN32
  return environment_path("LOCALAPPDATA");
#else
#ifdef __APPLE__
  const char* below_home = "Library/Caches";
#else
  const char* below_home = ".cache";
  // The XDG specification wants a relative one ignored.
  const fs::path xdg = environment_path("XDG_CACHE_HOME");
  if (xdg.is_absolute()) return xdg;
#endif
  const fs::path home = home_directory();
  return home.empty() ? fs::path() : home / below_home;
#endif
}

}  // namespace

std::string cache_directory() {
  const fs::path chosen = environment_path("GNSILU_CACHE_DIR");
  if (!chosen.empty()) return chosen.string();
  const fs::path cache = user_cache_directory();
  return cache.empty() ? "" : (cache / "gnsilu").string();
}

}  // namespace gnsilu
