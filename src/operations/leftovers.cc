#include "operations/leftovers.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/fd.h"
#include "checkpoint/swap_record.h"
#include "criu/criu_files.h"
#include "direct/image_content.h"
#include "image/image_reader.h"
#include "image/manifest_format.h"
#include "operations/dump_terminals.h"
#include "operations/kept_files.h"
#include "operations/socket_state.h"

namespace stasis {

void decide_swaps(const ProcessTree& tree) {
  for (const TreeMember& member : tree.members())
    if (member.process.pid() == tree.root()) forget_swaps_of(member.process.id());
}

namespace {

bool is_ours_alone(const UniqueFd& folder) {
  struct stat info {};
  return ::fstat(folder.get(), &info) == 0 && info.st_uid == ::geteuid() &&
         (info.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// None of one that another user could have written, who may have made it only for the names in it,
// which are removed: also one with the name of ours, where that user may write beside the image.
std::optional<UniqueFd> criu_folder_of_half(const std::string& path) {
  const auto half = open_file(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!half || !is_ours_alone(*half)) return std::nullopt;
  auto criu = open_file(half->get(), std::string(manifest_format::kCriuFolder),
                        O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!criu || !is_ours_alone(*criu)) return std::nullopt;
  return std::move(*criu);
}

std::vector<NeededFile> files_of_half(const std::string& path) {
  const auto criu = criu_folder_of_half(path);
  return criu ? needed_files(*criu) : std::vector<NeededFile>();
}

}  // namespace

Result<void> clear_half_image(const std::string& path, bool keep_complete) {
  const auto needed = [](const std::string& leftover) { return who_needs(leftover).has_value(); };
  std::map<std::string, std::vector<NeededFile>> files;
  for (const Leftover& leftover : find_leftovers(path))
    files[leftover.path] = files_of_half(leftover.path);
  STASIS_TRY_ASSIGN(auto cleared, clear_leftovers(path, keep_complete, needed));
  for (const std::string& gone : cleared.removed)
    remove_links(files[gone]);
  if (cleared.failed.empty()) return {};
  return fail(std::move(cleared.failed.front()));
}

Result<void> clear_or_tell(const Environment& env, const std::string& path, bool keep_complete) {
  const std::string folder = std::filesystem::path(path).parent_path();
  if (struct stat info{};
      ::stat(folder.c_str(), &info) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
    env.tell(fmt::format("the folder to which the killed dump wrote is not there: {}", folder));
    return {};
  }
  auto cleared = clear_half_image(path, keep_complete);
  if (cleared || cleared.error().code != ErrorCode::kNotPermitted) return cleared;
  env.tell(fmt::format("what a killed dump has left stays: {}", cleared.error().to_string()));
  return {};
}

void put_terminals_right(const Environment& env, const JournalRecord& record) {
  const proc::ProcFs procfs;
  const bool is_there =
      std::any_of(record.targets.begin(), record.targets.end(), [&](const JournalTarget& target) {
        const auto info = procfs.process(target.pid);
        return info && may_be_same(target, info->id());
      });
  if (!writes_image(record.operation) || record.image.empty() || !is_there) return;
  std::vector<Pid> tree;
  for (const proc::ProcessInfo& info :
       procfs.tree(record.root).value_or(std::vector<proc::ProcessInfo>()))
    tree.push_back(info.pid);
  std::vector<std::string> images;
  // Of a dump that was about to end the tree, it has its name.
  if (!record.ending.empty()) images.push_back(record.image);
  for (const Leftover& leftover : find_leftovers(record.image))
    if (images.empty() && leftover.in_use == InUse::kNo &&
        leftover.path.starts_with(record.image + ".partial-"))
      images.push_back(leftover.path);
  for (const std::string& image : images) {
    const auto criu = criu_folder_of_half(image);
    if (!criu) continue;
    const DumpedTerminals terminals(*criu, tree, DumpedTerminals::Unread::kTaken);
    std::vector<std::string> failed;
    terminals.wait_again(failed, true);
    if (record.takes_unread) terminals.give_back(failed);
    tell_of_lost(env, failed, "terminals are not as they were");
  }
}

Result<void> note_criu(Journal& journal, Pid criu, bool takes_unread) {
  STASIS_TRY_ASSIGN(auto info, proc::ProcFs().process(criu));
  return journal.note_criu(info.id(), takes_unread);
}

Result<void> wait_for_criu(const Environment& env, const JournalRecord& record) {
  constexpr std::chrono::seconds kTimeout{60};
  constexpr std::chrono::milliseconds kPoll{10};
  if (!record.criu) return {};
  const auto start = Clock::now();
  for (Waiting waiting(env.progress);; waiting.tell()) {
    if (!is_alive(*record.criu)) return {};
    STASIS_TRY(env.interrupt.check());
    if (Clock::now() - start > kTimeout) break;
    std::this_thread::sleep_for(kPoll);
  }
  return fail(
      ErrorCode::kBusy,
      fmt::format("the criu of `{}` (process {}) still works on process {}",
                  command_name(record.operation), record.criu->pid.value, record.root.value),
      fmt::format("wait for it to end, or end it with `kill {}`; then recover again",
                  record.criu->pid.value));
}

Result<void> settle(const Environment& env, std::span<const JournalTarget> targets) {
  constexpr std::chrono::milliseconds kPoll{25};
  constexpr std::chrono::milliseconds kQuiet{500};
  constexpr std::chrono::seconds kLimit{60};
  // The driver moves gigabytes per second; what a program's own threads do is no sign of it.
  constexpr std::uint64_t kMoved = 1 << 20;
  struct Seen {
    std::optional<CudaState> state;
    std::uint64_t resident = 0;
  };
  const proc::ProcFs procfs;
  std::vector<Process> processes;
  for (const JournalTarget& target : targets) {
    auto process = Process::open(env.driver, target.pid);
    if (process && may_be_same(target, process->id())) processes.push_back(std::move(*process));
  }
  std::vector<Seen> last(processes.size());
  const auto start = Clock::now();
  auto changed = start;
  Waiting waiting(env.progress);
  while (!processes.empty() && Clock::now() - changed < kQuiet && Clock::now() - start < kLimit) {
    STASIS_TRY(env.interrupt.check());
    for (std::size_t i = 0; i < processes.size(); ++i) {
      Seen now;
      if (auto state = processes[i].cuda_state()) now.state = *state;
      if (auto bytes = procfs.resident_bytes(processes[i].pid())) now.resident = *bytes;
      const std::uint64_t moved = now.resident > last[i].resident ? now.resident - last[i].resident
                                                                  : last[i].resident - now.resident;
      // The driver moves nothing of a process that it lets run: what changes then is the program's
      // own doing, and one that allocates all the time would never be quiet.
      const bool moves = moved > kMoved && now.state != CudaState::kRunning;
      if (now.state != last[i].state || moves) changed = Clock::now();
      last[i] = now;
    }
    waiting.tell();
    std::this_thread::sleep_for(kPoll);
  }
  return {};
}

}  // namespace stasis
