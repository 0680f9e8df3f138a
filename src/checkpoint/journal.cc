#include "checkpoint/journal.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/fd.h"
#include "base/json_record.h"
#include "checkpoint/process_tree.h"
#include "checkpoint/state_file.h"
#include "checkpoint/swap_record.h"
#include "proc/proc_mount.h"
#include "proc/trusted_path.h"

namespace stasis {

void fields(auto& io, Described<ProcessId> auto& process) {
  io("pid", process.pid);
  io("start_ticks", process.start_ticks);
}

void fields(auto& io, Described<JournalTarget> auto& target) {
  io("pid", target.pid);
  io("start_ticks", target.start_ticks);
  io.named("initial", target.initial, cuda_state_name, cuda_state_from_name);
}

void fields(auto& io, Described<JournalRecord> auto& record) {
  io.named("operation", record.operation, &RecordedOperation::name, RecordedOperation::from_name);
  io("root", record.root);
  io("owner", record.owner.pid);
  io.optional("owner_start_ticks", record.owner.start_ticks);
  io("image", record.image);
  io("targets", record.targets);
  io.optional("gpu_map", record.gpu_map);
  io.optional("recovered", record.recovered);
  io.optional("takes_unread", record.takes_unread);
  io.optional("criu", record.criu);
  io.optional("ending", record.ending);
  io.optional("stepped", record.remote_calls);
}

namespace {

constexpr const char* kRecordEnd = ".json";

std::string record_path(const std::string& directory, Pid root) {
  return fmt::format("{}/{}{}{}", directory, root.value, pid_namespace_mark(), kRecordEnd);
}

// Is it the record of a target that has its number in the PID namespace of that mark?
bool is_record_of(std::string_view name, const std::string& mark) {
  const std::string end = mark + kRecordEnd;
  if (!name.ends_with(end)) return false;
  name.remove_suffix(end.size());
  return !name.empty() && name.find_first_not_of("0123456789") == std::string_view::npos;
}

bool is_our_record(std::string_view name) { return is_record_of(name, pid_namespace_mark()); }

std::optional<JournalRecord> read_record(const std::string& path) {
  auto text = read_file(AT_FDCWD, path);
  if (!text) return std::nullopt;
  return record_from_text<JournalRecord>(*text);
}

Result<std::optional<JournalEntry>> read_entry(const std::string& path) {
  STASIS_TRY_ASSIGN(auto file, read_state_file(path));
  auto record = file ? record_from_text<JournalRecord>(file->text) : std::nullopt;
  if (!record) return std::optional<JournalEntry>();
  return std::optional<JournalEntry>(JournalEntry{std::move(*record), file->under_way});
}

// Held while an operation looks for overlaps and enters its own targets, so that of two operations
// on overlapping trees one sees the other. Released with the descriptor.
Result<UniqueFd> lock_directory(const std::string& directory) {
  const std::string path = directory + "/journal.lock";
  auto fd = open_file(AT_FDCWD, path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
  if (!fd) return fail(unwritable(std::move(fd.error()), path));
  if (TEMP_FAILURE_RETRY(::flock(fd->get(), LOCK_EX)) != 0)
    return fail(errno_error("cannot lock " + path, errno));
  return fd;
}

// kBusy if an operation under way on another root has one of `targets`.
Result<void> check_overlap(Pid root, const std::vector<JournalTarget>& targets) {
  STASIS_TRY_ASSIGN(auto entries, read_journal());
  for (const JournalEntry& entry : entries) {
    if (!entry.under_way || entry.record.root == root) continue;
    for (const JournalTarget& theirs : entry.record.targets) {
      for (const JournalTarget& ours : targets) {
        if (!may_be_same(ours, theirs)) continue;
        return fail(busy(entry.record, ours.pid));
      }
    }
  }
  return {};
}

// Takes the lock of the record on `root`; kBusy names the holder.
Result<UniqueFd> take(const std::string& path, Pid root) {
  STASIS_TRY_ASSIGN(auto lock, lock_state_file(path));
  if (lock) return std::move(*lock);
  if (auto other = read_record(path)) return fail(busy(*other, root));
  return fail(ErrorCode::kBusy,
              fmt::format("another operation is working on process {}", root.value), kWaitForIt);
}

Result<void> write_record(const std::string& path, const JournalRecord& record) {
  auto done = write_state_file(path, record_to_text(record),
                               [] { return fault(FaultPoint::kJournalWrite); });
  return done ? fault(FaultPoint::kJournalWritten) : done;
}

// Root's is in no folder in which another user could put another directory into its place between
// two looks. Root of a user namespace does not see whose the folders above are.
Result<void> check_way_to(const std::string& directory) {
  if (::geteuid() != 0 || proc::unknown_owner()) return {};
  std::error_code failed;
  const auto absolute = std::filesystem::absolute(directory, failed).string();
  const proc::TrustedPath judged = proc::judge_path(absolute);
  if (judged.why_not.empty()) return {};
  return fail(
      ErrorCode::kNotPermitted,
      fmt::format("another user could put another directory into the place of the state "
                  "directory {}: {}",
                  directory, judged.why_not),
      "set STASIS_STATE_DIR to a directory whose parents only root can change, or that have "
      "the sticky bit, such as /run/stasis or a new one in /tmp");
}

Result<std::string> made_private(std::string directory) {
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    Error error = errno_error("cannot make the state directory " + directory, errno);
    error.remedy = "make its parent, or name another by STASIS_STATE_DIR";
    return fail(std::move(error));
  }
  // In /tmp another user could have made it first.
  struct stat info {};
  if (::lstat(directory.c_str(), &info) != 0) {
    return fail(errno_error("cannot stat the state directory " + directory, errno));
  }
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 0022) != 0) {
    return fail(
        ErrorCode::kNotPermitted,
        fmt::format("the state directory {} is not a directory of this user alone: it belongs to "
                    "user {}, mode {:04o}",
                    directory, info.st_uid, info.st_mode & 07777),
        info.st_uid == ::geteuid()
            ? fmt::format("`chmod 700 {}` if it is a directory, otherwise remove it", directory)
            : "make a directory of your own and name it by STASIS_STATE_DIR, in each command about "
              "the same programs; or have root remove that one");
  }
  STASIS_TRY(check_way_to(directory));
  return directory;
}

}  // namespace

