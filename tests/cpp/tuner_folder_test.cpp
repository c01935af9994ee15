// The folder of the tuner's files: their names, and removing them.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "temporary_folder.h"
#include "tuner_entries.h"
#include "tuner_file.h"

namespace gnsilu {
namespace {

namespace fs = std::filesystem;

class TunerFolderTest : public testing::Test {
 protected:
  std::string path() const { return tuner_file_path(folder_.path(), kGpu); }

  TemporaryFolder folder_;
};

TEST_F(TunerFolderTest, AnyNameOfAGpuHasItsOwnFile) {
  const std::vector<std::string> names = {"NVIDIA RTX 6000",
                                          "NVIDIA_RTX_6000",
                                          "NVIDIA/RTX/6000",
                                          "../../etc/passwd",
                                          "..",
                                          "",
                                          "NVIDIA RTX 6000 Größe",
                                          "\xff\xfe",
                                          "\xfe\xff",
                                          std::string("a\0b", 3),
                                          std::string(5000, 'x'),
                                          std::string(5001, 'x')};
  std::set<std::string> paths;
  for (const std::string& name : names) {
    SCOPED_TRACE(name.substr(0, 40));
    const fs::path file = tuner_file_path(folder_.path(), name);
    EXPECT_EQ(file.parent_path(), folder_.path());
    EXPECT_EQ(file.filename().string().find_first_not_of(
                  "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."),
              std::string::npos);
    paths.insert(file.string());
    ASSERT_EQ(write_tuner_entry(file.string(), entry_of(4, name)), "");
    ASSERT_EQ(write_tuner_entry(file.string(), entry_of(8, name)), "");
    const TunerFileContents contents = read_tuner_file(file.string(), name);
    EXPECT_EQ(contents.fault, "");
    ASSERT_EQ(contents.entries.size(), 2u);
    EXPECT_EQ(contents.entries[0].key.gpu, name);
  }
  EXPECT_EQ(paths.size(), names.size());
  EXPECT_EQ(tuner_files(folder_.path()), std::vector<std::string>(paths.begin(), paths.end()));
}

TEST_F(TunerFolderTest, RemovesOnlyItsOwnFiles) {
  ASSERT_EQ(write_tuner_entry(path(), entry_of(4)), "");
  const std::string lock_alone = tuner_file_path(folder_.path(), "NVIDIA Gone") + ".lock";
  const std::string unfinished = path() + ".0123456789abcdef.tmp";
  write_text(lock_alone, "");
  write_text(unfinished, "half");
  const std::vector<std::string> foreign = {
      "notes.txt",       "tuner-.json",
      "tuner-mine.json", "tuner-x-0123456z.json",
      "x.lock",          fs::path(path()).filename().string() + ".bak"};
  for (const std::string& name : foreign) write_text(folder_.path() + "/" + name, "mine");
  const RemovedTunerFiles removed = remove_tuner_files(folder_.path());
  EXPECT_TRUE(removed.faults.empty());
  EXPECT_EQ(std::set<std::string>(removed.paths.begin(), removed.paths.end()),
            (std::set<std::string>{path(), path() + ".lock", lock_alone, unfinished}));
  EXPECT_EQ(folder_.file_count(), foreign.size());
  EXPECT_TRUE(remove_tuner_files(folder_.path()).paths.empty());
  EXPECT_TRUE(remove_tuner_files(folder_.path() + "/missing").paths.empty());
}

TEST_F(TunerFolderTest, RemovingWhileOthersWriteDoesNoHarm) {
  std::atomic<bool> done{false};
  std::atomic<int> faults{0};
  std::thread remover([&] {
    while (!done) {
      if (!remove_tuner_files(folder_.path()).faults.empty()) ++faults;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < 3; ++t) {
    writers.emplace_back([&, t] {
      for (int i = 0; i < 30; ++i) {
        if (!write_tuner_entry(path(), entry_of(1 + 30 * t + i)).empty()) ++faults;
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  done = true;
  remover.join();
  EXPECT_EQ(faults, 0);
  EXPECT_EQ(read_tuner_file(path(), kGpu).fault, "");
}

}  // namespace
}  // namespace gnsilu
