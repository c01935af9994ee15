// The tuner with invented timers.
#include "tuner.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <future>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "temporary_folder.h"
#include "tuner_file.h"

namespace gnsilu {
namespace {

TunerKey key_of(int64_t channels_per_group, const std::string& gpu = "NVIDIA Invented") {
  TunerKey key;
  key.gpu = gpu;
  key.sm_count = 132;
  key.driver_version = 13000;
  key.kernels = kernel_version();
  key.channels_per_group = channels_per_group;
  return key;
}

Config last_candidate() { return candidates(Route::kThreePass).back(); }
Config default_config() { return candidates(Route::kThreePass).front(); }

// Counts its calls; `fast` takes 1 us, the others 2.
struct FakeTimer {
  Config fast = last_candidate();
  int calls = 0;

  CandidateTimer timer() {
    return [this](const Config& config) -> std::optional<double> {
      ++calls;
      return config == fast ? 1.0 : 2.0;
    };
  }
};

struct Warnings {
  std::vector<std::string> messages;
  std::function<void(const std::string&)> warn() {
    return [this](const std::string& message) { messages.push_back(message); };
  }
};

TEST(TunerKeyTest, HoldsWhatATimingDependsOn) {
  Problem problem;
  problem.samples = 3;
  problem.channels = 320;
  problem.num_groups = 32;
  problem.spatial_size = 4096;
  problem.x_dtype = DType::kFloat16;
  problem.y_dtype = DType::kFloat32;
  Device device;
  device.name = "NVIDIA H200";
  device.sm_count = 16;
  device.driver_version = 12080;
  const TunerKey key = tuner_key(problem, device, Route::kThreePass);
  EXPECT_EQ(key.gpu, "NVIDIA H200");
  EXPECT_EQ(key.sm_count, 16);
  EXPECT_EQ(key.driver_version, 12080);
  EXPECT_EQ(key.kernels, kernel_version());
  EXPECT_EQ(key.route, Route::kThreePass);
  EXPECT_EQ(key.channels_per_group, 10);
  EXPECT_EQ(key.x_dtype, DType::kFloat16);
  EXPECT_EQ(key.y_dtype, DType::kFloat32);

  problem.samples = 1;
  problem.spatial_size = 9;  // a new resolution is the same key
  EXPECT_EQ(tuner_key(problem, device, Route::kThreePass), key);

  // Each field tells keys apart.
  std::vector<TunerKey> others(8, key);
  others[0].gpu = "NVIDIA H100";
  others[1].sm_count = 132;
  others[2].driver_version = 13000;
  others[3].kernels = "other";
  others[4].route = Route::kFallback;
  others[5].channels_per_group = 11;
  others[6].x_dtype = DType::kBFloat16;
  others[7].y_dtype = DType::kFloat16;
  for (const TunerKey& other : others) {
    EXPECT_FALSE(other == key);
    EXPECT_NE(TunerKeyLess()(other, key), TunerKeyLess()(key, other));
  }
  EXPECT_FALSE(TunerKeyLess()(key, key));
}

TEST(TunerTest, RemembersTheFastestInMemory) {
  Tuner tuner("", nullptr);
  FakeTimer fake;
  EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);
  EXPECT_EQ(tuner.tune(key_of(4), fake.timer()), fake.fast);
  EXPECT_EQ(fake.calls, static_cast<int>(candidates(Route::kThreePass).size()));
  EXPECT_EQ(tuner.find(key_of(4)), fake.fast);
  EXPECT_EQ(tuner.find(key_of(8)), std::nullopt);
  const int calls = fake.calls;
  EXPECT_EQ(tuner.tune(key_of(4), fake.timer()), fake.fast);
  EXPECT_EQ(fake.calls, calls);
  tuner.clear();
  EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);
}

TEST(TunerTest, TheFirstOfEqualTimesWins) {
  Tuner tuner("", nullptr);
  EXPECT_EQ(tuner.tune(key_of(4), [](const Config&) { return 3.0; }), default_config());
}

TEST(TunerTest, PassesOverCandidatesWithoutAUsableTime) {
  const Config good = candidates(Route::kThreePass).back();
  const std::vector<std::optional<double>> unusable = {
      std::nullopt, std::nan(""), std::numeric_limits<double>::infinity(), 0.0, -1.0};
  for (const auto& bad : unusable) {
    Tuner tuner("", nullptr);
    const Config chosen = tuner.tune(key_of(4), [&](const Config& config) {
      return config == good ? std::optional<double>(1e6) : bad;
    });
    EXPECT_EQ(chosen, good);
  }
}

