#include "job/registry.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/json_record.h"
#include "checkpoint/journal.h"
#include "proc/procfs.h"

namespace stasis::job {

void fields(auto& io, Described<JobEntry> auto& entry) {
  io("name", entry.name);
  io("pid", entry.process.pid);
  io("start_ticks", entry.process.start_ticks);
  io("init", entry.init);
  io("root", entry.root);
  io("state_dir", entry.state_dir);
  io("images_dir", entry.images_dir);
  io("command", entry.command);
  io("streams", entry.streams);
}

namespace {

constexpr std::string_view kEntryEnd = ".job";
constexpr std::size_t kLongestName = 64;
constexpr std::size_t kMostEntry = 1 << 20;

Result<std::string> entries_directory() {
  STASIS_TRY_ASSIGN(auto state, journal_directory());
  // Others in other PID namespaces may share the state directory: their numbers mean nothing here.
  return state + "/jobs" + pid_namespace_mark();
}

// For a process that makes an entry; a process that only looks leaves nothing behind.
Result<std::string> make_entries_directory() {
  auto directory = entries_directory();
  if (directory && ::mkdir(directory->c_str(), 0700) != 0 && errno != EEXIST)
    return fail(errno_error("cannot make " + *directory, errno));
  return directory;
}

std::optional<JobEntry> read_entry_file(const std::string& path) {
  auto text = read_file(AT_FDCWD, path, kMostEntry);
  if (!text) return std::nullopt;
  auto entry = record_from_text<JobEntry>(*text);
  if (!entry) return std::nullopt;
  return is_alive(entry->process) ? entry : std::nullopt;
}

Result<void> write_entry_file(const std::string& path, const JobEntry& entry) {
  const std::string temporary = path + ".new";
  const std::string text = record_to_text(entry);
  STASIS_TRY_ASSIGN(
      auto fd, open_file(AT_FDCWD, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600));
  auto done = write_all(fd.get(), text.data(), text.size(), temporary);
  if (done && ::rename(temporary.c_str(), path.c_str()) != 0)
    done = fail(errno_error("cannot write " + path, errno));
  if (!done) (void)::unlink(temporary.c_str());
  return done;
}

// Held while a process looks whether a name is free, and takes it.
Result<UniqueFd> lock_entries(const std::string& directory) {
  STASIS_TRY_ASSIGN(auto fd, open_file(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  if (TEMP_FAILURE_RETRY(::flock(fd.get(), LOCK_EX)) != 0)
    return fail(errno_error("cannot lock " + directory, errno));
  return fd;
}

// Calls `each` with the path of every record there is.
template <class Each>
void for_each_entry(const std::string& directory, const Each& each) {
  const DirectoryStream dir = list_open(directory);
  while (const dirent* item = dir ? ::readdir(dir.get()) : nullptr) {
    const std::string name = item->d_name;
    if (name.ends_with(kEntryEnd)) each(fmt::format("{}/{}", directory, name));
  }
}

// 0 if it cannot be seen.
ino_t pid_namespace_of(Pid pid) {
  struct stat info {};
  const std::string path = fmt::format("/proc/{}/ns/pid", pid.value);
  return ::stat(path.c_str(), &info) == 0 ? info.st_ino : 0;
}

}  // namespace

Result<void> check_job_name(const std::string& name) {
  const bool characters = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
  });
  const bool begins = !name.empty() && std::isalpha(static_cast<unsigned char>(name[0])) != 0;
  if (begins && name.size() <= kLongestName && characters) return {};
  return fail(ErrorCode::kUsage, fmt::format("'{}' is no name for a job", name),
              fmt::format("take a letter, then letters, digits, '.', '_' and '-', {} at most",
                          kLongestName));
}

Result<Registration> Registration::enter(JobEntry entry) {
  STASIS_TRY(check_job_name(entry.name));
  STASIS_TRY_ASSIGN(const auto info, proc::ProcFs().process(entry.process.pid));
  entry.process = info.id();
  STASIS_TRY_ASSIGN(auto directory, make_entries_directory());
  STASIS_TRY_ASSIGN(const auto lock, lock_entries(directory));
  const std::string path = directory + "/" + entry.name + std::string(kEntryEnd);
  if (const auto other = read_entry_file(path); other && other->process.pid != entry.process.pid) {
    return fail(ErrorCode::kBusy,
                fmt::format("another job has the name {}: process {}", entry.name,
                            other->process.pid.value),
                "give it another --name, or end that one first");
  }
  // Removes what killed processes have left.
  for_each_entry(directory, [](const std::string& one) {
    if (!read_entry_file(one)) (void)::unlink(one.c_str());
  });
  STASIS_TRY(write_entry_file(path, entry));
  return Registration(path, std::move(entry));
}

Registration::~Registration() {
  if (!path_.empty()) (void)::unlink(path_.c_str());
}

Result<void> Registration::set_root(Pid root) {
  entry_.root = root;
  return write_entry_file(path_, entry_);
}

std::vector<JobEntry> all_jobs() {
  std::vector<JobEntry> out;
  const auto directory = entries_directory();
  if (!directory) return out;
  for_each_entry(*directory, [&](const std::string& path) {
    if (auto entry = read_entry_file(path)) out.push_back(std::move(*entry));
  });
  return out;
}

std::optional<JobEntry> find_job(const std::string& name) {
  const auto directory = entries_directory();
  if (!directory || !check_job_name(name)) return std::nullopt;
  return read_entry_file(*directory + "/" + name + std::string(kEntryEnd));
}

std::string name_of_job(Pid pid) {
  for (const JobEntry& entry : all_jobs())
    if (entry.init.value == 0 && entry.process.pid == pid) return entry.name;
  return {};
}

std::optional<JobEntry> job_of(Pid pid, const std::vector<JobEntry>& jobs) {
  const ino_t its = pid_namespace_of(pid);
  if (its == 0) return std::nullopt;
  for (const JobEntry& entry : jobs) {
    if (entry.init.value != 0 && pid_namespace_of(entry.init) == its) return entry;
  }
  return std::nullopt;
}

Result<Pid> number_inside(Pid pid) {
  STASIS_TRY_ASSIGN(auto details, proc::ProcFs().details(pid));
  return Pid{details.ns_pid};
}

namespace {

// As it is seen from here.
std::string state_directory_of(const JobEntry& job) {
  return fmt::format("/proc/{}/root{}", job.init.value, job.state_dir);
}

std::string mark_of(const JobEntry& job) { return fmt::format("@{}", pid_namespace_of(job.init)); }

}  // namespace

std::optional<SuspendedMemory> recall_suspended_of(const JobEntry& job, const Process& process) {
  const auto inside = number_inside(process.pid());
  if (!inside) return std::nullopt;
  return recall_suspended_in(state_directory_of(job), {*inside, process.info().start_ticks},
                             mark_of(job));
}

std::optional<JournalEntry> operation_on(const JobEntry& job, const ProcessId& process) {
  const auto inside = number_inside(process.pid);
  const auto journal = read_journal_in(state_directory_of(job), mark_of(job));
  if (!inside || !journal) return std::nullopt;
  for (const JournalEntry& entry : *journal)
    for (const JournalTarget& target : entry.record.targets)
      if (may_be_same(target, {*inside, process.start_ticks})) return entry;
  return std::nullopt;
}

}  // namespace stasis::job
