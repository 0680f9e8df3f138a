#include "run.h"

#include <csignal>
#include <filesystem>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/journal.h"
#include "driver/fake_driver.h"
#include "help.h"
#include "tests/fakes/child.h"

namespace stasis::compat {
namespace {

using fakes::Child;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

struct Outcome {
  int status = 0;
  std::string out;
  std::string err;
};

class RunTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/stasis-run-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    state_dir_ = name;
    ::setenv("STASIS_STATE_DIR", name, 1);
    driver_.add(pid());
  }
  void TearDown() override { std::filesystem::remove_all(state_dir_); }

  Pid pid() const { return child_.pid(); }
  std::string number() const { return std::to_string(pid().value); }

  Outcome carry_out(Options options) {
    if (options.pid_text.empty()) {
      options.pid = pid();
      options.pid_text = number();
    }
    char* out = nullptr;
    char* err = nullptr;
    std::size_t out_size = 0;
    std::size_t err_size = 0;
    const Streams streams{::open_memstream(&out, &out_size), ::open_memstream(&err, &err_size)};
    Outcome outcome;
    outcome.status = compat::carry_out(options, driver_, *interrupt_, streams);
    std::fclose(streams.out);
    std::fclose(streams.err);
    outcome.out.assign(out, out_size);
    outcome.err.assign(err, err_size);
    std::free(out);
    std::free(err);
    return outcome;
  }
  Outcome act(Action action) {
    Options options;
    options.operation = Operation::kAction;
    options.action = action;
    return carry_out(std::move(options));
  }
  Outcome perform(Operation operation) {
    Options options;
    options.operation = operation;
    return carry_out(std::move(options));
  }
  void forget_all() const {
    for (const auto& entry : std::filesystem::directory_iterator(state_dir_))
      std::filesystem::remove(entry.path());
  }
  std::size_t journal_records() const {
    auto entries = read_journal();
    return entries ? entries->size() : 99;
  }

  Child child_;
  FakeDriver driver_;
  // A new one for each run that a signal may end.
  std::unique_ptr<Interrupt> interrupt_ = std::make_unique<Interrupt>();
  std::string state_dir_;
};

TEST_F(RunTest, AnswersAreExactAndAloneOnStandardOutput) {
  for (const auto& [state, name] :
       {std::pair{CudaState::kRunning, "running\n"}, std::pair{CudaState::kLocked, "locked\n"},
        std::pair{CudaState::kCheckpointed, "checkpointed\n"}}) {
    driver_.add(pid(), state);
    const Outcome outcome = perform(Operation::kGetState);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.out, name);
    EXPECT_EQ(outcome.err, "");
  }
  EXPECT_EQ(perform(Operation::kGetRestoreTid).out, fmt::format("{}\n", pid().value));
}

TEST_F(RunTest, EachActionIsSilentAndStops) {
  for (const auto& [action, after] : {std::pair{Action::kLock, CudaState::kLocked},
                                      std::pair{Action::kCheckpoint, CudaState::kCheckpointed},
                                      std::pair{Action::kRestore, CudaState::kLocked},
                                      std::pair{Action::kUnlock, CudaState::kRunning}}) {
    const Outcome outcome = act(action);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.out + outcome.err, "");
    EXPECT_EQ(driver_.state_of(pid()), after);
  }
}

TEST_F(RunTest, WrongStateIsSaidInTheDriversWords) {
  const Outcome outcome = act(Action::kUnlock);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, StartsWith("Could not unlock on process ID " + number() +
                                      ": \"the operation cannot be performed in the present "
                                      "state\"\nreason: process "));
  EXPECT_THAT(outcome.err, HasSubstr("\nhint: "));
  EXPECT_THAT(driver_.actions(), IsEmpty());
}

TEST_F(RunTest, WithoutCudaItIsAnInitialisationError) {
  driver_.remove(pid());
  const std::string text = ": \"initialization error\"\n";
  EXPECT_THAT(perform(Operation::kGetState).err,
              StartsWith("Error getting process state for process ID " + number() + text));
  EXPECT_THAT(act(Action::kLock).err,
              StartsWith("Could not lock on process ID " + number() + text));
  EXPECT_THAT(perform(Operation::kToggle).err,
              StartsWith("Error toggling CUDA in process ID " + number() + text));
  EXPECT_THAT(perform(Operation::kGetRestoreTid).err,
              StartsWith("Could not find restore thread for process ID " + number() + "\n"));
}

