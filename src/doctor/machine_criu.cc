// CRIU, what it says about this machine, and its plugins.
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/fd.h"
#include "base/units.h"
#include "criu/criu.h"
#include "doctor/machine_parts.h"
#include "proc/procfs.h"

namespace stasis::doctor {
namespace {

constexpr std::chrono::seconds kCheckTimeout{20};
constexpr int kPollMs = 50;
// Only our plugin knows it (plugins/criu/restore_session.cc).
constexpr std::string_view kOurVariable = "STASIS_DEVICE_MAP";

std::string get_one() { return fmt::format("{} makes a private criu that works here", kGetCriu); }

// What a program wrote, and how it ended.
struct Outcome {
  bool ended = false;  // by itself and in time
  int status = 0;
  std::string output;
};

// Starts a program with nothing of ours but the environment, in a group of its own; standard output
// and standard error go to one file.
Result<Pid> start_alone(std::vector<std::string> arguments, const UniqueFd& output) {
  std::vector<char*> argv;
  for (std::string& argument : arguments)
    argv.push_back(argument.data());
  argv.push_back(nullptr);
  // As src/criu runs it: no plugins, no libraries but its own.
  std::vector<std::string> variables = {"CRIU_LIBS_DIR=/"};
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (!text.starts_with("LD_") && !text.starts_with("CRIU_")) variables.emplace_back(text);
  }
  std::vector<char*> envp;
  for (std::string& variable : variables)
    envp.push_back(variable.data());
  envp.push_back(nullptr);

  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&files, output.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&files, output.get(), STDERR_FILENO);
  sigset_t signals;
  ::sigfillset(&signals);
  ::posix_spawnattr_setsigdefault(&attributes, &signals);
  ::sigemptyset(&signals);
  ::posix_spawnattr_setsigmask(&attributes, &signals);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  ::posix_spawnattr_setflags(
      &attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  pid_t pid = 0;
  const int trouble =
      ::posix_spawn(&pid, argv.front(), &files, &attributes, argv.data(), envp.data());
  ::posix_spawn_file_actions_destroy(&files);
  ::posix_spawnattr_destroy(&attributes);
  if (trouble != 0) return fail(errno_error("cannot run " + arguments.front(), trouble));
  return Pid{pid};
}

// The group is killed when the program has ended, or the time is over, or at an interrupt.
Result<Outcome> run(std::vector<std::string> arguments, std::chrono::milliseconds timeout,
                    const Interrupt& interrupt) {
  const UniqueFd output(::memfd_create("doctor", MFD_CLOEXEC));
  if (!output.valid()) return fail(errno_error("cannot make a memory file", errno));
  STASIS_TRY_ASSIGN(const Pid started, start_alone(std::move(arguments), output));
  const pid_t pid = started.value;
  Outcome outcome;
  const auto start = Clock::now();
  while (!outcome.ended && since(start) < timeout && interrupt.check()) {
    // Seen, not reaped: as long as it is there, its number names its group and no other.
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
        info.si_pid == pid) {
      outcome.ended = true;
      break;
    }
    ::poll(nullptr, 0, kPollMs);
  }
  ::kill(-pid, SIGKILL);
  while (::waitpid(pid, &outcome.status, 0) < 0 && errno == EINTR) {
  }
  std::array<char, 4096> buffer;
  for (off_t at = 0; at < (1 << 20);) {
    const ssize_t got = ::pread(output.get(), buffer.data(), buffer.size(), at);
    if (got <= 0) break;
    outcome.output.append(buffer.data(), static_cast<std::size_t>(got));
    at += got;
  }
  return outcome;
}

// The last line that says "Error", or else the first one.
std::string last_error(std::string_view text) {
  std::string_view first;
  std::string_view last;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (first.empty()) first = line;
    if (line.find("Error") != std::string_view::npos) last = line;
  }
  if (last.empty()) last = first;
  last = last.substr(0, last.find_last_not_of(": ") + 1);  // CRIU goes on in the next line
  return std::string(last);
}

