#include "job/images.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <functional>
#include <iterator>
#include <string_view>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/host_name.h"
#include "base/json_record.h"
#include "base/json_text.h"
#include "base/units.h"
#include "image/directory.h"
#include "image/image_reader.h"
#include "image/removal.h"
#include "proc/procfs.h"
#include "proc/trusted_path.h"

namespace stasis::job {
namespace {

constexpr const char* kLock = "lock";
constexpr const char* kRemoving = ".removing";
constexpr std::size_t kDigits = 6;
constexpr std::size_t kMostLock = 4096;
constexpr std::size_t kMostCommand = 64 << 20;
// The kernel has to free the memory of a job whose `stasis run` was killed.
constexpr Seconds kInitTimeout{30};

// What an entry's name says: "000012.partial-..." is {12, ".partial-..."}.
struct Name {
  int number = 0;
  std::string_view rest;
};

std::optional<Name> parse(std::string_view text) {
  Name name;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), name.number);
  const auto digits = static_cast<std::size_t>(end - text.data());
  if (error != std::errc() || digits < kDigits || name.number <= 0) return std::nullopt;
  name.rest = text.substr(digits);
  if (!name.rest.empty() && name.rest.front() != '.') return std::nullopt;
  return name;
}

std::string done_name(const std::string& word) { return "done-" + word; }

struct Holder {
  std::string host;
  Pid pid;
  ProcessId init;  // the first process of the job; its number is 0 while there is none
};

void fields(auto& io, Described<Holder> auto& holder) {
  io("host", holder.host);
  io("pid", holder.pid);
  io("init", holder.init.pid);
  io("init_start", holder.init.start_ticks);
}

