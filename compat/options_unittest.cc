#include "options.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace stasis::compat {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr const char* kA = "GPU-00000000-0000-0000-0000-00000000000a";
constexpr const char* kB = "GPU-00000000-0000-0000-0000-00000000000b";

Result<Options> parse(std::vector<std::string> words, const Features& features = {}) {
  words.insert(words.begin(), "cuda-checkpoint");
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words)
    argv.push_back(word.data());
  argv.push_back(nullptr);
  return parse_options(static_cast<int>(words.size()), argv.data(), features);
}

std::string refusal(std::vector<std::string> words, const Features& features = {}) {
  auto options = parse(std::move(words), features);
  if (options) return "no refusal";
  EXPECT_EQ(options.error().code, ErrorCode::kUsage);
  return options.error().message;
}

// What getopt itself says on standard error.
std::string getopt_line(std::vector<std::string> words, const Features& features = {}) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(refusal(std::move(words), features),
            "Invalid option(s) or option(s) not supported by this CUDA Driver");
  return testing::internal::GetCapturedStderr();
}

TEST(Options, EachOperation) {
  EXPECT_EQ(parse({"--get-state", "--pid", "12"})->operation, Operation::kGetState);
  EXPECT_EQ(parse({"--get-restore-tid", "--pid", "12"})->operation, Operation::kGetRestoreTid);
  EXPECT_EQ(parse({"--toggle", "--pid", "12"})->operation, Operation::kToggle);
  for (const auto& [name, action] :
       {std::pair{"lock", Action::kLock}, std::pair{"checkpoint", Action::kCheckpoint},
        std::pair{"restore", Action::kRestore}, std::pair{"unlock", Action::kUnlock}}) {
    auto options = parse({"--action", name, "--pid", "12"});
    ASSERT_TRUE(options);
    EXPECT_EQ(options->operation, Operation::kAction);
    EXPECT_EQ(options->action, action);
    EXPECT_EQ(options->pid, Pid{12});
    EXPECT_EQ(options->timeout, milliseconds(0));
    EXPECT_FALSE(options->gpus);
  }
}

TEST(Options, AreSpelledAsGetoptAllows) {
  for (const auto& words :
       std::vector<std::vector<std::string>>{{"--get-state", "--pid", "12"},
                                             {"--get-state", "--pid=12"},
                                             {"--get-state", "-p", "12"},
                                             {"--get-state", "-p12"},
                                             {"-p12", "--get-state"},
                                             {"--get-s", "--pi", "12"},
                                             {"--get-s", "--p=12"},
                                             {"x", "--get-state", "y", "-p12"},
                                             {"--get-state", "-p12", "--", "-z"},
                                             {"--get-state", "-p9", "-p", "12"},
                                             {"--get-state", "--get-state", "-p12"}}) {
    auto options = parse(words);
    ASSERT_TRUE(options) << testing::PrintToString(words) << options.error().message;
    EXPECT_EQ(options->operation, Operation::kGetState);
    EXPECT_EQ(options->pid, Pid{12});
    EXPECT_EQ(options->pid_text, "12");
  }
}

TEST(Options, HelpComesBeforeEverythingThatFollows) {
  EXPECT_EQ(parse({"-h"})->operation, Operation::kHelp);
  EXPECT_EQ(parse({"--help"})->operation, Operation::kHelp);
  EXPECT_EQ(parse({"--toggle", "--get-state", "--help", "--bogus"})->operation, Operation::kHelp);
}

TEST(Options, RefusalsInTheWordsAndTheOrderOfTheOriginal) {
  EXPECT_EQ(refusal({}), "No operation selected");
  EXPECT_EQ(refusal({"--pid", "12"}), "No operation selected");
  EXPECT_EQ(refusal({"--pid", "x"}), "No operation selected");
  EXPECT_EQ(refusal({"--get-state"}), "Missing pid to perform operation on");
  EXPECT_EQ(refusal({"--toggle"}), "Missing pid to perform operation on");
  EXPECT_EQ(refusal({"--action", "--pid", "12"}), "Missing pid to perform operation on");
  EXPECT_EQ(refusal({"--toggle", "--get-state", "-p12"}), "Too many operations selected");
  EXPECT_EQ(refusal({"--toggle", "--get-state"}), "Too many operations selected");
  EXPECT_EQ(refusal({"--action", "lock", "--get-restore-tid", "-p12"}),
            "Too many operations selected");
  EXPECT_EQ(refusal({"--action", "fly", "-p12"}), "Invalid process state");
  EXPECT_EQ(refusal({"--action", "", "-p12"}), "Invalid process state");
  EXPECT_EQ(refusal({"--action", "Lock", "-p12"}), "Invalid process state");
  EXPECT_EQ(refusal({"--action", "get-state", "-p12"}), "Invalid process state");
  for (const char* pid : {"x", "-5", "", " 12", "12 ", "0x12", "1e3", "12.0"}) {
    EXPECT_EQ(refusal({"--get-state", "--pid", pid}), "pid must be a non-negative integer") << pid;
  }
}

TEST(Options, ApidIsNeverCutDown) {
  EXPECT_EQ(parse({"--get-state", "-p0"})->pid, Pid{0});
  EXPECT_EQ(parse({"--get-state", "-p2147483647"})->pid, Pid{2147483647});
  for (const char* pid : {"2147483648", "4294967297", "99999999999", "18446744073709551617",
                          "99999999999999999999999999999"}) {
    auto options = parse({"--get-state", "--pid", pid});
    ASSERT_TRUE(options) << pid;
    EXPECT_FALSE(options->pid) << "no process can have this number";
    EXPECT_EQ(options->pid_text, pid);
  }
}