TEST_F(RunTest, AzombieIsAnInitialisationError) {
  child_.become_zombie();
  driver_.remove(pid());
  EXPECT_THAT(perform(Operation::kGetState).err,
              StartsWith("Error getting process state for process ID " + number() +
                         ": \"initialization error\"\n"));
}

TEST_F(RunTest, NumbersOfNoProcessAreRefusedAsTheyWereGiven) {
  for (const auto& [text, value] :
       {std::pair<const char*, std::optional<Pid>>{"0", Pid{0}},
        std::pair<const char*, std::optional<Pid>>{"2147483646", Pid{2147483646}},
        std::pair<const char*, std::optional<Pid>>{"99999999999", std::nullopt}}) {
    Options options;
    options.operation = Operation::kGetState;
    options.pid_text = text;
    options.pid = value;
    const Outcome outcome = carry_out(options);
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err,
                StartsWith(fmt::format("Error getting process state for process ID {}: \"OS call "
                                       "failed or operation not supported on this OS\"\n",
                                       text)));
  }
  EXPECT_THAT(driver_.calls(), IsEmpty()) << "the driver would take them for another process";
}

TEST_F(RunTest, TheTimeoutReachesTheDriver) {
  Options options;
  options.operation = Operation::kAction;
  options.timeout = milliseconds(1234);
  driver_.fail_always(Action::kLock, 600);
  const Outcome outcome = carry_out(options);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err,
              StartsWith("Could not lock on process ID " + number() + ": \"device not ready\"\n"));
  EXPECT_EQ(driver_.actions().size(), 1U);
  EXPECT_EQ(driver_.calls().back().action, Action::kGetState);
  const auto& calls = driver_.calls();
  EXPECT_TRUE(std::any_of(calls.begin(), calls.end(), [](const FakeDriver::Call& call) {
    return call.action == Action::kLock && call.timeout == milliseconds(1234);
  }));
}

TEST_F(RunTest, TheMapReachesTheDriverAsGiven) {
  driver_.add(pid(), CudaState::kCheckpointed);
  Options options;
  options.operation = Operation::kAction;
  options.action = Action::kRestore;
  options.gpus = std::vector<GpuPair>(1);
  driver_.fail_always(Action::kRestore, 1);
  const Outcome outcome = carry_out(options);
  EXPECT_THAT(outcome.err, StartsWith("Could not restore on process ID " + number() +
                                      ": \"invalid argument\"\n"));
  EXPECT_THAT(outcome.err, HasSubstr("is checkpointed now"));
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kCheckpointed);
  driver_.forgive();
  EXPECT_EQ(carry_out(options).status, 0);
}

TEST_F(RunTest, AcheckpointThatIsRefusedLeavesItLockedAndSaysSo) {
  driver_.add(pid(), CudaState::kLocked);
  driver_.fail_always(Action::kCheckpoint, 801);
  const Outcome outcome = act(Action::kCheckpoint);
  EXPECT_THAT(outcome.err, StartsWith("Could not checkpoint on process ID " + number() +
                                      ": \"operation not supported\"\n"));
  EXPECT_THAT(outcome.err, EndsWith("hint: process " + number() +
                                    " is locked now; "
                                    "`cuda-checkpoint --action unlock --pid " +
                                    number() + "` lets it run\n"));
}

TEST_F(RunTest, ToggleGoesThereAndBack) {
  EXPECT_EQ(perform(Operation::kToggle).status, 0);
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kCheckpointed);
  EXPECT_EQ(perform(Operation::kToggle).status, 0);
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning);
  EXPECT_THAT(driver_.actions(),
              ElementsAre(Action::kLock, Action::kCheckpoint, Action::kRestore, Action::kUnlock));
  EXPECT_EQ(journal_records(), 0U);
}

TEST_F(RunTest, ToggleOfAlockedProcessIsRefusedAndLeavesItLocked) {
  driver_.add(pid(), CudaState::kLocked);
  const Outcome outcome = perform(Operation::kToggle);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, StartsWith("Error toggling CUDA in process ID " + number() +
                                      ": \"the operation cannot be performed in the present "
                                      "state\"\n"));
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kLocked);
  EXPECT_THAT(driver_.actions(), IsEmpty());
  EXPECT_EQ(journal_records(), 0U);
}

