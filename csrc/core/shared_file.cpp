#include "shared_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <random>
#include <system_error>
#include <thread>

namespace gnsilu {
namespace {

constexpr const char* kUnfinishedSuffix = ".tmp";
constexpr size_t kUnfinishedDigits = 16;

std::string system_message(int error) { return std::generic_category().message(error); }

std::string random_hex() {
  std::random_device device;
  std::string digits;
  while (digits.size() < kUnfinishedDigits) digits += "0123456789abcdef"[device() % 16];
  return digits;
}

// False with errno set.
bool write_whole(int descriptor, const std::string& text) {
  size_t written = 0;
  while (written < text.size()) {
    const ssize_t n = ::write(descriptor, text.data() + written, text.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    written += static_cast<size_t>(n);
  }
  return ::fsync(descriptor) == 0 || errno == EINVAL || errno == ENOTSUP;  // cannot flush: go on
}

// The number of the error, 0 for success.
int write_new_file(const std::string& path, const std::string& text) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) return errno;
  const int write_error = write_whole(descriptor, text) ? 0 : errno;
  const int close_error = ::close(descriptor) == 0 ? 0 : errno;
  return write_error != 0 ? write_error : close_error;
}

}  // namespace

std::optional<std::string> read_file(const std::string& path, size_t max_bytes,
                                     std::string* fault) {
  // Not blocking: a pipe of that name must not hold the caller up.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    if (errno != ENOENT) *fault = "cannot be read: " + system_message(errno);
    return {};
  }
  struct stat status {};
  std::string text;
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    *fault = "is not a regular file";
  } else if (static_cast<uint64_t>(status.st_size) > max_bytes) {
    *fault = "has more than " + std::to_string(max_bytes) + " bytes";
  } else {
    text.resize(static_cast<size_t>(status.st_size));
    size_t size = 0;
    while (size < text.size()) {
      const ssize_t n = ::read(descriptor, text.data() + size, text.size() - size);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) *fault = "cannot be read: " + system_message(errno);
      if (n <= 0) break;
      size += static_cast<size_t>(n);
    }
    text.resize(size);
  }
  ::close(descriptor);
  if (!fault->empty()) return {};
  return text;
}

std::string replace_file(const std::string& path, const std::string& text) {
  const std::string unfinished = path + "." + random_hex() + kUnfinishedSuffix;
  int error = write_new_file(unfinished, text);
  if (error == 0 && ::rename(unfinished.c_str(), path.c_str()) != 0) {
    error = errno;
    if (error == EISDIR && ::rmdir(path.c_str()) == 0) {
      error = ::rename(unfinished.c_str(), path.c_str()) == 0 ? 0 : errno;
    }
  }
  if (error == 0) return "";
  if (error != EEXIST) ::unlink(unfinished.c_str());
  return "cannot be written: " + system_message(error);
}

bool is_unfinished(const std::string& name, const std::string& base) {
  const std::string prefix = base + ".";
  const std::string suffix = kUnfinishedSuffix;
  return name.size() == prefix.size() + kUnfinishedDigits + suffix.size() &&
         name.compare(0, prefix.size(), prefix) == 0 &&
         name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0 &&
         name.find_first_not_of("0123456789abcdef", prefix.size()) == name.size() - suffix.size();
}

FileLock::FileLock(const std::string& path, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  // Once more where the file was removed (remove_tuner_files) between opening and locking it: a
  // lock on a file that no other process can find excludes nobody.
  do {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!open_file(path) || !wait_for_lock(deadline)) return;
  } while (state_ == State::kHeld && !is_current(path));
}

FileLock::~FileLock() {
  if (descriptor_ < 0) return;
  // Unlocked on purpose, not only closed: a process forked meanwhile has this descriptor too.
  ::flock(descriptor_, LOCK_UN);
  ::close(descriptor_);
}

bool FileLock::open_file(const std::string& path) {
  state_ = State::kFailed;
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (descriptor_ < 0 && errno == EACCES) {  // another user's file: reading suffices for flock
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  }
  if (descriptor_ < 0) fault_ = "cannot be opened: " + system_message(errno);
  return descriptor_ >= 0;
}

bool FileLock::wait_for_lock(std::chrono::steady_clock::time_point deadline) {
  while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      state_ = State::kUnsupported;
      return true;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      fault_ = "is held by another process";
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  state_ = State::kHeld;
  return true;
}

bool FileLock::is_current(const std::string& path) const {
  struct stat opened {};
  struct stat found {};
  return ::fstat(descriptor_, &opened) == 0 && ::stat(path.c_str(), &found) == 0 &&
         opened.st_ino == found.st_ino && opened.st_dev == found.st_dev;
}

}  // namespace gnsilu
