// The tuner's file: what it accepts, what it heals, and several writers at once.
#include "tuner_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "temporary_folder.h"
#include "tuner_entries.h"

namespace gnsilu {
namespace {

namespace fs = std::filesystem;

class TunerFileTest : public testing::Test {
 protected:
  std::string path() const { return tuner_file_path(folder_.path(), kGpu); }

  // A file of one good entry as JSON, to be spoilt.
  nlohmann::json good_file() {
    EXPECT_EQ(write_tuner_entry(path(), entry_of(4)), "");
    return nlohmann::json::parse(read_text(path()));
  }

  // The file counts as absent, says so naming itself, and the next write replaces it.
  void expect_ignored_and_healed() {
    TunerFileContents contents = read_tuner_file(path(), kGpu);
    EXPECT_TRUE(contents.entries.empty());
    EXPECT_NE(contents.fault.find(path()), std::string::npos) << contents.fault;
    EXPECT_EQ(write_tuner_entry(path(), entry_of(8)), "");
    contents = read_tuner_file(path(), kGpu);
    EXPECT_EQ(contents.fault, "");
    ASSERT_EQ(contents.entries.size(), 1u);
    EXPECT_EQ(contents.entries[0].key, entry_of(8).key);
    EXPECT_EQ(folder_.file_count(), 2u);  // the file and its lock: nothing left over
  }

