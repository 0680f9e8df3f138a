#include "base/error.h"

#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace stasis {
namespace {

// A code that is missing here does not compile, and one that is here without a row in error.cc
// fails below.
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wswitch"
bool exists(ErrorCode code) {
  switch (code) {
    case ErrorCode::kUsage:
    case ErrorCode::kInterrupted:
    case ErrorCode::kInternal:
    case ErrorCode::kIo:
    case ErrorCode::kNoSpace:
    case ErrorCode::kNoSuchProcess:
    case ErrorCode::kProcessGone:
    case ErrorCode::kZombie:
    case ErrorCode::kThreadId:
    case ErrorCode::kNotCuda:
    case ErrorCode::kNotPermitted:
    case ErrorCode::kWrongState:
    case ErrorCode::kFailedState:
    case ErrorCode::kTimeout:
    case ErrorCode::kNoAnswer:
    case ErrorCode::kBusy:
    case ErrorCode::kDriverMissing:
    case ErrorCode::kDriverTooOld:
    case ErrorCode::kDriverUnsupported:
    case ErrorCode::kDriverError:
    case ErrorCode::kNotSupported:
    case ErrorCode::kDeviceMapUnsupported:
    case ErrorCode::kDeviceMapInvalid:
    case ErrorCode::kGpuMismatch:
    case ErrorCode::kOutOfGpuMemory:
    case ErrorCode::kOutOfHostMemory:
    case ErrorCode::kCriuMissing:
    case ErrorCode::kCriuTooOld:
    case ErrorCode::kCriuFailed:
    case ErrorCode::kUndumpable:
    case ErrorCode::kImageExists:
    case ErrorCode::kImageIncomplete:
    case ErrorCode::kImageCorrupt:
    case ErrorCode::kImageVersion:
    case ErrorCode::kPidInUse:
    case ErrorCode::kNotRolledBack:
      return true;
  }
  return false;
}
#pragma GCC diagnostic pop

std::vector<ErrorCode> all_codes() {
  std::vector<ErrorCode> codes;
  for (int i = 0; exists(static_cast<ErrorCode>(i)); ++i)
    codes.push_back(static_cast<ErrorCode>(i));
  return codes;
}

TEST(ErrorCode, EachHasAnameOfItsOwn) {
  std::set<std::string_view> names;
  for (ErrorCode code : all_codes()) {
    const std::string_view name = error_code_name(code);
    EXPECT_FALSE(name.empty());
    EXPECT_EQ(name.find_first_not_of("abcdefghijklmnopqrstuvwxyz-"), std::string_view::npos)
        << name;
    EXPECT_TRUE(names.insert(name).second)
        << name << " names two codes, or code " << static_cast<int>(code) << " has no row";
  }
  EXPECT_EQ(error_code_name(ErrorCode::kNotRolledBack), "not-rolled-back");
  EXPECT_EQ(names.size(), all_codes().size());
}

TEST(ErrorCode, NoneCountsAsSuccess) {
  for (ErrorCode code : all_codes()) {
    const int status = exit_status(code);
    EXPECT_TRUE((status >= 1 && status <= 12) || status == 130) << error_code_name(code);
  }
}

TEST(ErrorCode, EachIsExplained) {
  for (const ErrorInfo& info : error_catalogue()) {
    EXPECT_FALSE(info.meaning.empty()) << info.name;
    EXPECT_TRUE(!info.remedy.empty() || info.code == ErrorCode::kInterrupted) << info.name;
    for (const std::string_view text : {info.meaning, info.causes, info.remedy})
      EXPECT_FALSE(text.ends_with('.')) << info.name;
  }
  EXPECT_EQ(error_catalogue().size(), all_codes().size());
}

TEST(ErrorCode, ScriptsCanTellWhatToDo) {
  EXPECT_EQ(exit_status(ErrorCode::kUsage), 2);
  EXPECT_EQ(exit_status(ErrorCode::kNoSuchProcess), 3);
  EXPECT_EQ(exit_status(ErrorCode::kNotCuda), 4);
  EXPECT_EQ(exit_status(ErrorCode::kNotPermitted), 5);
  EXPECT_EQ(exit_status(ErrorCode::kTimeout), 7);
  EXPECT_EQ(exit_status(ErrorCode::kInterrupted), 130);
  EXPECT_EQ(exit_status(ErrorCode::kNotRolledBack), 12);
}

TEST(Error, KeepsItsContextFromTheInsideOut) {
  Error error{ErrorCode::kIo, "cannot read x", "look"};
  const Error outer = std::move(error).within("while reading").within("while dumping");
  EXPECT_EQ(outer.to_string(), "cannot read x (while reading) (while dumping)");
  EXPECT_EQ(outer.remedy, "look");
  EXPECT_EQ(outer.code, ErrorCode::kIo);
}

}  // namespace
}  // namespace stasis
