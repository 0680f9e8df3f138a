#include "checkpoint/journal.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace stasis {
namespace {

using nlohmann::json;

std::string record_path(const std::string& directory, Pid root) {
  return fmt::format("{}/{}.json", directory, root.value);
}

std::string to_text(const JournalRecord& record) {
  json targets = json::array();
  for (const JournalTarget& target : record.targets) {
    targets.push_back({{"pid", target.pid.value},
                       {"start_ticks", target.start_ticks},
                       {"initial", std::string(cuda_state_name(target.initial))}});
  }
  return json{{"operation", record.operation},
              {"root", record.root.value},
              {"owner", record.owner.value},
              {"image", record.image},
              {"targets", targets}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

std::optional<JournalRecord> from_text(const std::string& text) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) return std::nullopt;
  try {
    JournalRecord record;
    record.operation = object.at("operation").get<std::string>();
    record.root = Pid{object.at("root").get<int>()};
    record.owner = Pid{object.at("owner").get<int>()};
    record.image = object.at("image").get<std::string>();
    for (const json& item : object.at("targets")) {
      auto initial = cuda_state_from_name(item.at("initial").get<std::string>());
      if (!initial) return std::nullopt;
      record.targets.push_back(
          {Pid{item.at("pid").get<int>()}, item.at("start_ticks").get<std::uint64_t>(), *initial});
    }
    return record;
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

// Takes the lock file. Nothing if somebody else has it. Tries for some milliseconds, because
// whoever reads the journal holds each lock for a moment too.
Result<std::optional<UniqueFd>> try_lock(const std::string& path) {
  constexpr int kTries = 20;
  for (int tries = 0; tries < kTries; ++tries) {
    auto fd = open_file(AT_FDCWD, path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
    if (!fd) return fail(std::move(fd.error()));
    if (::flock(fd->get(), LOCK_EX | LOCK_NB) == 0) {
      // A lock on a file that its last holder has deleted protects nothing.
      struct stat info {};
      if (::fstat(fd->get(), &info) == 0 && info.st_nlink > 0) {
        return std::optional<UniqueFd>(std::move(*fd));
      }
      continue;
    }
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return fail(errno_error("cannot lock " + path, errno));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return std::optional<UniqueFd>();
}

// kBusy if an operation under way on another root has one of `targets`.
Result<void> check_overlap(Pid root, const std::vector<JournalTarget>& targets) {
  auto entries = read_journal();
  if (!entries) return fail(std::move(entries.error()));
  for (const JournalEntry& entry : *entries) {
    if (!entry.under_way || entry.record.root == root) continue;
    for (const JournalTarget& theirs : entry.record.targets) {
      for (const JournalTarget& ours : targets) {
        if (ours.pid != theirs.pid || ours.start_ticks != theirs.start_ticks) continue;
        return fail(ErrorCode::kBusy,
                    fmt::format("`stasis {}` (process {}) is working on process {}",
                                entry.record.operation, entry.record.owner.value, ours.pid.value),
                    "wait for it to end, or interrupt it");
      }
    }
  }
  return {};
}

Result<void> write_record(const std::string& path, const JournalRecord& record) {
  const std::string temporary = path + ".new";
  auto fd = open_file(AT_FDCWD, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600);
  if (!fd) return fail(std::move(fd.error()));
  const std::string text = to_text(record);
  if (auto done = write_all(fd->get(), text.data(), text.size(), temporary); !done) return done;
  if (auto done = fd->close(temporary); !done) return done;
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    return fail(errno_error("cannot write " + path, errno));
  }
  return {};
}

}  // namespace

Result<std::string> journal_directory() {
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
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return fail(errno_error("cannot make the state directory " + directory, errno));
  }
  // In /tmp somebody else could have made it first.
  struct stat info {};
  if (::lstat(directory.c_str(), &info) != 0) {
    return fail(errno_error("cannot look at the state directory " + directory, errno));
  }
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 0022) != 0) {
    return fail(
        ErrorCode::kNotPermitted,
        fmt::format("the state directory {} is not a directory of this user alone", directory),
        "remove it, or name another by STASIS_STATE_DIR");
  }
  return directory;
}

Result<Journal> Journal::adopt(JournalRecord record) {
  auto directory = journal_directory();
  if (!directory) return fail(std::move(directory.error()));
  const std::string path = record_path(*directory, record.root);
  auto lock = try_lock(path + ".lock");
  if (!lock) return fail(std::move(lock.error()));
  if (!*lock) {
    std::string holder = "another operation";
    if (auto text = read_file(AT_FDCWD, path)) {
      if (auto other = from_text(*text)) {
        holder = fmt::format("`stasis {}` (process {})", other->operation, other->owner.value);
      }
    }
    return fail(ErrorCode::kBusy,
                fmt::format("{} is working on process {}", holder, record.root.value),
                "wait for it to end, or interrupt it");
  }
  return Journal(std::move(**lock), path, std::move(record));
}

Result<Journal> Journal::begin(JournalRecord record) {
  record.owner = Pid{static_cast<int>(::getpid())};
  auto journal = adopt(std::move(record));
  if (!journal) return journal;
  if (auto done = write_record(journal->path_, journal->record_); !done) {
    return fail(std::move(done.error()));
  }
  return journal;
}

Result<void> Journal::update(const std::vector<JournalTarget>& targets) {
  if (auto free = check_overlap(record_.root, targets); !free) return free;
  record_.targets = targets;
  return write_record(path_, record_);
}

void Journal::finish() {
  // While it is held: try_lock() notices a lock file that has lost its name.
  (void)::unlink(path_.c_str());
  (void)::unlink((path_ + ".lock").c_str());
  lock_.reset();
}

Result<std::vector<JournalEntry>> read_journal() {
  auto directory = journal_directory();
  if (!directory) return fail(std::move(directory.error()));
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(directory->c_str()), ::closedir);
  if (!dir) return fail(errno_error("cannot list " + *directory, errno));
  std::vector<JournalEntry> entries;
  while (const dirent* item = ::readdir(dir.get())) {
    const std::string name = item->d_name;
    if (!name.ends_with(".json")) continue;
    const std::string path = *directory + "/" + name;
    auto text = read_file(AT_FDCWD, path);
    if (!text) continue;
    auto record = from_text(*text);
    if (!record) continue;
    auto lock = try_lock(path + ".lock");
    if (!lock) return fail(std::move(lock.error()));
    entries.push_back({std::move(*record), !lock->has_value()});
  }
  return entries;
}

}  // namespace stasis
