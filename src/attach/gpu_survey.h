// Which GPU memory a program without an agent has, asked of the driver inside it: whether it may
// have imported some of another process's, which the driver saves and cannot restore.
//
// cuPointerGetAttributes answers on a thread without a context, for every kind of memory, 292,000
// questions in 0.03 s (H200, 580). It tells a program's own memory of cuMemAlloc and of its pools
// and of cuMemCreate that may be exported from all else, but not imported memory from a module's
// variable (by CUDA IPC) or from the program's own that may not be exported (by descriptor). So the
// answer is "none", or "may be".
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "attach/inside_block.h"
#include "base/ids.h"
#include "base/result.h"
#include "proc/procfs.h"

namespace stasis::attach {

struct GpuSurvey {
  struct Memory {
    std::uint64_t start = 0;
    std::uint64_t bytes = 0;
    bool is_managed = false;
    bool may_be_imported = false;
    SurveyAnswer answer{};  // as the driver gave it
  };
  std::vector<Memory> memory;
  bool is_whole = true;  // there was room for all of it
  std::uint64_t questions = 0;
  std::uint64_t kept_bytes = 0;  // InsideAnswer's

  bool has_managed() const;
  // No process can have made any of it but this one.
  bool is_clean() const;
  std::uint64_t candidate_count() const;
  std::uint64_t candidate_bytes() const;
};

// In the middle of what the driver reserves it is asked every so many bytes: the unit in which it
// maps device memory.
inline constexpr std::uint64_t kSurveyStep = std::uint64_t{2} << 20;
inline constexpr std::chrono::milliseconds kSurveyTimeout{5000};

// `simulated`: of a program on the simulated driver. The errors of call_inside(), and kNotSupported
// if the process has not loaded the driver.
Result<GpuSurvey> survey_gpu_memory(Pid pid, bool simulated, std::uint64_t step = kSurveyStep,
                                    std::chrono::milliseconds timeout = kSurveyTimeout);

// What of a process's mappings is asked for.
std::vector<SurveyRange> ranges_to_ask(std::span<const proc::Mapping> mappings, bool simulated);
// As the facts above have it.
GpuSurvey::Memory judge(const SurveyAnswer& answer);

}  // namespace stasis::attach
