// A program's arguments and environment, which lie in its memory and are what it likes.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/fd.h"
#include "proc/procfs.h"

namespace stasis::proc {
namespace {

// The beginning of them.
Result<std::string> read_words(const std::string& path) {
  STASIS_TRY_ASSIGN(const auto file, open_checked(AT_FDCWD, path, O_RDONLY, &is_regular_file));
  std::string text;
  std::array<char, 16384> piece{};
  while (text.size() < kMostWordBytes) {
    const ssize_t got = TEMP_FAILURE_RETRY(::read(file.get(), piece.data(), piece.size()));
    if (got < 0) return fail(errno_error("cannot read " + path, errno));
    if (got == 0) break;
    text.append(piece.data(), static_cast<std::size_t>(got));
  }
  return text;
}

std::vector<std::string> split_at_nul(const std::string& text) {
  std::vector<std::string> out;
  for (std::size_t begin = 0; begin < text.size() && out.size() < kMostWords;) {
    const std::size_t end = std::min(text.find('\0', begin), text.size());
    out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

}  // namespace

Error keeps_its_memory(Pid pid) {
  return Error{
      ErrorCode::kBusy,
      fmt::format(
          "the kernel does not let the memory of process {} be read: a thread "
          "of it waits in the middle of a change of its mappings, or of the start of another "
          "program (exec)",
          pid.value),
      "see what it waits for: `cat /proc/" + std::to_string(pid.value) +
          "/task/*/wchan`; a file system that a program serves (FUSE), or of another "
          "machine (NFS); end that, or the process"};
}

Result<std::vector<std::string>> ProcFs::words(Pid pid, const std::string& name) const {
  const std::string path = fmt::format("{}/{}/{}", root_, pid.value, name);
  auto text = call_within(pid, [path] { return read_words(path); });
  if (!text) return fail(keeps_its_memory(pid));
  if (!*text) return fail(why_unread(root_, pid, std::move(text->error())));
  return split_at_nul(**text);
}

Result<std::vector<std::string>> ProcFs::environment(Pid pid) const {
  return words(pid, "environ");
}

bool ProcFs::is_ending(Pid pid) const {
  constexpr std::uint64_t kExiting = 4;  // PF_EXITING of include/linux/sched.h
  constexpr std::uint64_t kKill = std::uint64_t{1} << (SIGKILL - 1);
  const auto all = threads(pid);
  return std::all_of(all.begin(), all.end(), [&](const Tid& one) {
    const auto status = thread_status(pid, one);
    const auto info = thread(pid, one);
    return !status || !info || info->has_ended() || (info->flags & kExiting) != 0 ||
           (status->pending & kKill) != 0;
  });
}

Error ProcFs::ended_error(const ProcessInfo& first) const {
  if (has_ended(first.pid) || is_ending(first.pid)) {
    return {ErrorCode::kZombie,
            fmt::format("process {} ({}) has exited and waits for its parent", first.pid.value,
                        first.comm),
            "nothing can be done with it; start the program again"};
  }
  return refusal(
      {"zombie-leader", Severity::kRed, first.pid,
       fmt::format("the first thread of process {} ({}) has ended, and others of it run on",
                   first.pid.value, first.comm),
       "let the program's first thread wait for the others (pthread_join instead of "
       "pthread_exit)"});
}

}  // namespace stasis::proc