TEST(Options, Timeouts) {
  EXPECT_EQ(parse({"--action", "lock", "-p12", "-t", "1500"})->timeout, milliseconds(1500));
  EXPECT_EQ(parse({"--action", "lock", "-p12", "--timeout=0"})->timeout, milliseconds(0));
  EXPECT_EQ(parse({"--action", "lock", "-p12", "-t4294967295"})->timeout, milliseconds(4294967295));
  const std::string only_lock = "Timeout is only valid for --action lock operation";
  EXPECT_EQ(refusal({"--action", "unlock", "-p12", "-t5"}), only_lock);
  EXPECT_EQ(refusal({"--toggle", "-p12", "-t5"}), only_lock);
  EXPECT_EQ(refusal({"--get-state", "-p12", "-t", "x"}), only_lock);
  for (const char* timeout : {"x", "", "-1", "1.5", "5s"}) {
    EXPECT_EQ(refusal({"--action", "lock", "-p12", "-t", timeout}),
              "timeout must be a non-negative integer");
  }
  EXPECT_THAT(refusal({"--action", "lock", "-p12", "-t4294967296"}), HasSubstr("4294967295"));
  EXPECT_THAT(refusal({"--action", "lock", "-p12", "-t99999999999999999999"}),
              HasSubstr("4294967295"));
}

TEST(Options, DeviceMaps) {
  auto one = parse({"--action", "restore", "-p12", "-d", std::string(kA) + "=" + kB});
  ASSERT_TRUE(one);
  EXPECT_THAT(*one->gpus, ElementsAre(GpuPair{*GpuUuid::parse(kA), *GpuUuid::parse(kB)}));
  // Whether it is complete and one to one is for the driver to say.
  auto odd = parse({"--action", "restore", "-p12",
                    std::string("--device-map=") + kA + "=" + kB + "," + kA + "=" + kA});
  ASSERT_TRUE(odd);
  EXPECT_EQ(odd->gpus->size(), 2U);
  const std::string a = kA;
  for (const char* form : {"x=y", "", "{0}", "{0}=", "={0}", "{0}=0", "{0}={0},", ",{0}={0}",
                           "{0}={0}={0}", "{0}={0} "}) {
    const std::string map = fmt::format(fmt::runtime(form), a);
    EXPECT_EQ(refusal({"--action", "restore", "-p12", "-d", map}), "Invalid device remap") << map;
  }
  const std::string only_restore = "Device remap only allowed for restore action";
  EXPECT_EQ(refusal({"--action", "lock", "-p12", "-d", "x=y"}), only_restore);
  EXPECT_EQ(refusal({"--toggle", "-p12", "-d", a + "=" + a}), only_restore);
}

RC_GTEST_PROP(Options, AnyMapThatIsTakenIsTakenWhole, ()) {
  const auto bytes = *rc::gen::container<std::vector<std::array<std::uint8_t, 16>>>(
      rc::gen::arbitrary<std::array<std::uint8_t, 16>>());
  RC_PRE(bytes.size() >= 2U);
  std::string text;
  std::vector<GpuPair> pairs;
  for (std::size_t i = 0; i + 1 < bytes.size(); i += 2) {
    GpuPair pair;
    pair.from.bytes = bytes[i];
    pair.to.bytes = bytes[i + 1];
    pairs.push_back(pair);
    text += (text.empty() ? "" : ",") + pair.from.to_string() + "=" + pair.to.to_string();
  }
  auto options = parse({"--action", "restore", "-p12", "-d", text});
  RC_ASSERT(options.has_value());
  RC_ASSERT(*options->gpus == pairs);
}

TEST(Options, UnknownOnesAreNamedByGetopt) {
  EXPECT_EQ(getopt_line({"--bogus"}), "cuda-checkpoint: unrecognized option '--bogus'\n");
  EXPECT_EQ(getopt_line({"-z"}), "cuda-checkpoint: invalid option -- 'z'\n");
  EXPECT_EQ(getopt_line({"--get-state", "--pid"}),
            "cuda-checkpoint: option '--pid' requires an argument\n");
  EXPECT_EQ(getopt_line({"--toggle=1"}),
            "cuda-checkpoint: option '--toggle' doesn't allow an argument\n");
  EXPECT_THAT(getopt_line({"--get"}), HasSubstr("option '--get' is ambiguous"));
}

TEST(Options, ThoseThatTheDriverLacksAreUnknown) {
  const Features old{.device_map = false, .jobs = false};
  EXPECT_EQ(getopt_line({"--action", "restore", "-p12", "--device-map", "x"}, old),
            "cuda-checkpoint: unrecognized option '--device-map'\n");
  EXPECT_EQ(getopt_line({"-d", "x"}, old), "cuda-checkpoint: invalid option -- 'd'\n");
  EXPECT_EQ(getopt_line({"--launch-job", "true"}, old),
            "cuda-checkpoint: unrecognized option '--launch-job'\n");
  EXPECT_EQ(getopt_line({"-j", "true"}, old), "cuda-checkpoint: invalid option -- 'j'\n");
}

TEST(Options, AjobKeepsItsOwnOptions) {
  auto options = parse({"-j", "python", "train.py", "--pid", "3", "-h"});
  ASSERT_TRUE(options);
  EXPECT_EQ(options->operation, Operation::kLaunchJob);
  EXPECT_THAT(options->job, ElementsAre("python", "train.py", "--pid", "3", "-h"));
  EXPECT_EQ(refusal({"--toggle", "-j", "true"}), "Too many operations selected");
}

}  // namespace
}  // namespace stasis::compat