// The text cannot be relied on: it serves messages, and tells what to wait for. What others may
// have written is not read: it would have them wait for, or end, any process.
Holder read_holder(const UniqueFd& lock, const struct stat& kind) {
  const bool is_ours = kind.st_uid == ::geteuid() || kind.st_uid == 0;
  if (!is_ours || (kind.st_mode & (S_IWGRP | S_IWOTH)) != 0) return {};
  std::string text(kMostLock, '\0');
  const ssize_t got = ::pread(lock.get(), text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  return record_from_text<Holder>(text).value_or(Holder());
}

Result<void> write_holder(const UniqueFd& lock, const std::string& path, const Holder& holder) {
  const std::string text = record_to_text(holder) + "\n";
  if (::ftruncate(lock.get(), 0) != 0 ||
      ::pwrite(lock.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return fail(errno_error("cannot write " + path, errno));
  }
  return {};
}

// The lock of a killed `stasis run` is free a moment before the processes of its job are gone.
Result<void> wait_for_end(const Holder& before, const std::function<bool()>& stop) {
  if (before.init.pid.value <= 0 || before.host != host_name()) return {};
  const auto start = Clock::now();
  while (true) {
    if (!is_alive(before.init)) return {};
    if (stop && stop()) {
      return fail(ErrorCode::kInterrupted, "told to stop while another job comes to its end",
                  "start again");
    }
    if (since(start) > kInitTimeout) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return fail(ErrorCode::kTimeout,
              fmt::format("the job of a `stasis run` that was killed is still there (its first "
                          "process is {})",
                          before.init.pid.value),
              fmt::format("end it with `kill -9 {}`, then start again", before.init.pid.value));
}

// A run that was refused removes the lock that it has made, maybe between our open and our flock.
bool is_lock_of(const UniqueFd& dir, const struct stat& lock) {
  struct stat named {};
  return ::fstatat(dir.get(), kLock, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
         named.st_dev == lock.st_dev && named.st_ino == lock.st_ino;
}

}  // namespace

Images::~Images() {
  if (!dir_.valid()) return;
  if (made_lock_) (void)::unlinkat(dir_.get(), kLock, 0);
  if (made_folder_ && check_place()) (void)::rmdir(path_.c_str());
}

Result<Images> Images::open(const std::string& dir, const std::function<bool()>& stop) {
  Images images;
  std::error_code none;
  images.path_ = std::filesystem::absolute(dir, none).lexically_normal().string();
  while (images.path_.size() > 1 && images.path_.back() == '/')
    images.path_.pop_back();
  images.made_folder_ = ::mkdir(images.path_.c_str(), 0700) == 0;
  if (!images.made_folder_ && errno != EEXIST) {
    Error error = errno_error("cannot make the directory " + images.path_, errno);
    error.remedy = "name one whose parent exists and may be written";
    return fail(std::move(error));
  }
  const auto not_writable = [](Error error) {
    if (error.remedy.empty()) error.remedy = "name a directory that this user may write to";
    return fail(std::move(error));
  };
  auto opened = open_file(AT_FDCWD, images.path_, O_RDONLY | O_DIRECTORY);
  if (!opened) return not_writable(std::move(opened.error()));
  images.dir_ = std::move(*opened);
  STASIS_TRY_ASSIGN(images.id_, folder_id(images.dir_));
  // Not waiting for another user who has taken a lease on it.
  constexpr int kLockFlags = O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK;
  auto lock = open_file(images.dir_.get(), kLock, kLockFlags | O_EXCL, 0600);
  const bool makes_lock = lock.has_value();
  if (!makes_lock) lock = open_file(images.dir_.get(), kLock, kLockFlags, 0600);
  if (!lock) return not_writable(std::move(lock.error()).within("locking " + images.path_));
  images.lock_ = std::move(*lock);
  struct stat kind {};
  if (::fstat(images.lock_.get(), &kind) != 0 || !is_regular_file(kind)) {
    return fail(ErrorCode::kNotPermitted, images.path_ + "/lock is not a regular file",
                "remove it, or name another directory");
  }
  const int taken = ::flock(images.lock_.get(), LOCK_EX | LOCK_NB) != 0 ? errno : 0;
  // Not earlier: a supervisor that has just got the lock writes which process its init is.
  const Holder before = read_holder(images.lock_, kind);
  if (taken != 0) {
    if (taken != EWOULDBLOCK) {
      Error error = errno_error("cannot lock " + images.path_ + "/lock", taken);
      error.remedy = "use a file system with locks, so that no image is restored twice at once";
      return fail(std::move(error));
    }
    const std::string who = before.pid.value > 0
                                ? fmt::format(", process {} on {}", before.pid.value, before.host)
                                : std::string();
    return fail(ErrorCode::kBusy,
                fmt::format("the job of {} is run by another `stasis run`{}", images.path_, who),
                "wait for its end, or give each job a directory of its own");
  }
  if (!is_lock_of(images.dir_, kind)) return open(dir, stop);
  images.made_lock_ = makes_lock;
  STASIS_TRY(wait_for_end(before, stop));
  auto written =
      write_holder(images.lock_, images.path_ + "/lock", {host_name(), Pid{::getpid()}, {}});
  STASIS_TRY(std::move(written));
  return images;
}

std::vector<std::string> Images::who_may_rename() const {
  return proc::doubts_of_path(path_, proc::sudo_caller());
}

Result<void> Images::check_place() const {
  STASIS_TRY_ASSIGN(const auto now, open_file(AT_FDCWD, path_, O_PATH | O_DIRECTORY));
  return check_folder(now, id_, path_);
}

std::string Images::path_of(int number) const {
  return fmt::format("{}/{:0{}}", path_, number, kDigits);
}

Result<void> Images::note_init(Pid init) const {
  Holder holder{host_name(), Pid{::getpid()}, {init}};
  if (const auto info = proc::ProcFs().process(init)) holder.init = info->id();
  return write_holder(lock_, path_ + "/lock", holder);
}

Result<Images::Cleared> Images::clear() const {
  STASIS_TRY(check_place());
  STASIS_TRY_ASSIGN(auto names, list_directory(dir_, path_));
  Cleared done;
  std::set<int> seen;
  for (const std::string& text : names) {
    const auto name = parse(text);
    if (!name || name->rest.empty()) continue;
    if (name->rest == kRemoving) {
      // NFS keeps what a process still has open (.nfs…), and that is no reason not to go on.
      if (auto gone = remove_image(dir_, text, path_ + "/" + text))
        done.removed.push_back(path_ + "/" + text);
      else
        done.failed.push_back(std::move(gone.error()));
      continue;
    }
    if (!seen.insert(name->number).second) continue;
    const std::string final = path_of(name->number);
    for (const Leftover& leftover : find_leftovers(final)) {
      // The job stood still until the image had its name, so the image has all of it.
      if (!leftover.complete || leftover.in_use == InUse::kYes) continue;
      if (!ImageReader::open(leftover.path)) continue;
      (void)::renameat2(AT_FDCWD, leftover.path.c_str(), AT_FDCWD, final.c_str(), RENAME_NOREPLACE);
    }
    auto cleared = clear_leftovers(final, false);
    if (!cleared) {
      done.failed.push_back(std::move(cleared.error()));
      continue;
    }
    std::move(cleared->removed.begin(), cleared->removed.end(), std::back_inserter(done.removed));
    std::move(cleared->failed.begin(), cleared->failed.end(), std::back_inserter(done.failed));
  }
  return done;
}

Result<std::vector<int>> Images::all() const {
  STASIS_TRY_ASSIGN(auto names, list_directory(dir_, path_));
  std::vector<int> numbers;
  for (const std::string& text : names) {
    const auto name = parse(text);
    if (!name || !name->rest.empty() || damaged_.contains(name->number)) continue;
    numbers.push_back(name->number);
  }
  std::sort(numbers.begin(), numbers.end(), std::greater<>());
  return numbers;
}

Result<std::vector<int>> Images::complete() const {
  STASIS_TRY_ASSIGN(auto numbers, all());
  std::erase_if(numbers, [&](int number) {
    const std::string manifest = fmt::format("{:0{}}/manifest.json", number, kDigits);
    return ::faccessat(dir_.get(), manifest.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) != 0;
  });
  return numbers;
}

Result<int> Images::next() const {
  STASIS_TRY_ASSIGN(auto names, list_directory(dir_, path_));
  int last = 0;
  for (const std::string& text : names) {
    if (const auto name = parse(text)) last = std::max(last, name->number);
  }
  return last + 1;
}

Result<void> Images::check_word(const std::string& word) {
  constexpr std::size_t kLongest = 64;
  const bool good = !word.empty() && word.size() <= kLongest &&
                    std::all_of(word.begin(), word.end(), [](unsigned char c) {
                      return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
                    });
  if (good) return {};
  return fail(ErrorCode::kUsage, fmt::format("'{}' cannot be a part of a file's name", word),
              "--once takes letters, digits, '.', '_' and '-', 64 at most: the job's number, say");
}

Result<void> Images::note_done(const std::string& word,
                               const std::vector<std::string>& command) const {
  const std::string name = done_name(word);
  const std::string fresh = name + ".new";
  const std::string path = path_ + "/" + name;
  (void)::unlinkat(dir_.get(), fresh.c_str(), 0);
  STASIS_TRY_ASSIGN(auto file,
                    open_file(dir_.get(), fresh, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  const std::string text = nlohmann::json{{"command", command}}.dump() + "\n";
  STASIS_TRY(write_all(file.get(), text.data(), text.size(), path));
  if (::fsync(file.get()) != 0 ||
      ::renameat(dir_.get(), fresh.c_str(), dir_.get(), name.c_str()) != 0 ||
      ::fsync(dir_.get()) != 0) {
    return fail(errno_error("cannot write " + path, errno));
  }
  return {};
}

bool Images::is_done(const std::string& word, const std::vector<std::string>& command) const {
  auto file = open_checked(dir_.get(), done_name(word), O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!file) return false;
  const auto text = read_file(*file, path_, kMostCommand);
  if (!text) return false;
  const auto json = parse_json(*text);
  return json.is_object() && json.value("command", nlohmann::json()) == nlohmann::json(command);
}

Result<std::vector<int>> Images::remove_old(int keep) const {
  STASIS_TRY_ASSIGN(auto numbers, complete());
  if (keep < 1 || numbers.size() <= static_cast<std::size_t>(keep)) return std::vector<int>();
  const int oldest = numbers[static_cast<std::size_t>(keep) - 1];
  STASIS_TRY_ASSIGN(auto names, list_directory(dir_, path_));
  std::vector<int> removed;
  std::optional<Error> first;
  const auto keep_first = [&](Error error) {
    if (!first) first = std::move(error);
  };
  for (const std::string& text : names) {  // sorted, and so by number
    const auto name = parse(text);
    if (!name || name->number >= oldest) continue;
    std::string doomed = text;
    if (name->rest.empty()) {
      // Renames it first: half an image must not be taken for an image.
      doomed += kRemoving;
      if (::renameat(dir_.get(), text.c_str(), dir_.get(), doomed.c_str()) != 0) {
        keep_first(errno_error("cannot remove " + path_ + "/" + text, errno));
        continue;
      }
      removed.push_back(name->number);
    }
    if (auto gone = remove_image(dir_, doomed, path_ + "/" + doomed); !gone)
      keep_first(std::move(gone.error()));
  }
  if (first) return fail(std::move(*first));
  return removed;
}

std::vector<std::string> images_of_job(const std::string& dir) {
  if (::access((dir + "/manifest.json").c_str(), F_OK) == 0) return {};
  const auto folder = open_file(AT_FDCWD, dir, O_RDONLY | O_DIRECTORY);
  const auto names = folder ? list_directory(*folder, dir) : Result<std::vector<std::string>>();
  if (!folder || !names) return {};
  std::map<int, std::string, std::greater<>> images;
  for (const std::string& text : *names) {
    const auto name = parse(text);
    if (!name || !name->rest.empty()) continue;
    std::string path = fmt::format("{}/{}", dir, text);
    if (::access((path + "/manifest.json").c_str(), F_OK) == 0)
      images.emplace(name->number, std::move(path));
  }
  std::vector<std::string> paths;
  for (auto& [number, path] : images)
    paths.push_back(std::move(path));
  return paths;
}

std::string image_in(const std::string& dir) {
  auto images = images_of_job(dir);
  return images.empty() ? dir : std::move(images.front());
}

}  // namespace stasis::job