void probe_check(const Criu& criu, const Interrupt& interrupt, Obstacles& out) {
  auto outcome = run({criu.path(), "check", "--no-default-config"}, kCheckTimeout, interrupt);
  if (!interrupt.check()) return;
  constexpr ObstacleId kId = "criu-check";
  if (!outcome) {
    out.push_back(from_error(Severity::kRed, kId, outcome.error(), get_one()));
    return;
  }
  if (!outcome->ended) {
    out.push_back(red(
        kId, fmt::format("`{} check` did not end within {} s", criu.path(), kCheckTimeout.count()),
        "run it yourself and see where it hangs"));
    return;
  }
  if (WIFEXITED(outcome->status) && WEXITSTATUS(outcome->status) == 0) {
    out.push_back(green(kId, "`criu check` says that this kernel has all that CRIU needs"));
    return;
  }
  const std::string how = WIFEXITED(outcome->status)
                              ? fmt::format("exit status {}", WEXITSTATUS(outcome->status))
                              : fmt::format("killed by signal {}", WTERMSIG(outcome->status));
  const std::string said = last_error(outcome->output);
  out.push_back(red(kId,
                    fmt::format("`{} check` fails ({}): {}", criu.path(), how,
                                said.empty() ? "it says nothing" : said),
                    ::geteuid() == 0
                        ? "in a container, start it with --privileged; else the kernel lacks "
                          "something: `criu check -v4` tells more"
                        : "run as root; if it fails then too, `criu check -v4` tells more"));
}

}  // namespace

void probe_criu(const std::optional<std::string>& path, const Interrupt& interrupt,
                Obstacles& out) {
  auto criu = Criu::find(path);
  if (!criu) {
    out.push_back(from_error(Severity::kRed, "criu", criu.error(), get_one()));
    return;
  }
  // Older ones ask each internet socket for an option that is gone: "Can't get 1:16 opt".
  constexpr int kForNewKernels = 40200;
  const std::string release = proc::kernel_release();
  const std::string what = fmt::format("CRIU {} ({})", criu->version_text(), criu->path());
  if (criu->version() < kForNewKernels && kernel_at_least(release, 6, 16)) {
    out.push_back(red("criu",
                      fmt::format("{} cannot dump programs with internet sockets on Linux {}; 4.2 "
                                  "can",
                                  what, release),
                      get_one()));
  } else {
    out.push_back(green("criu", what));
  }
  if (interrupt.check()) probe_check(*criu, interrupt, out);
}

std::vector<std::string> plugin_directories() {
  const char* chosen = std::getenv("CRIU_LIBS_DIR");
  if (chosen != nullptr && *chosen != '\0') return {chosen};
  return {"/usr/lib/criu", "/usr/lib64/criu"};
}

void probe_plugin(const std::vector<std::string>& directories, Obstacles& out) {
  constexpr ObstacleId kId = "criu-plugin";
  bool any = false;
  for (const std::string& directory : directories) {
    const std::string file = directory + "/cuda_plugin.so";
    if (::access(file.c_str(), F_OK) != 0) continue;
    any = true;
    const auto content = read_file(AT_FDCWD, file, 256 << 20);
    if (!content) {
      out.push_back(from_error(Severity::kYellow, kId, content.error(),
                               "make it readable: plain criu loads it"));
    } else if (content->find(kOurVariable) != std::string::npos) {
      out.push_back(
          green(kId, fmt::format("{} is Stasis's: plain criu saves CUDA programs with it", file)));
    } else {
      out.push_back(
          yellow(kId,
                 fmt::format("{} is not Stasis's: plain criu acts on CUDA programs with "
                             "it; stasis does not load it",
                             file),
                 "for Stasis's there, put the cuda_plugin.so of stasis-criu-plugin (in the source: "
                 "plugins/criu) in its place"));
    }
  }
  if (any) return;
  out.push_back(green(kId, fmt::format("no cuda_plugin.so in {}: plain criu cannot save CUDA "
                                       "programs; stasis needs none",
                                       fmt::join(directories, ", "))));
}

}  // namespace stasis::doctor
