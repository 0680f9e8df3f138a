#include "attach/gpu_survey.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "attach/inside_call.h"
#include "attach/libraries.h"

namespace stasis::attach {
namespace {

constexpr std::uint64_t kDeviceMemory = 2;  // CU_MEMORYTYPE_DEVICE
constexpr std::uint64_t kUnit = std::uint64_t{2} << 20;
// What is asked at most, 0.4 s of questions; programs reserve terabytes for other purposes.
constexpr std::uint64_t kMostQuestions = std::uint64_t{4} << 20;

// As checkpoint/driver_obstacles.cc knows it: below lies a mapping that every CUDA process has.
constexpr std::uint64_t kDriversOwn = std::uint64_t{1} << 40;

bool is_driver(std::string_view name) { return name.starts_with("libcuda.so"); }

}  // namespace

bool GpuSurvey::has_managed() const {
  return std::any_of(memory.begin(), memory.end(),
                     [](const Memory& one) { return one.is_managed; });
}

bool GpuSurvey::is_clean() const { return is_whole && candidate_count() == 0; }

std::uint64_t GpuSurvey::candidate_count() const {
  return static_cast<std::uint64_t>(std::count_if(
      memory.begin(), memory.end(), [](const Memory& one) { return one.may_be_imported; }));
}

std::uint64_t GpuSurvey::candidate_bytes() const {
  return std::accumulate(memory.begin(), memory.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const Memory& one) {
                           return one.may_be_imported ? sum + one.bytes : sum;
                         });
}

std::vector<SurveyRange> ranges_to_ask(std::span<const proc::Mapping> mappings, bool simulated) {
  std::vector<SurveyRange> out;
  for (const proc::Mapping& mapping : mappings) {
    // The driver keeps device addresses by memory that cannot be touched; the simulated one maps
    // its GPU's files there.
    const bool is_reserved = mapping.inode == 0 && mapping.permissions == "---p";
    const bool is_file = mapping.inode != 0 && mapping.permissions.ends_with('s');
    const bool is_managed =
        is_file && mapping.start >= kDriversOwn && file_name(mapping).starts_with("nvidia-uvm");
    if (!is_reserved && !is_managed && !(simulated && is_file)) continue;
    const std::uint64_t start = (mapping.start + kUnit - 1) / kUnit * kUnit;
    if (start >= mapping.end) continue;
    if (!out.empty() && out.back().end == start)
      out.back().end = mapping.end;
    else
      out.push_back({start, mapping.end});
  }
  return out;
}

GpuSurvey::Memory judge(const SurveyAnswer& answer) {
  GpuSurvey::Memory out{answer.values[kSurveyStart], answer.values[kSurveySize],
                        answer.values[kSurveyManaged] != 0, false, answer};
  // What was imported may not be exported again (580.159.04).
  const bool is_exportable = answer.values[kSurveyPool] == 0 && answer.values[kSurveyHandles] != 0;
  const bool is_own = answer.values[kSurveyType] == kDeviceMemory &&
                      (answer.values[kSurveyIpc] != 0 || is_exportable ||
                       (answer.values[kSurveyPool] != 0 && answer.handle_result == 0));
  out.may_be_imported = !out.is_managed && !is_own;
  return out;
}

Result<GpuSurvey> survey_gpu_memory(Pid pid, bool simulated, std::uint64_t step,
                                    std::chrono::milliseconds timeout) {
  STASIS_TRY_ASSIGN(const auto inside, Inside::open(pid));
  STASIS_TRY_ASSIGN(const auto drivers,
                    find_libraries(inside.space(), inside.mappings(), is_driver));
  if (drivers.size() != 1) {
    return fail(
        ErrorCode::kNotSupported,
        fmt::format("process {} has loaded {} drivers (libcuda.so.1)", pid.value, drivers.size()));
  }
  const Library& driver = drivers.front();
  InsideWork work{InsideJob::kSurvey};
  STASIS_TRY_ASSIGN(work.get_attributes, driver.need_function("cuPointerGetAttributes"));
  work.get_handle = driver.function("cuMemGetHandleForAddressRange").value_or(0);
  work.ranges = ranges_to_ask(inside.mappings(), simulated);
  work.step = step;
  bool is_whole = work.ranges.size() <= kMostRanges;
  if (!is_whole) work.ranges.resize(kMostRanges);
  std::uint64_t questions = 0;
  for (SurveyRange& range : work.ranges) {
    const std::uint64_t most = kMostQuestions - std::min(questions, kMostQuestions);
    const std::uint64_t wanted = (range.end - range.start) / step + 1;
    if (wanted > most) {
      is_whole = false;
      range.end = range.start + most * step;
    }
    questions += std::min(wanted, most);
  }
  STASIS_TRY_ASSIGN(const auto answer, call_inside(inside, work, timeout));
  if (answer.block.failures != 0) {
    return fail(ErrorCode::kDriverError,
                fmt::format("the driver in process {} did not answer {} of {} questions about its "
                            "memory (CUresult {})",
                            pid.value, answer.block.failures, answer.block.questions,
                            answer.block.last_error));
  }
  GpuSurvey out;
  for (const SurveyAnswer& one : answer.answers)
    out.memory.push_back(judge(one));
  out.is_whole = is_whole && answer.block.overflow == 0;
  out.questions = answer.block.questions;
  out.kept_bytes = answer.kept_bytes;
  return out;
}

}  // namespace stasis::attach
