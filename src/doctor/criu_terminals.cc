// Terminals that no session has as its own: CRIU 4.2.1 looks for their other ends.
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <charconv>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "proc/descriptors.h"
#include "proc/served_files.h"

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
constexpr Kind kOfLeader{
    "terminal-session", Severity::kYellow,
    "has a controlling terminal that is of the tree, which a restore gives to the leader of its "
    "session alone",
    "nothing, if it neither opens /dev/tty nor reads the terminal in the background"};

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
      const unsigned first = major(status->st_rdev);
      const unsigned second = minor(status->st_rdev);
      if (first == kPtmxMajor && second == kPtmxMinor)
        masters.insert({index_of_master(info.pid, file.descriptor), {info.pid, file.descriptor}});
      if (first < kSlaveFirst || first > kSlaveLast) continue;
      const int index = static_cast<int>((first - kSlaveFirst) * kPerMajor + second);
      slaves.insert({{index, info.pid.value}, {info.pid, file.path}});
    }
  }
  for (const auto& [index, at] : masters)
    if (has_hung_up(at.first, at.second))
      out.add(at.first, kHungUp, fmt::format("terminal {} (descriptor {})", index, at.second));
  for (const proc::ProcessInfo& info : processes) {
    const auto device = static_cast<dev_t>(static_cast<unsigned>(info.tty));
    if (major(device) < kSlaveFirst || major(device) > kSlaveLast) continue;
    const int index = static_cast<int>((major(device) - kSlaveFirst) * kPerMajor + minor(device));
    if (info.session != info.pid.value && masters.contains(index))
      out.add(info.pid, kOfLeader, fmt::format("of session {}", info.session));
  }
  if (is_shell_job) return;
  for (const auto& [key, slave] : slaves)
    if (!masters.contains(key.first)) out.add(slave.first, kTerminal, slave.second);
}

}  // namespace stasis::doctor
