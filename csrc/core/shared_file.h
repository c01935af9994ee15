// A small file that several processes read and rewrite: bounded reading, an advisory lock, and
// replacing it as a whole. POSIX. Faults come back as text, with the reason the system gives.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

namespace gnsilu {

// The whole of a regular file of at most max_bytes. Nothing, and no fault, where there is none.
std::optional<std::string> read_file(const std::string& path, size_t max_bytes, std::string* fault);

// Writes text to a new file beside path, flushes it to disk and renames it to path. An empty
// folder of that name gives way. Returns the fault, empty when path holds text; a file that could
// not be finished is removed.
std::string replace_file(const std::string& path, const std::string& text);

// Whether name is that of a new file that replace_file makes for base (names without a folder).
// One that is still there while nobody holds the lock belonged to a writer that was killed.
bool is_unfinished(const std::string& name, const std::string& base);

// Holds an exclusive flock on a file, made where missing and left there. The system releases it
// when the process dies.
class FileLock {
 public:
  enum class State {
    kHeld,
    kUnsupported,  // the file system has no locks
    kFailed,       // see fault()
  };

  // Waits at most `patience` for another holder.
  FileLock(const std::string& path, std::chrono::milliseconds patience);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  State state() const { return state_; }
  const std::string& fault() const { return fault_; }

 private:
  bool open_file(const std::string& path);
  // False when time is up.
  bool wait_for_lock(std::chrono::steady_clock::time_point deadline);
  bool is_current(const std::string& path) const;

  int descriptor_ = -1;
  State state_ = State::kFailed;
  std::string fault_;
};

}  // namespace gnsilu