std::string command_name(const RecordedOperation& operation) {
  return is_done_by_criu(operation) ? operation.name() : "stasis " + operation.name();
}

std::string worker_name(const JournalRecord& record) {
  return record.recovered ? "stasis recover" : command_name(record.operation);
}

Error busy_with(const std::string& tool, Pid number, Pid pid, const std::string& remedy) {
  const auto info = proc::ProcFs().process(number);
  const bool stopped = info && info->state == 'T';
  return {ErrorCode::kBusy,
          fmt::format("{} is working on process {}{}", tool, pid.value,
                      stopped ? ", and is stopped" : ""),
          stopped ? fmt::format("let it go on (`kill -CONT {}`), then {}", number.value, remedy)
                  : remedy};
}

Error busy(const JournalRecord& record, Pid pid) {
  // A criu that is interrupted rolls nothing back.
  const bool is_criu = !record.recovered && is_done_by_criu(record.operation);
  return busy_with(
      fmt::format("`{}` (process {})", worker_name(record), record.owner.pid.value),
      record.owner.pid, pid,
      is_criu ? fmt::format("wait for it to end; if you have to end it, run `stasis recover {}` "
                            "after that",
                            record.root.value)
              : kWaitForIt);
}

std::vector<JournalTarget> journal_targets(const std::vector<TreeMember>& members) {
  std::vector<JournalTarget> targets;
  for (const TreeMember& member : members) {
    if (!member.initial) continue;
    targets.push_back({member.process.id(), *member.initial});
  }
  return targets;
}

std::string pid_namespace_mark() {
  struct stat info {};
  if (::stat("/proc/self/ns/pid", &info) != 0 || info.st_ino == proc::kInitialPidNamespace)
    return {};
  return fmt::format("@{}", info.st_ino);
}