TEST_F(RunTest, ToggleThatFailsBringsItBack) {
  driver_.fail_always(Action::kCheckpoint, 801);
  Outcome outcome = perform(Operation::kToggle);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, StartsWith("Error toggling CUDA in process ID " + number() +
                                      ": \"operation not supported\"\n"));
  EXPECT_THAT(outcome.err, EndsWith("hint: process " + number() + " is running now\n"));
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning);

  driver_.forgive();
  driver_.add(pid(), CudaState::kCheckpointed);
  driver_.fail_always(Action::kRestore, 2);
  outcome = perform(Operation::kToggle);
  EXPECT_THAT(outcome.err, HasSubstr("\"out of memory\""));
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kCheckpointed);
  EXPECT_EQ(journal_records(), 0U);
}

// Whichever call fails: the process is in one of the two states a toggle may leave, or it is said.
TEST_F(RunTest, ToggleNeverLeavesItHalfwayInSilence) {
  for (CudaState before : {CudaState::kRunning, CudaState::kCheckpointed}) {
    for (std::size_t nth = 1; nth <= 14; ++nth) {
      driver_.forget_calls();
      driver_.forgive();
      driver_.add(pid(), before);
      driver_.fail_nth(nth, 304);
      const Outcome outcome = perform(Operation::kToggle);
      const CudaState after = driver_.state_of(pid());
      EXPECT_EQ(driver_.illegal_calls(), 0);
      if (outcome.status == 0) {
        EXPECT_NE(after, before);
        EXPECT_NE(after, CudaState::kLocked);
      } else if (after != before) {
        EXPECT_THAT(outcome.err, HasSubstr("stasis recover")) << nth;
        EXPECT_EQ(journal_records(), 1U) << "for `stasis recover`";
        forget_all();
      }
      EXPECT_EQ(journal_records(), 0U);
    }
  }
}

TEST_F(RunTest, AsignalBringsAtoggledProcessBack) {
  // At each call of a suspending toggle.
  for (std::size_t nth = 1; nth <= 8; ++nth) {
    interrupt_ = std::make_unique<Interrupt>();
    driver_.forget_calls();
    driver_.add(pid());
    driver_.on_call = [&](const FakeDriver::Call& /*call*/) {
      if (driver_.calls().size() + 1 == nth) interrupt_->request(SIGINT);
    };
    const Outcome outcome = perform(Operation::kToggle);
    driver_.on_call = nullptr;
    if (interrupt_->requested()) {
      EXPECT_EQ(outcome.status, 130) << nth;
      EXPECT_EQ(driver_.state_of(pid()), CudaState::kRunning) << nth;
      EXPECT_THAT(outcome.err, HasSubstr("stopped by signal 2"));
    } else {
      EXPECT_EQ(outcome.status, 0);
      EXPECT_EQ(driver_.state_of(pid()), CudaState::kCheckpointed);
    }
  }
}

TEST_F(RunTest, AsignalEndsAlockThatWaitsForEver) {
  int tries = 0;
  driver_.fail_always(Action::kLock, 600);
  driver_.on_call = [&](const FakeDriver::Call& call) {
    if (call.action == Action::kLock && ++tries == 4) interrupt_->request(SIGTERM);
  };
  const Outcome outcome = act(Action::kLock);
  EXPECT_EQ(outcome.status, 143);
  EXPECT_EQ(tries, 4);
  std::vector<milliseconds> limits;
  for (const FakeDriver::Call& call : driver_.calls()) {
    if (call.action == Action::kLock) limits.push_back(call.timeout);
  }
  // Each as long as all before it, so that a signal is answered after at most the same time again.
  EXPECT_THAT(limits, ElementsAre(milliseconds(500), milliseconds(1000), milliseconds(2000),
                                  milliseconds(4000)));
}

// A signal before the lock is no reason to touch a process that others hold.
TEST_F(RunTest, AsignalLeavesTheStateOfOthersAlone) {
  for (CudaState before : {CudaState::kLocked, CudaState::kCheckpointed}) {
    driver_.add(pid(), before);
    interrupt_->request(SIGINT);
    EXPECT_EQ(act(Action::kLock).status, 130);
    EXPECT_EQ(driver_.state_of(pid()), before);
  }
}