TEST(TunerTest, AllFailingGivesTheDefaultInMemoryOnly) {
  TemporaryFolder folder;
  Warnings warnings;
  Tuner tuner(folder.path(), warnings.warn());
  int calls = 0;
  const CandidateTimer failing = [&](const Config&) -> std::optional<double> {
    ++calls;
    return std::nullopt;
  };
  EXPECT_EQ(tuner.tune(key_of(4), failing), default_config());
  const int first = calls;
  EXPECT_EQ(tuner.find(key_of(4)), default_config());
  EXPECT_EQ(tuner.tune(key_of(4), failing), default_config());
  EXPECT_EQ(calls, first);
  EXPECT_EQ(folder.file_count(), 0u);
  EXPECT_TRUE(warnings.messages.empty());
}

TEST(TunerTest, AnExceptionEndsTheTuningAndLeavesNothingBehind) {
  TemporaryFolder folder;
  Tuner tuner(folder.path(), nullptr);
  int calls = 0;
  const CandidateTimer raising = [&](const Config&) -> std::optional<double> {
    if (++calls == 3) throw std::runtime_error("sticky");
    return 1.0;
  };
  EXPECT_THROW(tuner.tune(key_of(4), raising), std::runtime_error);
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);
  EXPECT_EQ(folder.file_count(), 0u);
  FakeTimer fake;  // the key is not taken for one that is being timed
  EXPECT_EQ(tuner.tune(key_of(4), fake.timer()), fake.fast);
}

TEST(TunerTest, BeginsNoCandidateOnceTheBudgetIsSpent) {
  Tuner tuner("", nullptr);
  int calls = 0;
  const CandidateTimer slow = [&](const Config&) {
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return 20000.0;
  };
  EXPECT_EQ(tuner.tune(key_of(4), slow, 0.010), default_config());
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(tuner.tune(key_of(5), slow, 0.0), default_config());
  EXPECT_EQ(tuner.tune(key_of(6), slow, std::nan("")), default_config());
  EXPECT_EQ(calls, 1);
}

TEST(TunerTest, ARouteWithoutCandidatesIsNotTimed) {
  Tuner tuner("", nullptr);
  TunerKey key = key_of(4);
  key.route = Route::kFallback;
  FakeTimer fake;
  EXPECT_EQ(tuner.tune(key, fake.timer()), Config());
  EXPECT_EQ(fake.calls, 0);
}

TEST(TunerTest, AnotherThreadGetsTheDefaultMeanwhile) {
  Tuner tuner("", nullptr);
  std::promise<void> begun;
  std::promise<void> go_on;
  std::shared_future<void> may_go_on = go_on.get_future().share();
  bool first = true;
  auto tuning = std::async(std::launch::async, [&] {
    return tuner.tune(
        key_of(4),
        [&](const Config& config) {
          if (first) begun.set_value();
          first = false;
          may_go_on.wait();
          return config == last_candidate() ? 1.0 : 2.0;
        },
        1000);
  });
  begun.get_future().wait();
  FakeTimer other;
  EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);
  EXPECT_EQ(tuner.tune(key_of(4), other.timer()), default_config());
  EXPECT_EQ(other.calls, 0);
  EXPECT_EQ(tuner.tune(key_of(8), other.timer()), other.fast);  // other keys do not wait
  go_on.set_value();
  EXPECT_EQ(tuning.get(), last_candidate());
  EXPECT_EQ(tuner.find(key_of(4)), last_candidate());
}

TEST(TunerTest, ThreadsFindTuneAndClear) {
  TemporaryFolder folder;
  Tuner tuner(folder.path(), nullptr);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        const TunerKey key = key_of(1 + i % 5);
        const Config config = tuner.tune(
            key, [](const Config& c) { return c == last_candidate() ? 1.0 : 2.0; }, 1000);
        if (!(config == last_candidate() || config == default_config())) ++wrong;
        const auto found = tuner.find(key);
        if (found && !(*found == last_candidate())) ++wrong;
        if (t == 0 && i % 20 == 19) tuner.clear();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(read_tuner_file(tuner_file_path(folder.path(), key_of(1).gpu)).entries.size(), 5u);
}

TEST(TunerTest, AChildForkedWhileThreadsUseTheTunerGoesOn) {
  TemporaryFolder folder;
  Tuner tuner(folder.path(), nullptr);
  std::atomic<bool> stop{false};
  std::promise<void> begun;
  bool first = true;
  tuner.find(key_of(1));  // reads the file, so that the children's entries are not found below
  // One thread holds the mutex again and again, another is in the middle of timing key 7.
  std::thread finding([&] {
    while (!stop) tuner.find(key_of(1));
  });
  std::thread timing([&] {
    tuner.tune(
        key_of(7),
        [&](const Config&) {
          if (first) begun.set_value();
          first = false;
          while (!stop) std::this_thread::yield();
          return 1.0;
        },
        1000);
  });
  begun.get_future().wait();
  for (int i = 0; i < 50; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);  // ends a child that waits for ever
      FakeTimer fake;
      tuner.find(key_of(1));
      const bool good = tuner.tune(key_of(7), fake.timer(), 1000) == fake.fast && fake.calls > 0;
      tuner.clear();
      _exit(good && tuner.find(key_of(7)) == fake.fast ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "the child was ended by signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
    if (testing::Test::HasFailure()) break;
    std::filesystem::remove(tuner_file_path(folder.path(), key_of(7).gpu));
  }
  stop = true;
  finding.join();
  timing.join();
}

