// stasis-inside --entries PID...: how the driver's functions in it begin, by which they could be
// hooked; nothing in it is touched.
// stasis-inside --load FILE --call FUNCTION PID...: has it load the library, and prints what the
// function of it answers to 17.
// stasis-inside [--simulated] [--step BYTES] [--times N] [--timeout MS] [--memory] PID...: looks
// into each process that runs (src/attach), says what the driver in it answered about its memory,
// how long that took, and what is left there. Status 0 if every call was made, 3 if one was
// refused, with the reason.
#include <fcntl.h>

#include <array>
#include <charconv>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "attach/gpu_survey.h"
#include "attach/inside_call.h"
#include "attach/libraries.h"
#include "base/fault_point.h"
#include "base/fd.h"
#include "base/units.h"
#include "preload/calls.h"
#include "proc/procfs.h"

namespace {

using namespace stasis;  // NOLINT(google-build-using-namespace): a program

// Those that the agent stands in front of.
// NOLINTBEGIN(bugprone-suspicious-missing-comma): names with an ending
constexpr std::string_view kDriverCalls[] = {
#define STASIS_NAME(name, ...) #name,
#define STASIS_NAME_PTSZ(name, ...) #name, #name "_ptsz",
#define STASIS_NAME_PTDS(name, ...) #name, #name "_ptds",
    STASIS_GATED_CALLS(STASIS_NAME, STASIS_NAME_PTSZ, STASIS_NAME_PTDS)
        STASIS_HOOKED_CALLS(STASIS_NAME)
#undef STASIS_NAME
#undef STASIS_NAME_PTSZ
#undef STASIS_NAME_PTDS
};
// NOLINTEND(bugprone-suspicious-missing-comma)

struct Options {
  bool simulated = false;
  bool memory = false;
  bool nothing = false;
  bool entries = false;
  std::string library;
  std::string function;
  std::uint64_t step = attach::kSurveyStep;
  std::uint64_t times = 1;
  std::uint64_t timeout_ms = 5000;
  std::vector<Pid> pids;
};

std::uint64_t number(std::string_view text) {
  std::uint64_t out = 0;
  std::from_chars(text.data(), text.data() + text.size(), out);
  return out;
}

Options parse(int argc, char** argv) {
  Options out;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    const bool more = i + 1 < argc;
    if (word == "--simulated")
      out.simulated = true;
    else if (word == "--memory")
      out.memory = true;
    else if (word == "--nothing")
      out.nothing = true;
    else if (word == "--entries")
      out.entries = true;
    else if (word == "--load" && more)
      out.library = argv[++i];
    else if (word == "--call" && more)
      out.function = argv[++i];
    else if (word == "--step" && more)
      out.step = number(argv[++i]);
    else if (word == "--times" && more)
      out.times = number(argv[++i]);
    else if (word == "--timeout" && more)
      out.timeout_ms = number(argv[++i]);
    else
      out.pids.push_back(Pid{static_cast<int>(number(word))});
  }
  return out;
}

void print(const attach::GpuSurvey& survey, bool memory) {
  fmt::print("  {} pieces, {} questions, {}; may be imported: {} ({}){}; kept in it: {}\n",
             survey.memory.size(), survey.questions,
             survey.is_clean() ? "clean" : "not known to be clean", survey.candidate_count(),
             format_bytes(survey.candidate_bytes()), survey.is_whole ? "" : "; not all was asked",
             format_bytes(survey.kept_bytes));
  if (!memory) return;
  for (const auto& one : survey.memory) {
    const auto& v = one.answer.values;
    fmt::print(
        "  {:#x} {} asked at +{:#x}: type {} ipc {} pool {:#x} managed {} handles {} mapped "
        "{} context {:#x} handle-result {}{}\n",
        one.start, format_bytes(one.bytes), one.answer.asked - one.start, v[attach::kSurveyType],
        v[attach::kSurveyIpc], v[attach::kSurveyPool], v[attach::kSurveyManaged],
        v[attach::kSurveyHandles], v[attach::kSurveyMapped], v[attach::kSurveyContext],
        static_cast<int>(one.answer.handle_result),
        one.may_be_imported ? " (may be imported)" : "");
  }
}