TEST_F(RunTest, ToggleKeepsOffAprocessThatAnotherOperationHas) {
  auto process = Process::open(driver_, pid());
  ASSERT_TRUE(process);
  JournalRecord record;
  record.operation = stasis::Operation::kDump;
  record.root = pid();
  record.targets = {{pid(), process->info().start_ticks, CudaState::kRunning}};
  auto held = Journal::begin(record);
  ASSERT_TRUE(held);
  const Outcome outcome = perform(Operation::kToggle);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("stasis dump"));
  EXPECT_THAT(driver_.actions(), IsEmpty());
  held->finish();
  EXPECT_EQ(perform(Operation::kToggle).status, 0);
}

// What a killed operation left is the way back for its other processes.
TEST_F(RunTest, ToggleKeepsTheRecordOfAkilledOperation) {
  {
    JournalRecord record;
    record.operation = stasis::Operation::kDump;
    record.root = pid();
    record.targets = {{Pid{1}, 1, CudaState::kRunning}};
    auto held = Journal::begin(record);
    ASSERT_TRUE(held);
  }
  EXPECT_EQ(perform(Operation::kToggle).status, 0);
  const auto entries = read_journal();
  ASSERT_TRUE(entries);
  ASSERT_EQ(entries->size(), 1U);
  ASSERT_EQ(entries->front().record.targets.size(), 1U);
  EXPECT_EQ(entries->front().record.targets.front().pid, Pid{1});
}

// A child of a tree that is being dumped.
TEST_F(RunTest, ToggleKeepsOffAprocessOfAtreeThatAnotherOperationHas) {
  auto process = Process::open(driver_, pid());
  ASSERT_TRUE(process);
  JournalRecord record;
  record.operation = stasis::Operation::kDump;
  record.root = Pid{1};
  auto held = Journal::begin(record);
  ASSERT_TRUE(held);
  ASSERT_TRUE(held->update({{pid(), process->info().start_ticks, CudaState::kRunning}}));
  const Outcome outcome = perform(Operation::kToggle);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("stasis dump"));
  EXPECT_EQ(journal_records(), 1U) << "none of its own is left behind";
  held->finish();
}

// /run may be read-only in a container.
TEST_F(RunTest, ToggleGoesWithoutAjournalWhereThereIsNoPlaceForOne) {
  ::setenv("STASIS_STATE_DIR", "/proc/no/such/place", 1);
  EXPECT_EQ(perform(Operation::kToggle).status, 0);
  EXPECT_EQ(driver_.state_of(pid()), CudaState::kCheckpointed);
}

TEST_F(RunTest, AjobIsRefusedWithTheReason) {
  Options options;
  options.operation = Operation::kLaunchJob;
  options.job = {"python", "train.py"};
  const Outcome outcome = carry_out(options);
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, StartsWith("Could not launch python as a job\nreason: "));
  EXPECT_THAT(outcome.err, HasSubstr("\nhint: "));
}

TEST_F(RunTest, AnAnswerThatCannotBeWrittenIsAfailure) {
  Options options;
  options.operation = Operation::kGetState;
  options.pid = pid();
  options.pid_text = number();
  std::FILE* full = std::fopen("/dev/full", "w");
  ASSERT_NE(full, nullptr);
  EXPECT_EQ(compat::carry_out(options, driver_, *interrupt_, {full, full}), 1);
  std::fclose(full);
}

TEST(Help, NamesWhatTheDriverCanDo) {
  DriverInfo info;
  info.cuda_version = 13000;
  info.driver_version = "580.159.04";
  info.has_device_map = true;
  const std::string text = help_text(&info);
  EXPECT_THAT(text, StartsWith("CUDA checkpoint and restore utility.\nVersion 580.159.04. "));
  // CRIU's plugin looks for these in the help to learn what the utility can do.
  for (const char* word : {"--get-state", "--action", "--toggle", "--get-restore-tid", "--timeout",
                           "--device-map", "--pid", "--help"}) {
    EXPECT_THAT(text, HasSubstr(word));
  }
  EXPECT_THAT(text, Not(HasSubstr("--launch-job")));
  EXPECT_THAT(text, Not(HasSubstr("simulated")));
  info.has_device_map = false;
  EXPECT_THAT(help_text(&info), Not(HasSubstr("--device-map")));
  info.simulated = true;
  EXPECT_THAT(help_text(&info), HasSubstr("simulated GPU"));
  EXPECT_THAT(help_text(nullptr), HasSubstr("no usable CUDA driver"));
}

}  // namespace
}  // namespace stasis::compat
