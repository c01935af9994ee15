// The tuner's file: JSON, one per GPU model, shared by processes.
//
//   {"format": "gnsilu tuner", "version": 1, "gpu": "NVIDIA H200", "entries": [{
//      "sm_count": 132, "driver_version": 13000, "kernels": "1f0c…", "route": "three_pass",
//      "channels_per_group": 8, "x_dtype": "bfloat16", "y_dtype": "bfloat16",
//      "config": {"threads": 128, "vectors_in_flight": 8},
//      "microseconds": 512.3, "made": "2026-01-31T12:00:00Z"}]}
//
// A writer takes an advisory lock (a file beside it, released by the system when its process
// dies), reads, merges, writes a unique temporary file, flushes it to disk and renames it over:
// a reader sees the old file or the new one, never a part, and no writer loses another's entry.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tuner.h"

namespace gnsilu {

// A writer that would exceed either drops the oldest entries; a larger file is not read.
constexpr size_t kMaxTunerEntries = 1000;
constexpr size_t kMaxTunerFileBytes = size_t{4} << 20;

struct TunerFileContents {
  std::string gpu;                  // as the file says it; empty where it could not be read
  std::vector<TunerEntry> entries;  // well-formed ones only
  std::string fault;  // the path, and why the file or a part was ignored; empty when fine
};

// The file of a GPU model in directory: its name made safe (letters, digits, '-', '_'; others
// replaced, and a short hash of the whole name added so that two names never share a file).
std::string tuner_file_path(const std::string& directory, const std::string& gpu);

// The files of directory that tuner_file_path could have named, sorted.
std::vector<std::string> tuner_files(const std::string& directory);

// A missing file is empty without fault. With gpu, a file made for another one is a fault.
// Never throws.
TunerFileContents read_tuner_file(const std::string& path,
                                  const std::optional<std::string>& gpu = {});

// Adds entry, replacing the one of an equal key. Returns the fault, empty when it is on disk.
// A corrupt, foreign or unknown-version file is replaced. Never throws.
std::string write_tuner_entry(const std::string& path, const TunerEntry& entry);

struct RemovedTunerFiles {
  std::vector<std::string> paths;   // what was removed
  std::vector<std::string> faults;  // what could not be, and why
};

// Removes the tuner's files of directory, the lock files and what killed writers left included,
// and nothing else. Never throws.
RemovedTunerFiles remove_tuner_files(const std::string& directory);

}  // namespace gnsilu
