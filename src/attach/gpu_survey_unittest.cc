#include "attach/gpu_survey.h"

#include <gtest/gtest.h>

namespace stasis::attach {
namespace {

constexpr std::uint64_t kDevice = 2;
constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kHigh = std::uint64_t{1} << 40;

SurveyAnswer answer(std::uint64_t type, std::uint64_t ipc, std::uint64_t pool = 0,
                    std::uint32_t handle = kNotAsked) {
  SurveyAnswer out{};
  out.values[kSurveyStart] = 0x7000000000;
  out.values[kSurveySize] = 4 * kMiB;
  out.values[kSurveyType] = type;
  out.values[kSurveyIpc] = ipc;
  out.values[kSurveyPool] = pool;
  out.handle_result = handle;
  return out;
}

// As driver 580 answered on an H200.
TEST(GpuSurvey, OwnMemoryIsToldFromWhatMayBeImported) {
  EXPECT_FALSE(judge(answer(kDevice, 1)).may_be_imported) << "cuMemAlloc";
  EXPECT_TRUE(judge(answer(kDevice, 0)).may_be_imported) << "CUDA IPC, a module's, cuMemCreate";
  EXPECT_FALSE(judge(answer(kDevice, 0, 0x1234, 0)).may_be_imported) << "an own pool";
  EXPECT_TRUE(judge(answer(kDevice, 0, 0x1234, 1)).may_be_imported) << "an imported pool";
  EXPECT_TRUE(judge(answer(kDevice, 0, 0x1234, kNoFunction)).may_be_imported) << "not asked";
  SurveyAnswer exportable = answer(kDevice, 0);
  exportable.values[kSurveyHandles] = 1;
  EXPECT_FALSE(judge(exportable).may_be_imported) << "cuMemCreate, with a kind of handle";
  exportable.values[kSurveyPool] = 0x1234;
  EXPECT_TRUE(judge(exportable).may_be_imported) << "a pool with one";
  EXPECT_TRUE(judge(answer(1, 0)).may_be_imported) << "of the host, among device addresses";
}

TEST(GpuSurvey, ManagedMemoryIsItsOwnMatter) {
  SurveyAnswer managed = answer(kDevice, 0);
  managed.values[kSurveyManaged] = 1;
  EXPECT_TRUE(judge(managed).is_managed);
  EXPECT_FALSE(judge(managed).may_be_imported);
}

TEST(GpuSurvey, CleanIsOnlyWhatWasAskedWhole) {
  GpuSurvey survey;
  survey.memory.push_back(judge(answer(kDevice, 1)));
  EXPECT_TRUE(survey.is_clean());
  survey.is_whole = false;
  EXPECT_FALSE(survey.is_clean());
  survey.is_whole = true;
  survey.memory.push_back(judge(answer(kDevice, 0)));
  EXPECT_FALSE(survey.is_clean());
  EXPECT_EQ(survey.candidate_count(), 1U);
  EXPECT_EQ(survey.candidate_bytes(), 4 * kMiB);
}

TEST(GpuSurvey, AsksWhereTheDriverHasAddresses) {
  const std::vector<proc::Mapping> mappings{
      {11 * kMiB, 12 * kMiB, "---p", 0, "", 0},  // in no unit of the driver's
      {12 * kMiB, 20 * kMiB, "---p", 0, "", 0},
      {20 * kMiB, 24 * kMiB, "---p", 0, "", 0},
      {32 * kMiB, 64 * kMiB, "rw-s", 9, "/dev/nvidia-uvm", 5},  // every CUDA process's
      {kHigh + 32 * kMiB, kHigh + 64 * kMiB, "rw-s", 9, "/dev/nvidia-uvm", 5},
      {kHigh + 64 * kMiB, kHigh + 66 * kMiB, "rw-s", 7, "/dev/shm/x", 5},
      {kHigh + 70 * kMiB, kHigh + 80 * kMiB, "rw-p", 0, "[heap]", 0},
  };
  const auto real = ranges_to_ask(mappings, false);
  ASSERT_EQ(real.size(), 2U);
  EXPECT_EQ(real[0].start, 12 * kMiB);
  EXPECT_EQ(real[0].end, 24 * kMiB);
  EXPECT_EQ(real[1].start, kHigh + 32 * kMiB);
  const auto simulated = ranges_to_ask(mappings, true);
  ASSERT_EQ(simulated.size(), 3U) << "there every shared file may be a GPU's";
  EXPECT_EQ(simulated[2].end, kHigh + 66 * kMiB);
}

}  // namespace
}  // namespace stasis::attach