Result<std::string> journal_directory() {
  // What is in it goes by numbers, and by the namespace that they are of.
  STASIS_TRY(proc::check_proc_mount());
  std::string directory;
  const char* chosen = std::getenv("STASIS_STATE_DIR");
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (chosen != nullptr && *chosen != '\0') {
    directory = chosen;
  } else if (::geteuid() == 0) {
    directory = "/run/stasis";
  } else if (runtime != nullptr && *runtime != '\0') {
    directory = std::string(runtime) + "/stasis";
  } else {
    directory = fmt::format("/tmp/stasis-{}", ::geteuid());
  }
  return made_private(std::move(directory));
}

Result<std::string> journal_subdirectory(const std::string& name) {
  auto directory = journal_directory();
  return directory ? made_private(*directory + "/" + name) : directory;
}

Result<std::optional<Journal>> Journal::adopt(Pid root) {
  STASIS_TRY_ASSIGN(auto directory, journal_directory());
  const std::string path = record_path(directory, root);
  STASIS_TRY_ASSIGN(auto lock, take(path, root));
  auto record = read_record(path);
  if (!record) {
    (void)::unlink((path + ".lock").c_str());
    return std::optional<Journal>();
  }
  record->owner = own_id();
  record->recovered = true;
  return std::optional<Journal>(Journal(std::move(lock), path, std::move(*record)));
}

Result<Journal> Journal::begin(JournalRecord record) {
  STASIS_TRY_ASSIGN(auto directory, journal_directory());
  const std::string path = record_path(directory, record.root);
  STASIS_TRY(fault(FaultPoint::kJournalBegin));
  auto lock = take(path, record.root);
  const bool can_do_without = record.operation == Operation::kResume;
  if (!lock && can_do_without && lock.error().code == ErrorCode::kNoSpace) lock = UniqueFd();
  if (!lock) return fail(std::move(lock.error()));
  record.owner = own_id();
  Journal journal(std::move(*lock), path, std::move(record));
  if (auto left = read_record(path)) {
    if (!left->ending.empty()) {
      return fail(ErrorCode::kBusy,
                  fmt::format("`stasis {}` was killed when it was about to end process {}",
                              left->operation.name(), left->root.value),
                  fmt::format("run `stasis recover {}` first", left->root.value));
    }
    journal.left_ = std::move(*left);
  }
  auto done = fault(FaultPoint::kJournalLocked);
  if (done) done = journal.write(journal.record_.targets);
  if (!done && can_do_without && done.error().code == ErrorCode::kNoSpace) {
    journal.unwritten_ = true;
    done = {};
  }
  if (!done) {
    journal.finish();
    return fail(std::move(done.error()));
  }
  return journal;
}

std::vector<JournalTarget> Journal::unclaimed(const std::vector<JournalTarget>& targets) const {
  std::vector<JournalTarget> out;
  for (const JournalTarget& left : left_.targets) {
    const bool claimed =
        std::any_of(targets.begin(), targets.end(),
                    [&](const JournalTarget& ours) { return may_be_same(ours, left); });
    if (!claimed) out.push_back(left);
  }
  return out;
}

Result<void> Journal::write(const std::vector<JournalTarget>& targets) const {
  JournalRecord all = record_;
  all.targets = targets;
  const std::vector<JournalTarget> others = unclaimed(targets);
  all.targets.insert(all.targets.end(), others.begin(), others.end());
  return write_record(path_, all);
}

Result<void> Journal::update(const std::vector<JournalTarget>& targets) {
  STASIS_TRY_ASSIGN(auto directory, journal_directory());
  auto alone = lock_directory(directory);
  if (!alone && !(unwritten_ && alone.error().code == ErrorCode::kNoSpace))
    return fail(std::move(alone.error()));
  STASIS_TRY(check_overlap(record_.root, targets));
  auto done = write(targets);
  if (!done && !(unwritten_ && done.error().code == ErrorCode::kNoSpace)) return done;
  record_.targets = targets;
  return {};
}

Result<void> Journal::forget_image() {
  record_.image.clear();
  return write(record_.targets);
}

Result<void> Journal::note_criu(ProcessId criu, bool takes_unread) {
  record_.criu = criu;
  record_.takes_unread = takes_unread;
  return write(record_.targets);
}

Result<void> Journal::note_ending(std::vector<ProcessId> tree) {
  record_.ending = std::move(tree);
  return write(record_.targets);
}