Result<void> show_entries(Pid pid) {
  STASIS_TRY_ASSIGN(const auto space, proc::AddressSpace::open(pid));
  STASIS_TRY_ASSIGN(const auto mappings, proc::ProcFs().mappings(pid));
  STASIS_TRY_ASSIGN(const auto drivers, attach::find_libraries(space, mappings, [](auto name) {
                      return name.starts_with("libcuda.so");
                    }));
  for (const attach::Library& driver : drivers) {
    std::map<std::string, std::vector<std::string_view>> by_beginning;
    std::size_t missing = 0;
    for (const std::string_view name : kDriverCalls) {
      const auto at = driver.function(name);
      std::array<unsigned char, 10> bytes{};
      if (!at || !space.read(*at, bytes.data(), bytes.size())) {
        ++missing;
        continue;
      }
      by_beginning[fmt::format("{:02x}", fmt::join(bytes, " "))].push_back(name);
    }
    fmt::print("process {}: {}: {} of {} calls are not there\n", pid.value, driver.path(), missing,
               std::size(kDriverCalls));
    for (const auto& [bytes, names] : by_beginning)
      fmt::print("  {}: {} calls, {}\n", bytes, names.size(), names.front());
  }
  return {};
}

Result<void> look_into(const Options& options, Pid pid) {
  if (options.entries) return show_entries(pid);
  const std::chrono::milliseconds timeout(options.timeout_ms);
  const auto start = Clock::now();
  if (!options.library.empty()) {
    STASIS_TRY_ASSIGN(const auto file, open_file(AT_FDCWD, options.library, O_RDONLY));
    STASIS_TRY_ASSIGN(const auto inside, attach::Inside::open(pid));
    STASIS_TRY_ASSIGN(const int answer, attach::load_inside(inside, file, "libstasis-loaded.so",
                                                            options.function, 17, timeout));
    fmt::print("process {}: {} answers {}\n", pid.value, options.function, answer);
    return {};
  }
  if (options.nothing) {
    for (std::uint64_t i = 0; i < options.times; ++i) {
      STASIS_TRY_ASSIGN(const auto inside, attach::Inside::open(pid));
      STASIS_TRY(attach::call_inside(inside, {}, timeout));
    }
    fmt::print("process {}: {} calls, {:.1f} ms each\n", pid.value, options.times,
               since(start).count() * 1e3 / static_cast<double>(options.times));
    return {};
  }
  attach::GpuSurvey survey;
  for (std::uint64_t i = 0; i < options.times; ++i) {
    STASIS_TRY_ASSIGN(survey,
                      attach::survey_gpu_memory(pid, options.simulated, options.step, timeout));
  }
  fmt::print("process {}: {} surveys, {:.1f} ms each\n", pid.value, options.times,
             since(start).count() * 1e3 / static_cast<double>(options.times));
  print(survey, options.memory);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (options.pids.empty() || options.step == 0) {
    fmt::print(stderr,
               "usage: stasis-inside [--simulated] [--nothing] [--memory] [--step BYTES] "
               "[--times N] [--timeout MS] PID...\n");
    return 2;
  }
  if (auto fine = check_fault_setting(); !fine) {
    fmt::print(stderr, "{}\n", fine.error().to_string());
    return 2;
  }
  int status = 0;
  for (const Pid pid : options.pids) {
    set_fault_target(pid);
    if (auto done = look_into(options, pid); !done) {
      fmt::print(stderr, "{}: {}\n", error_code_name(done.error().code), done.error().to_string());
      status = 3;
    }
  }
  return status;
}
