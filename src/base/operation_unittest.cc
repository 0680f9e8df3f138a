#include "base/operation.h"

#include <gtest/gtest.h>

namespace stasis {
namespace {

struct Row {
  Operation operation;
  std::string_view name;
};
constexpr Row kRows[] = {{Operation::kNone, ""},
                         {Operation::kSuspend, "suspend"},
                         {Operation::kResume, "resume"},
                         {Operation::kDump, "dump"},
                         {Operation::kRestore, "restore"},
                         {Operation::kAttach, "attach"},
                         {Operation::kSwap, "swap"},
                         {Operation::kStart, "start"},
                         {Operation::kCriuDump, "criu dump"},
                         {Operation::kCriuRestore, "criu restore"}};

TEST(Operation, HasTheNameThatRecordsOfAllVersionsHave) {
  for (const Row& row : kRows) {
    EXPECT_EQ(operation_name(row.operation), row.name);
    EXPECT_EQ(RecordedOperation::from_name(std::string(row.name)), row.operation);
  }
}

TEST(Operation, OneOfANewerVersionIsNoneOfOurs) {
  for (const char* name : {"hibernate", "criu hibernate", "dump2", "Dump", " dump"}) {
    const auto newer = RecordedOperation::from_name(name);
    ASSERT_TRUE(newer);
    EXPECT_EQ(newer->name(), name);
    for (const Row& row : kRows)
      EXPECT_FALSE(*newer == row.operation) << name;
    EXPECT_FALSE(writes_image(*newer)) << name;
  }
}

TEST(Operation, OnlyADumpWritesAnImage) {
  for (const Row& row : kRows)
    EXPECT_EQ(writes_image(row.operation), row.operation == Operation::kDump) << row.name;
}

TEST(Operation, CriusAreTold) {
  EXPECT_TRUE(is_done_by_criu(Operation::kCriuDump));
  EXPECT_TRUE(is_done_by_criu(Operation::kCriuRestore));
  EXPECT_TRUE(is_done_by_criu(*RecordedOperation::from_name("criu hibernate")));
  EXPECT_FALSE(is_done_by_criu(Operation::kDump));
  EXPECT_FALSE(is_done_by_criu(*RecordedOperation::from_name("hibernate")));
}

}  // namespace
}  // namespace stasis
