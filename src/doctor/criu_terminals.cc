// Terminals that no session has as its own: CRIU 4.2.1 looks for their other ends.
#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <termios.h>

#include <charconv>
#include <optional>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "proc/descriptors.h"
#include "proc/served_files.h"
#include "proc/terminal_state.h"

namespace stasis::doctor {
namespace {

constexpr Kind kTerminal{"terminal", Severity::kRed,
                         "has a terminal open whose other end is outside of the tree",
                         "dump with --shell-job, or start it with its input and output in files"};

constexpr Kind kHungUp{"hung-up-terminal", Severity::kRed,
                       "has a terminal whose other end is closed, as of a child that has ended; a "
                       "restore opens that end again, loses unread input, and the next read waits "
                       "for ever",
                       "let the program read the rest and close it"};
// CRIU asks each for its settings, which a terminal under N_NULL does not tell; of others it
// forgets the discipline.
constexpr Kind kDiscipline{
    "terminal-discipline", Severity::kRed,
    "has terminals under another line discipline than N_TTY, which CRIU does not dump or does not "
    "restore",
    "have the program set them to N_TTY (TIOCSETD with 0), or close them"};
constexpr Kind kOfLeader{
    "terminal-session", Severity::kYellow,
    "has a controlling terminal that is of the tree, which a restore gives to the leader of its "
    "session alone",
    "nothing, if it neither opens /dev/tty nor reads the terminal in the background"};

// Nothing if it is N_TTY, or cannot be told.
std::optional<int> other_discipline(Pid pid, int descriptor) {
  const auto process = Pidfd::open(pid);
  auto copy = process ? proc::take_nameless(pid, *process, descriptor) : Result<UniqueFd>();
  if (!process || !copy) return std::nullopt;
  int discipline = N_TTY;
  const bool is_told = ::ioctl(copy->get(), TIOCGETD, &discipline) == 0;
  proc::drop(std::move(*copy));
  return is_told && discipline != N_TTY ? std::optional(discipline) : std::nullopt;
}

bool has_hung_up(Pid pid, int descriptor) {
  const auto process = Pidfd::open(pid);
  auto copy = process ? proc::take_nameless(pid, *process, descriptor) : Result<UniqueFd>();
  if (!process || !copy) return false;
  pollfd state{copy->get(), 0, 0};
  const bool has = ::poll(&state, 1, 0) == 1 && (state.revents & POLLHUP) != 0;
  proc::drop(std::move(*copy));
  return has;
}

}  // namespace

int index_of_master(Pid pid, int descriptor) {
  constexpr std::string_view kKey = "tty-index:\t";
  const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/fdinfo/{}", pid.value, descriptor));
  const std::size_t at = text ? text->find(kKey) : std::string::npos;
  int index = -1;
  if (at != std::string::npos)
    std::from_chars(text->data() + at + kKey.size(), text->data() + text->size(), index);
  return index;
}

void probe_terminals(Facts& facts, const Processes& processes, const CriuOptions& options,
                     Signs& out) {
  const bool is_shell_job = options.shell_job || proc::is_shell_job(processes);
  std::map<int, std::pair<Pid, int>> masters;  // by terminal: a descriptor of it
  std::map<std::pair<int, int>, std::pair<Pid, std::string>> slaves;  // by terminal and process
  for (const proc::ProcessInfo& info : processes) {
    const auto files = facts.open_files(info.pid);
    if (!files) continue;
    for (const proc::OpenFile& file : *files) {
      if (facts.is_over()) return;
      // Those that have hung up are gone from /dev/pts, and dumped.
      if (!file.path.starts_with("/dev/") || file.path.ends_with(" (deleted)")) continue;
      const auto status =
          proc::known_status(fmt::format("/proc/{}/fd/{}", info.pid.value, file.descriptor));
      if (!status || !S_ISCHR(status->st_mode)) continue;
      const bool is_pty = proc::is_master(*status) || proc::is_slave(*status);
      const auto discipline =
          is_pty ? other_discipline(info.pid, file.descriptor) : std::optional<int>();
      if (discipline)
        out.add(info.pid, kDiscipline,
                fmt::format("{} (descriptor {}): {}", file.path, file.descriptor, *discipline));
      if (proc::is_master(*status))
        masters.insert({index_of_master(info.pid, file.descriptor), {info.pid, file.descriptor}});
      if (!proc::is_slave(*status)) continue;
      slaves.insert({{proc::index_of_slave(*status), info.pid.value}, {info.pid, file.path}});
    }
  }
  for (const auto& [index, at] : masters)
    if (has_hung_up(at.first, at.second))
      out.add(at.first, kHungUp, fmt::format("terminal {} (descriptor {})", index, at.second));
  for (const proc::ProcessInfo& info : processes) {
    struct stat terminal {};
    terminal.st_mode = S_IFCHR;
    terminal.st_rdev = static_cast<dev_t>(static_cast<unsigned>(info.tty));
    if (!proc::is_slave(terminal)) continue;
    const int index = proc::index_of_slave(terminal);
    if (info.session != info.pid.value && masters.contains(index))
      out.add(info.pid, kOfLeader, fmt::format("of session {}", info.session));
  }
  if (is_shell_job) return;
  for (const auto& [key, slave] : slaves)
    if (!masters.contains(key.first)) out.add(slave.first, kTerminal, slave.second);
}

}  // namespace stasis::doctor