  TemporaryFolder folder_;
};

TEST_F(TunerFileTest, AMissingFileIsEmptyWithoutFault) {
  EXPECT_EQ(read_tuner_file(path(), kGpu).fault, "");
  EXPECT_EQ(read_tuner_file("/no/such/folder/tuner.json", kGpu).fault, "");
  EXPECT_TRUE(read_tuner_file(path(), kGpu).entries.empty());
}

TEST_F(TunerFileTest, AnEntryComesBackWhole) {
  ASSERT_EQ(write_tuner_entry(path(), entry_of(4)), "");
  for (const TunerFileContents& contents :
       {read_tuner_file(path(), kGpu), read_tuner_file(path())}) {
    EXPECT_EQ(contents.fault, "");
    EXPECT_EQ(contents.gpu, kGpu);
    ASSERT_EQ(contents.entries.size(), 1u);
    EXPECT_EQ(contents.entries[0].key, entry_of(4).key);
    EXPECT_EQ(contents.entries[0].config, entry_of(4).config);
    EXPECT_EQ(contents.entries[0].microseconds, 512.25);
    EXPECT_EQ(contents.entries[0].made, "2026-01-31T12:00:00Z");
  }
}

TEST_F(TunerFileTest, AddsAndReplacesByKey) {
  ASSERT_EQ(write_tuner_entry(path(), entry_of(4)), "");
  TunerEntry other_driver = entry_of(4);
  other_driver.key.driver_version = 12000;
  ASSERT_EQ(write_tuner_entry(path(), other_driver), "");
  TunerEntry other_kernels = entry_of(4);
  other_kernels.key.kernels = "older";
  ASSERT_EQ(write_tuner_entry(path(), other_kernels), "");
  TunerEntry again = entry_of(4);
  again.config = {512, 8};
  ASSERT_EQ(write_tuner_entry(path(), again), "");
  const TunerFileContents contents = read_tuner_file(path(), kGpu);
  ASSERT_EQ(contents.entries.size(), 3u);
  for (const TunerEntry& entry : contents.entries) {
    EXPECT_EQ(entry.config, entry.key == again.key ? again.config : entry_of(4).config);
  }
}

TEST_F(TunerFileTest, MakesItsFolder) {
  const std::string deep = folder_.path() + "/a/b c/d";
  ASSERT_EQ(write_tuner_entry(tuner_file_path(deep, kGpu), entry_of(4)), "");
  EXPECT_EQ(tuner_files(deep).size(), 1u);
}

TEST_F(TunerFileTest, TextThatIsNoTunerFile) {
  const std::string good = good_file().dump();
  std::vector<std::string> texts = {"",
                                    "\n",
                                    "[]",
                                    "null",
                                    "17",
                                    "{}",
                                    "\"gnsilu tuner\"",
                                    std::string("\0\xff\x80\x00{", 5),
                                    std::string(100000, '['),
                                    good + good,
                                    "{\"format\": \"gnsilu tuner\", \"version\": 1}",
                                    "{\"format\": \"gnsilu tuner\", \"version\": 1e999}",
                                    "{\"format\": \"gnsilu tuner\", \"gpu\": \"\xff\"}"};
  for (size_t size = 1; size < good.size(); size += 7) texts.push_back(good.substr(0, size));
  for (const std::string& text : texts) {
    SCOPED_TRACE(text.substr(0, 200));
    write_text(path(), text);
    expect_ignored_and_healed();
  }
}

TEST_F(TunerFileTest, AHeadThatIsNotOurs) {
  const nlohmann::json good = good_file();
  const std::vector<std::pair<std::string, nlohmann::json>> changes = {
      {"version", 2},          {"version", 0},      {"version", "1"},
      {"version", 1.0},        {"version", -1},     {"version", 18446744073709551615ull},
      {"format", "other"},     {"format", 1},       {"format", nullptr},
      {"gpu", "NVIDIA Other"}, {"gpu", 7},          {"gpu", nullptr},
      {"entries", nullptr},    {"entries", "none"}, {"entries", nlohmann::json::object()}};
  for (const auto& [name, value] : changes) {
    SCOPED_TRACE(name + " = " + value.dump());
    nlohmann::json spoilt = good;
    spoilt[name] = value;
    write_text(path(), spoilt.dump());
    expect_ignored_and_healed();
  }
}

TEST_F(TunerFileTest, MalformedEntries) {
  const nlohmann::json good = good_file();
  const int64_t too_large = int64_t{1} << 31;
  const std::vector<std::pair<std::string, nlohmann::json>> changes = {
      {"/config/threads", 3},
      {"/config/threads", too_large},
      {"/config/threads", 0},
      {"/config/threads", -256},
      {"/config/threads", 2048},
      {"/config/threads", 256.0},
      {"/config/threads", "256"},
      {"/config/threads", 18446744073709551615ull},
      {"/config/threads", true},
      {"/config/vectors_in_flight", 0},
      {"/config/vectors_in_flight", too_large},
      {"/config/vectors_in_flight", -1},
      {"/config/vectors_in_flight", nullptr},
      {"/config", nullptr},
      {"/config", nlohmann::json::array({256, 4})},
      {"/microseconds", 0},
      {"/microseconds", -3.5},
      {"/microseconds", "NaN"},
      {"/microseconds", nullptr},
      {"/route", "four_pass"},
      {"/route", 1},
      {"/x_dtype", "int8"},
      {"/y_dtype", 2},
      {"/channels_per_group", 0},
      {"/channels_per_group", 18446744073709551615ull},
      {"/channels_per_group", 4.5},
      {"/sm_count", 0},
      {"/driver_version", "13000"},
      {"/kernels", 5},
      {"/made", 20260131}};
  for (const auto& [field, value] : changes) {
    SCOPED_TRACE(field + " = " + value.dump());
    nlohmann::json spoilt = good;
    spoilt["entries"][0][nlohmann::json::json_pointer(field)] = value;
    write_text(path(), spoilt.dump());
    expect_ignored_and_healed();
  }
  for (const nlohmann::json& item : {nlohmann::json(), nlohmann::json(5), nlohmann::json("x"),
                                     nlohmann::json::array(), nlohmann::json::object()}) {
    SCOPED_TRACE(item.dump());
    nlohmann::json spoilt = good;
    spoilt["entries"][0] = item;
    write_text(path(), spoilt.dump());
    expect_ignored_and_healed();
  }
  for (const auto& field : good["entries"][0].items()) {
    SCOPED_TRACE("without " + field.key());
    nlohmann::json spoilt = good;
    spoilt["entries"][0].erase(field.key());
    write_text(path(), spoilt.dump());
    expect_ignored_and_healed();
  }
  std::string not_a_number = good.dump();  // no JSON at all, though some writers make it
  not_a_number.replace(not_a_number.find("512.25"), 6, "NaN");
  write_text(path(), not_a_number);
  expect_ignored_and_healed();
}

TEST_F(TunerFileTest, GoodEntriesBesideAMalformedOneAreKept) {
  nlohmann::json file = good_file();
  file["entries"].push_back(5);
  write_text(path(), file.dump());
  TunerFileContents contents = read_tuner_file(path(), kGpu);
  EXPECT_EQ(contents.entries.size(), 1u);
  EXPECT_NE(contents.fault.find("1 malformed of 2"), std::string::npos) << contents.fault;
  ASSERT_EQ(write_tuner_entry(path(), entry_of(8)), "");
  contents = read_tuner_file(path(), kGpu);
  EXPECT_EQ(contents.entries.size(), 2u);
  EXPECT_EQ(contents.fault, "");
}

TEST_F(TunerFileTest, AHugeFileIsNotRead) {
  write_text(path(), good_file().dump());
  fs::resize_file(path(), std::uintmax_t{1} << 40);  // sparse
  expect_ignored_and_healed();
}

TEST_F(TunerFileTest, SomethingElseOfThatName) {
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);  // must not be waited for
  expect_ignored_and_healed();
  fs::remove(path());
  fs::create_directory(path());
  expect_ignored_and_healed();
  fs::remove(path());
  fs::create_symlink(path(), path());  // a loop
  expect_ignored_and_healed();
  fs::remove(path());
  fs::create_symlink("/dev/zero", path());
  expect_ignored_and_healed();
}

TEST_F(TunerFileTest, AFullFolderOfThatNameIsLeftAlone) {
  fs::create_directory(path());
  write_text(path() + "/mine", "mine");
  const std::string fault = write_tuner_entry(path(), entry_of(4));
  EXPECT_NE(fault.find(path()), std::string::npos) << fault;
  EXPECT_NE(read_tuner_file(path(), kGpu).fault, "");
  EXPECT_EQ(read_text(path() + "/mine"), "mine");
  EXPECT_EQ(folder_.file_count(), 2u);  // the folder and the lock
}

TEST_F(TunerFileTest, AFolderThatCannotBe) {
  write_text(folder_.path() + "/file", "mine");
  for (const std::string& directory : {folder_.path() + "/file", folder_.path() + "/file/below",
                                       std::string("/proc/gnsilu"), std::string("/dev/null/x")}) {
    const std::string fault = write_tuner_entry(tuner_file_path(directory, kGpu), entry_of(4));
    EXPECT_NE(fault.find(directory), std::string::npos) << fault;
  }
}

TEST_F(TunerFileTest, ALockThatIsHeldOrCannotBe) {
  fs::create_directory(path() + ".lock");
  EXPECT_NE(write_tuner_entry(path(), entry_of(4)), "");
  fs::remove(path() + ".lock");

  const int descriptor = ::open((path() + ".lock").c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_EQ(::flock(descriptor, LOCK_EX), 0);
  const std::string fault = write_tuner_entry(path(), entry_of(4));  // waits its 5 s
  EXPECT_NE(fault.find("held by another process"), std::string::npos) << fault;
  EXPECT_FALSE(fs::exists(path()));
  ::close(descriptor);
  EXPECT_EQ(write_tuner_entry(path(), entry_of(4)), "");
}

TEST_F(TunerFileTest, WhatKilledWritersLeftGoesAway) {
  ASSERT_EQ(write_tuner_entry(path(), entry_of(4)), "");
  const std::string other = tuner_file_path(folder_.path(), "NVIDIA Other");
  write_text(path() + ".0123456789abcdef.tmp", "half");
  write_text(path() + ".fedcba9876543210.tmp", "");
  write_text(other + ".0123456789abcdef.tmp", "another writer's");
  write_text(path() + ".notes.tmp", "mine");
  ASSERT_EQ(write_tuner_entry(path(), entry_of(8)), "");
  EXPECT_FALSE(fs::exists(path() + ".0123456789abcdef.tmp"));
  EXPECT_FALSE(fs::exists(path() + ".fedcba9876543210.tmp"));
  EXPECT_TRUE(fs::exists(other + ".0123456789abcdef.tmp"));
  EXPECT_TRUE(fs::exists(path() + ".notes.tmp"));
}

TEST_F(TunerFileTest, WritersInThreadsLoseNothing) {
  constexpr int kThreads = 4;
  constexpr int kEach = 25;
  std::atomic<bool> done{false};
  std::atomic<int> faults{0};
  std::vector<std::thread> writers;
  for (int t = 0; t < kThreads; ++t) {
    writers.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        if (!write_tuner_entry(path(), entry_of(1 + t * kEach + i)).empty()) ++faults;
      }
    });
  }
  std::thread reader([&] {
    while (!done) {
      if (!read_tuner_file(path(), kGpu).fault.empty()) ++faults;
    }
  });
  for (std::thread& writer : writers) writer.join();
  done = true;
  reader.join();
  EXPECT_EQ(faults, 0);
  EXPECT_EQ(read_tuner_file(path(), kGpu).entries.size(), size_t{kThreads * kEach});
  EXPECT_EQ(folder_.file_count(), 2u);
}

TEST_F(TunerFileTest, TheOldestEntriesGiveWay) {
  nlohmann::json file = good_file();
  nlohmann::json item = file["entries"][0];
  file["entries"].clear();
  for (size_t i = 0; i < kMaxTunerEntries; ++i) {
    item["channels_per_group"] = i + 1;
    item["made"] = i == 500 ? "2025-06-01T00:00:00Z" : "2026-01-01T00:00:00Z";
    file["entries"].push_back(item);
  }
  write_text(path(), file.dump());
  ASSERT_EQ(write_tuner_entry(path(), entry_of(5000)), "");
  std::set<int64_t> left;
  for (const TunerEntry& entry : read_tuner_file(path(), kGpu).entries) {
    left.insert(entry.key.channels_per_group);
  }
  EXPECT_EQ(left.size(), kMaxTunerEntries);
  EXPECT_EQ(left.count(501), 0u);
  EXPECT_EQ(left.count(5000), 1u);
}

}  // namespace
}  // namespace gnsilu
