#include "job/registry.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/json_record.h"
#include "base/units.h"
#include "checkpoint/journal.h"
#include "checkpoint/state_file.h"
#include "proc/procfs.h"
#include "proc/served_files.h"

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
// All records of one user together: a megabyte that is no record takes longer to be judged than
// thousands of records.
constexpr std::size_t kMostOfUser = kMostEntry;

Result<std::string> entries_directory() {
  STASIS_TRY_ASSIGN(auto state, journal_directory());
  // Others in other PID namespaces may share the state directory: their numbers mean nothing here.
  return state + "/jobs" + pid_namespace_mark();
}

// For a process that makes an entry; a process that only looks leaves nothing behind.
Result<std::string> make_entries_directory() {
  auto directory = entries_directory();
  if (directory && ::mkdir(directory->c_str(), 0700) != 0 && errno != EEXIST)
    return fail(unwritable(errno_error("cannot make " + *directory, errno), *directory));
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
  auto opened = open_file(AT_FDCWD, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600);
  if (!opened) return fail(unwritable(std::move(opened.error()), temporary));
  const UniqueFd fd = std::move(*opened);
  auto done = write_all(fd.get(), text.data(), text.size(), temporary);
  if (!done) done = fail(unwritable(std::move(done.error()), temporary));
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

// Before Linux 5.6. Looked at before it is asked.
UniqueFd open_on_old_kernel(const UniqueFd& directory, const std::string& name, bool is_file) {
  const auto place = open_file(directory.get(), name, O_PATH | O_NOFOLLOW);
  if (!place || proc::is_served(Pid{::getpid()}, place->get())) return {};
  auto file = open_file(AT_FDCWD, fmt::format("/proc/self/fd/{}", place->get()),
                        O_RDONLY | O_NONBLOCK | (is_file ? 0 : O_DIRECTORY));
  return file ? std::move(*file) : UniqueFd();
}

// What a user may have put there: no link is followed, no file system of the user's is entered, and
// nothing but a directory or a file of that user alone is taken.
UniqueFd open_of_user(const UniqueFd& directory, const std::string& name, uid_t user,
                      bool is_file) {
  open_how how{};
  how.flags = static_cast<std::uint64_t>(O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK |
                                         (is_file ? 0 : O_DIRECTORY));
  how.resolve = RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_BENEATH;
  UniqueFd file(
      static_cast<int>(::syscall(SYS_openat2, directory.get(), name.c_str(), &how, sizeof how)));
  if (!file.valid() && errno == ENOSYS) file = open_on_old_kernel(directory, name, is_file);
  struct stat info {};
  const bool good = file.valid() && ::fstat(file.get(), &info) == 0 && info.st_uid == user &&
                    (info.st_mode & (S_IWGRP | S_IWOTH)) == 0 &&
                    (is_file ? S_ISREG(info.st_mode) : S_ISDIR(info.st_mode));
  if (!good) file.reset();
  return file;
}

std::optional<uid_t> user_from(std::string_view digits) {
  uid_t user = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), user);
  // As we write it: with zeros before it one user would have any number of directories.
  if (error != std::errc() || end != digits.data() + digits.size() || user == 0 ||
      std::to_string(user) != digits)
    return std::nullopt;
  return user;
}

// Of each user, and of what is no record, too, wherever it is: one user hides no other's, and keeps
// root not busy.
struct Allowance {
  std::size_t names = 1000;
  std::size_t bytes = kMostOfUser;
};

void add_jobs_of(uid_t user, const UniqueFd& state, Allowance& allowance,
                 std::vector<JobEntry>& out) {
  const UniqueFd jobs = open_of_user(state, "jobs" + pid_namespace_mark(), user, false);
  if (!jobs.valid()) return;
  const DirectoryStream dir = list_open(fmt::format("/proc/self/fd/{}", jobs.get()));
  while (const dirent* item = dir && allowance.names > 0 ? ::readdir(dir.get()) : nullptr) {
    --allowance.names;
    const std::string name = item->d_name;
    if (!name.ends_with(kEntryEnd)) continue;
    const UniqueFd file = open_of_user(jobs, name, user, true);
    auto text = file.valid() ? read_file(file, name, allowance.bytes) : std::string();
    if (!text) break;
    allowance.bytes -= text->size();
    auto entry = record_from_text<JobEntry>(*text);
    if (!entry || entry->init.value != 0 || name != entry->name + std::string(kEntryEnd)) continue;
    struct stat process {};
    const std::string path = fmt::format("/proc/{}", entry->process.pid.value);
    if (!check_job_name(entry->name) || !is_alive(entry->process) ||
        ::stat(path.c_str(), &process) != 0 || process.st_uid != user)
      continue;
    JobEntry plain;
    plain.name = entry->name;
    plain.process = entry->process;
    plain.root = entry->process.pid;
    out.push_back(std::move(plain));
  }
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

std::vector<JobEntry> own_jobs() {
  std::vector<JobEntry> out;
  const auto directory = entries_directory();
  if (!directory) return out;
  for_each_entry(*directory, [&](const std::string& path) {
    if (auto entry = read_entry_file(path)) out.push_back(std::move(*entry));
  });
  return out;
}

std::vector<JobEntry> all_jobs() {
  std::vector<JobEntry> out = own_jobs();
  auto of_users = jobs_of_users();
  std::move(of_users.begin(), of_users.end(), std::back_inserter(out));
  return out;
}

std::vector<JobEntry> jobs_of_users() {
  std::vector<JobEntry> out;
  const char* chosen = std::getenv("STASIS_STATE_DIR");
  if (::geteuid() != 0 || (chosen != nullptr && *chosen != '\0')) return out;
  // A user may have sixty-five thousand others (subuid(5)).
  constexpr std::chrono::seconds kLongest{3};
  const auto deadline = Clock::now() + kLongest;
  std::map<uid_t, Allowance> allowances;
  // As journal_directory() has it for a user: XDG_RUNTIME_DIR/stasis, or /tmp/stasis-UID.
  const auto search = [&](const char* top, std::string_view before, bool in_folder) {
    auto open = open_file(AT_FDCWD, top, O_RDONLY | O_DIRECTORY);
    if (!open) return;
    const DirectoryStream dir = list_open(top);
    while (const dirent* item = dir ? ::readdir(dir.get()) : nullptr) {
      const std::string_view name = item->d_name;
      if (!name.starts_with(before)) continue;
      const auto user = user_from(name.substr(before.size()));
      if (!user) continue;
      if (Clock::now() > deadline) return;
      Allowance& allowance = allowances[*user];
      if (!in_folder) {
        add_jobs_of(*user, open_of_user(*open, item->d_name, *user, false), allowance, out);
        continue;
      }
      // systemd mounts a tmpfs there, which is root's. The directory is the user's, who may have
      // mounted another file system on it, and serve that: it is looked at before it is asked.
      const auto runtime = open_file(open->get(), item->d_name, O_PATH | O_DIRECTORY | O_NOFOLLOW);
      if (runtime && !proc::is_served(Pid{::getpid()}, runtime->get()))
        add_jobs_of(*user, open_of_user(*runtime, "stasis", *user, false), allowance, out);
    }
  };
  search("/run/user", "", true);
  search("/tmp", "stasis-", false);
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
  const ino_t its = proc::pid_namespace_of(pid);
  if (its == 0) return std::nullopt;
  for (const JobEntry& entry : jobs) {
    if (entry.init.value != 0 && proc::pid_namespace_of(entry.init) == its) return entry;
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

std::string mark_of(const JobEntry& job) {
  return fmt::format("@{}", proc::pid_namespace_of(job.init));
}

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