Result<void> Journal::note_remote_calls(std::vector<ProcessId> processes) {
  record_.remote_calls = std::move(processes);
  return write(record_.targets);
}

void Journal::finish() {
  fault_only(FaultPoint::kJournalFinish);
  // While it is held: lock_state_file() notices a lock file that has lost its name.
  JournalRecord left = left_;
  left.targets = unclaimed(record_.targets);
  if (left.targets.empty() || !write_record(path_, left)) (void)::unlink(path_.c_str());
  fault_only(FaultPoint::kJournalRemoved);
  (void)::unlink((path_ + ".lock").c_str());
  lock_.reset();
  fault_only(FaultPoint::kJournalFinished);
}

Result<void> check_not_busy(const std::vector<JournalTarget>& targets) {
  STASIS_TRY_ASSIGN(auto entries, read_journal());
  for (const JournalEntry& entry : entries) {
    if (!entry.under_way) continue;
    for (const JournalTarget& ours : targets) {
      const auto& theirs = entry.record.targets;
      const bool taken = entry.record.root == ours.pid ||
                         std::any_of(theirs.begin(), theirs.end(),
                                     [&](const JournalTarget& t) { return may_be_same(t, ours); });
      if (taken) return fail(busy(entry.record, ours.pid));
    }
  }
  return {};
}

void sweep_journal() {
  if (const auto directory = journal_directory()) {
    sweep_state_files(*directory, is_our_record);
    sweep_state_files(*directory, is_our_swap);
  }
}

std::optional<Pid> left_behind_with(const std::vector<JournalEntry>& entries,
                                    const ProcessId& process) {
  for (const JournalEntry& entry : entries) {
    const auto& targets = entry.record.targets;
    const auto is_it = [&](const JournalTarget& t) { return may_be_same(t, process); };
    if (!entry.under_way && std::any_of(targets.begin(), targets.end(), is_it))
      return entry.record.root;
  }
  return std::nullopt;
}

Result<std::vector<JournalEntry>> read_journal() {
  STASIS_TRY_ASSIGN(auto directory, journal_directory());
  return read_journal_in(directory, pid_namespace_mark());
}

Result<std::vector<JournalEntry>> read_journal_in(const std::string& directory,
                                                  const std::string& mark) {
  const DirectoryStream dir = list_open(directory);
  if (!dir) return fail(errno_error("cannot list " + directory, errno));
  std::vector<JournalEntry> entries;
  while (const dirent* item = ::readdir(dir.get())) {
    const std::string name = item->d_name;
    if (!is_record_of(name, mark)) continue;
    STASIS_TRY_ASSIGN(auto entry, read_entry(directory + "/" + name));
    if (entry) entries.push_back(std::move(*entry));
  }
  return entries;
}

std::vector<CutShortElsewhere> cut_short_elsewhere() {
  std::vector<CutShortElsewhere> out;
  const auto directory = journal_directory();
  const auto processes = proc::ProcFs().all();
  const DirectoryStream dir = list_open(directory ? *directory : std::string());
  const std::string own = pid_namespace_mark();
  while (const dirent* item = dir && processes ? ::readdir(dir.get()) : nullptr) {
    const std::string_view name = item->d_name;
    const auto number = name.substr(0, name.find_first_not_of("0123456789"));
    if (number.empty() || !name.ends_with(kRecordEnd)) continue;
    const std::string mark(
        name.substr(number.size(), name.size() - number.size() - std::strlen(kRecordEnd)));
    if (mark == own || (!mark.empty() && mark.front() != '@')) continue;
    const auto entry = read_entry(fmt::format("{}/{}", *directory, name));
    if (!entry || !*entry || (*entry)->under_way) continue;
    const auto seen =
        std::find_if(processes->begin(), processes->end(), [&](const proc::ProcessInfo& info) {
          return mark == fmt::format("@{}", proc::pid_namespace_of(info.pid));
        });
    // Where all are seen, a namespace without a process is gone.
    if (seen == processes->end() && own.empty()) continue;
    out.push_back({(*entry)->record.operation, seen == processes->end() ? Pid{} : seen->pid});
  }
  return out;
}

}  // namespace stasis