TEST(TunerTest, ASecondTunerFindsItInTheFile) {
  TemporaryFolder folder;
  Warnings warnings;
  FakeTimer fake;
  Tuner(folder.path(), warnings.warn()).tune(key_of(4), fake.timer());
  const int calls = fake.calls;
  Tuner second(folder.path(), warnings.warn());
  EXPECT_EQ(second.find(key_of(4)), fake.fast);
  EXPECT_EQ(second.tune(key_of(4), fake.timer()), fake.fast);
  EXPECT_EQ(fake.calls, calls);
  EXPECT_TRUE(warnings.messages.empty());

  // Another driver, other kernels, a slice of the GPU, another GPU: not that one's timing.
  std::vector<TunerKey> others(4, key_of(4));
  others[0].driver_version = 12000;
  others[1].kernels = "older";
  others[2].sm_count = 16;
  others[3].gpu = "NVIDIA Other";
  for (const TunerKey& other : others) {
    EXPECT_EQ(Tuner(folder.path(), warnings.warn()).find(other), std::nullopt);
    Tuner(folder.path(), warnings.warn()).tune(other, fake.timer());
  }
  EXPECT_EQ(Tuner(folder.path(), warnings.warn()).find(key_of(4)), fake.fast);
  EXPECT_EQ(tuner_files(folder.path()).size(), 2u);
  EXPECT_TRUE(warnings.messages.empty());
}

TEST(TunerTest, TheFileIsReadOnceAndAgainAfterClear) {
  TemporaryFolder folder;
  Tuner tuner(folder.path(), nullptr);
  EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);
  FakeTimer fake;
  Tuner(folder.path(), nullptr).tune(key_of(4), fake.timer());
  EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);  // a miss stays one: no file access a call
  tuner.clear();
  EXPECT_EQ(tuner.find(key_of(4)), fake.fast);
}

TEST(TunerTest, EntriesOutsideTheCandidatesAreNeverReturned) {
  TemporaryFolder folder;
  Warnings warnings;
  const std::string path = tuner_file_path(folder.path(), key_of(4).gpu);
  for (const Config& config :
       {Config{96, 4}, Config{1024, 4}, Config{256, 1000}, Config{256, 1 << 30}, Config{256, 3}}) {
    ASSERT_FALSE(is_candidate(Route::kThreePass, config));
    ASSERT_EQ(write_tuner_entry(path, {key_of(4), config, 0.001, "2026-01-31T12:00:00Z"}), "");
    Tuner tuner(folder.path(), warnings.warn());
    EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);
    FakeTimer fake;
    EXPECT_EQ(tuner.tune(key_of(4), fake.timer()), fake.fast);
    EXPECT_EQ(Tuner(folder.path(), warnings.warn()).find(key_of(4)), fake.fast);
  }
  EXPECT_TRUE(warnings.messages.empty());
}

TEST(TunerTest, ACorruptFileGivesOneWarningAndIsHealed) {
  TemporaryFolder folder;
  Warnings warnings;
  const std::string path = tuner_file_path(folder.path(), key_of(4).gpu);
  write_text(path, "{\"format\": \"gnsilu tu");
  Tuner tuner(folder.path(), warnings.warn());
  EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);
  EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);
  tuner.clear();
  EXPECT_EQ(tuner.find(key_of(4)), std::nullopt);
  ASSERT_EQ(warnings.messages.size(), 1u);
  EXPECT_NE(warnings.messages[0].find(path), std::string::npos) << warnings.messages[0];
  FakeTimer fake;
  EXPECT_EQ(tuner.tune(key_of(4), fake.timer()), fake.fast);
  EXPECT_EQ(warnings.messages.size(), 1u);
  EXPECT_EQ(read_tuner_file(path).fault, "");
}

TEST(TunerTest, AnUnwritableFolderGivesOneWarningAndMemoryServes) {
  TemporaryFolder folder;
  Warnings warnings;
  const std::string directory = folder.path() + "/a file";
  write_text(directory, "mine");
  Tuner tuner(directory, warnings.warn());
  FakeTimer fake;
  for (int64_t channels_per_group : {4, 8, 10}) {
    EXPECT_EQ(tuner.tune(key_of(channels_per_group), fake.timer()), fake.fast);
    EXPECT_EQ(tuner.find(key_of(channels_per_group)), fake.fast);
  }
  ASSERT_EQ(warnings.messages.size(), 1u);
  EXPECT_NE(warnings.messages[0].find(directory), std::string::npos) << warnings.messages[0];
  EXPECT_EQ(read_text(directory), "mine");
}

}  // namespace
}  // namespace gnsilu
