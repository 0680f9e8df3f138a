// What a process is and may do.
#include <immintrin.h>
#include <linux/securebits.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>

#include "tests/workloads/state_probe.h"

namespace stasis::workloads {
namespace {

constexpr const char* kSubject = "attributes";

std::string line_of(const char* path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? line : "unreadable";
}
Problem write_to(const char* path, const char* text) {
  std::ofstream file(path);
  file << text << std::flush;
  return file ? std::nullopt : Problem(because(std::string("writing ") + path));
}
std::string option(int number) { return std::to_string(prctl(number, 0UL, 0UL, 0UL, 0UL)); }

// A file of /proc/self that can be written to.
void add_file(Probe& probe, const char* name, const char* path, const char* text) {
  probe.add(
      kSubject, name, [=] { return write_to(path, text); }, [=] { return line_of(path); });
}
// An option of prctl(2) that is a number.
void add_option(Probe& probe, const char* name, int set, int get, unsigned long value) {
  probe.add(
      kSubject, name, [=] { return answer(prctl(set, value, 0UL, 0UL, 0UL), "prctl"); },
      [=] { return option(get); });
}

std::string status_lines(const char* names) {
  std::ifstream file("/proc/thread-self/status");
  std::string text;
  for (std::string line; std::getline(file, line);) {
    std::istringstream wanted(names);
    for (std::string name; wanted >> name;)
      if (line.starts_with(name + ":")) text += line + " ";
  }
  for (char& c : text)
    if (c == '\t') c = ' ';
  return text;
}

// Large enough that none is in the way.
rlim_t wanted_limit(int which, rlim_t most) {
  constexpr rlim_t kTebibyte = 1ULL << 40;
  const rlim_t value = which == RLIMIT_CORE     ? 4096
                       : which == RLIMIT_NOFILE ? 4000
                       : which == RLIMIT_CPU || which == RLIMIT_NPROC || which == RLIMIT_SIGPENDING
                           ? 1'000'000
                       : which == RLIMIT_AS ? 100 * kTebibyte
                                            : kTebibyte + 4096;
  return std::min(value, most == RLIM_INFINITY || most == 0 ? most : most - 1);
}
// The soft ones of all.
Problem set_limits() {
  for (int which = 0; which < RLIM_NLIMITS; ++which) {
    rlimit limit{};
    getrlimit(static_cast<__rlimit_resource>(which), &limit);
    limit.rlim_cur = wanted_limit(which, limit.rlim_max);
    if (setrlimit(static_cast<__rlimit_resource>(which), &limit) != 0)
      return because("limit " + std::to_string(which));
  }
  return std::nullopt;
}
std::string limits() {
  std::string text;
  for (int which = 0; which < RLIM_NLIMITS; ++which) {
    rlimit limit{};
    getrlimit(static_cast<__rlimit_resource>(which), &limit);
    text += " " + std::to_string(which) + ": " + std::to_string(limit.rlim_cur) + "/" +
            std::to_string(limit.rlim_max);
  }
  return text;
}

// asm/prctl.h, and XFEATURE_XTILE_DATA
constexpr int kGetState = 0x1022;
constexpr int kRequestState = 0x1023;
constexpr unsigned long kTileData = 18;

// A program without the permission would be ended by SIGILL.
__attribute__((target("amx-tile"))) bool use_tiles() {
  struct [[gnu::packed]] {
    std::uint8_t palette = 1;
    std::uint8_t start = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t bytes[16] = {64};
    std::uint8_t rows[16] = {16};
  } configuration;
  std::uint8_t in[1024];
  std::uint8_t out[1024] = {};
  std::memset(in, 5, sizeof in);
  _tile_loadconfig(&configuration);
  _tile_loadd(0, in, 64);
  _tile_stored(0, out, 64);
  _tile_release();
  return std::memcmp(in, out, sizeof in) == 0;
}

}  // namespace

void add_attributes(Probe& probe) {
  probe.add(
      kSubject, "personality",
      [] { return answer(personality(ADDR_NO_RANDOMIZE | UNAME26), "personality"); },
      [] { return std::to_string(personality(0xffffffff)); });
  add_file(probe, "core dump filter", "/proc/self/coredump_filter", "0x7b");
  add_file(probe, "oom_score_adj", "/proc/self/oom_score_adj", "321");
  probe.add(
      kSubject, "child subreaper",
      [] { return answer(prctl(PR_SET_CHILD_SUBREAPER, 1UL, 0UL, 0UL, 0UL), "prctl"); },
      [] {
        int now = -1;
        return prctl(PR_GET_CHILD_SUBREAPER, &now) != 0 ? because("prctl") : std::to_string(now);
      });
  add_option(probe, "dumpable", PR_SET_DUMPABLE, PR_GET_DUMPABLE, 0);
  add_option(probe, "keep capabilities (PR_SET_KEEPCAPS)", PR_SET_KEEPCAPS, PR_GET_KEEPCAPS, 1);
  add_option(probe, "secure bits", PR_SET_SECUREBITS, PR_GET_SECUREBITS,
             SECBIT_NO_SETUID_FIXUP | SECBIT_KEEP_CAPS);
  add_option(probe, "no new privileges", PR_SET_NO_NEW_PRIVS, PR_GET_NO_NEW_PRIVS, 1);
  probe.add(
      kSubject, "machine check policy (PR_MCE_KILL)",
      [] {
        return answer(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0UL, 0UL), "prctl");
      },
      [] { return option(PR_MCE_KILL_GET); });
  // PR_SET_MDWE and PR_GET_MDWE of linux/prctl.h
  add_option(probe, "no new code (PR_SET_MDWE)", 65, 66, 1);
  probe.add_check(
      kSubject, "AMX (ARCH_REQ_XCOMP_PERM)",
      [] { return answer(syscall(SYS_arch_prctl, kRequestState, kTileData), "arch_prctl"); },
      []() -> Problem {
        unsigned long allowed = 0;
        if (syscall(SYS_arch_prctl, kGetState, &allowed) != 0) return because("arch_prctl");
        if ((allowed >> kTileData & 1) == 0) return "it may not use it";
        return use_tiles() ? std::nullopt : Problem("tiles do not hold what is put into them");
      });
  add_option(probe, "IO flusher (PR_SET_IO_FLUSHER)", PR_SET_IO_FLUSHER, PR_GET_IO_FLUSHER, 1);
  probe.add(
      kSubject, "umask",
      [] {
        umask(0027);
        return Problem();
      },
      [] { return status_lines("Umask"); });
  probe.add(kSubject, "limits (setrlimit)", set_limits, limits);
  probe.add_for_thread(
      kSubject, "name of a thread",
      [] { return answer(prctl(PR_SET_NAME, "state-worker"), "prctl"); },
      [] { return line_of("/proc/thread-self/comm"); });
  probe.add_for_thread(
      kSubject, "capabilities of a thread", [] { return Problem(); },
      [] { return status_lines("CapInh CapPrm CapEff CapBnd CapAmb"); });
}

}  // namespace stasis::workloads
