#include "sim/registry.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace stasis::sim {
namespace {

constexpr char kOwnerMagic[16] = "stasis-sim-own1";
constexpr char kObjectMagic[16] = "stasis-sim-mem1";
constexpr std::uint64_t kPage = 4096;

struct OwnerHeader {
  char magic[16];
  char name[16];
};

struct OwnerRecord {
  ObjectId id;
  std::uint64_t size;
};

// The owner files that this process has locked. A POSIX lock is lost as soon as ANY descriptor of
// the file is closed in the process, so these must never be opened a second time here.
struct Own {
  std::atomic<std::uint64_t> nonce{0};
  std::atomic<int> fd{-1};
  std::atomic<std::uint64_t> gpu{0};  // the UUID's first half: enough to tell our few GPUs apart
};
constexpr int kOwnSlots = 64;
Own own_files[kOwnSlots];
std::atomic<std::uint64_t> process_nonce{0};

std::uint64_t half(const cuda::CUuuid& uuid) {
  std::uint64_t value;
  std::memcpy(&value, uuid.bytes, sizeof value);
  return value;
}

std::uint64_t nonce() {
  if (process_nonce.load() == 0) renew_nonce();
  return process_nonce.load();
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

bool parse_hex(const char* text, std::uint64_t& out) {
  char* end = nullptr;
  out = std::strtoull(text, &end, 16);
  return end == text + 16;
}

// readdir allocates with the program's malloc, which the restore thread must not touch.
template <class F>
bool for_each_name(const std::string& folder, F&& f) {
  Fd dir(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!dir) return errno == ENOENT;
  alignas(8) char buffer[8192];
  for (;;) {
    const long n = syscall(SYS_getdents64, dir.get(), buffer, sizeof buffer);
    if (n <= 0) return n == 0;
    for (long at = 0; at < n;) {
      unsigned short length;
      std::memcpy(&length, buffer + at + 16, sizeof length);
      f(static_cast<const char*>(buffer + at + 19));
      at += length;
    }
  }
}

// Changes between processes: a POSIX lock on a file that is opened for it. Not flock, which a
// forked child would inherit and keep.
class Lock {
 public:
  explicit Lock(const std::string& folder)
      : file_(::open((folder + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    int rc = -1;
    while (file_ && (rc = ::fcntl(file_.get(), F_SETLKW, &lock)) < 0 && errno == EINTR) {
    }
    if (rc < 0) file_.reset();
  }
  explicit operator bool() const { return static_cast<bool>(file_); }

 private:
  Fd file_;
};

struct Owner {
  std::uint64_t nonce = 0;
  bool alive = false;
  pid_t pid = 0;
  OwnerHeader header{};
  std::vector<OwnerRecord> records;
};

bool read_records(int fd, Owner& owner) {
  if (::pread(fd, &owner.header, sizeof owner.header, 0) != sizeof owner.header) return false;
  if (std::memcmp(owner.header.magic, kOwnerMagic, sizeof kOwnerMagic) != 0) return false;
  OwnerRecord block[128];
  off_t at = sizeof(OwnerHeader);
  for (;;) {
    const auto n = ::pread(fd, block, sizeof block, at);
    if (n <= 0) return n == 0;
    const auto count = static_cast<std::size_t>(n) / sizeof(OwnerRecord);
    for (std::size_t i = 0; i < count; ++i) {
      if (block[i].size) owner.records.push_back(block[i]);
    }
    if (count == 0) return true;
    at += static_cast<off_t>(count * sizeof(OwnerRecord));
  }
}

Owner read_owner(const std::string& folder, const char* name, const cuda::CUuuid& gpu) {
  Owner owner;
  if (!parse_hex(name + 6, owner.nonce)) return owner;
  for (auto& own : own_files) {
    if (own.nonce.load() == owner.nonce && own.gpu.load() == half(gpu)) {
      owner.alive = true;
      owner.pid = ::getpid();
      read_records(own.fd.load(), owner);
      return owner;
    }
  }
  Fd file(::open((folder + "/" + name).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!file) return owner;
  struct flock lock {};
  lock.l_type = F_WRLCK;
  if (::fcntl(file.get(), F_GETLK, &lock) < 0 || lock.l_type == F_UNLCK) return owner;
  owner.alive = read_records(file.get(), owner);
  owner.pid = lock.l_pid > 0 ? lock.l_pid : 0;
  return owner;
}

std::vector<Owner> read_owners(const std::string& dir, const cuda::CUuuid& gpu) {
  const auto folder = dir + "/" + to_text(gpu);
  std::vector<Owner> owners;
  for_each_name(folder, [&](const char* name) {
    if (std::strncmp(name, "owner-", 6) == 0) owners.push_back(read_owner(folder, name, gpu));
  });
  return owners;
}

Usage add_up(const std::vector<Owner>& owners) {
  Usage usage;
  std::vector<std::pair<ObjectId, std::uint64_t>> seen;
  for (const auto& owner : owners) {
    if (!owner.alive) continue;
    Usage::Process process;
    process.pid = owner.pid;
    process.name.assign(owner.header.name, ::strnlen(owner.header.name, sizeof owner.header.name));
    for (const auto& record : owner.records) {
      process.bytes += record.size;
      seen.emplace_back(record.id, record.size);
    }
    usage.processes.push_back(process);
  }
  auto key = [](const auto& a) { return std::pair(a.first.owner, a.first.id); };
  std::sort(seen.begin(), seen.end(), [&](auto& a, auto& b) { return key(a) < key(b); });
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (i == 0 || !(seen[i].first == seen[i - 1].first)) usage.used += seen[i].second;
  }
  return usage;
}

void sweep_locked(const std::string& dir, const cuda::CUuuid& gpu) {
  const auto folder = dir + "/" + to_text(gpu);
  const auto owners = read_owners(dir, gpu);
  for_each_name(folder, [&](const char* name) {
    std::uint64_t id = 0;
    const bool is_owner = std::strncmp(name, "owner-", 6) == 0;
    const bool is_memory = std::strncmp(name, "mem-", 4) == 0;
    if (!is_owner && !is_memory) return;
    if (!parse_hex(name + (is_owner ? 6 : 4), id)) return;
    const bool alive = std::any_of(owners.begin(), owners.end(),
                                   [&](const Owner& o) { return o.alive && o.nonce == id; });
    if (!alive) ::unlink((folder + "/" + name).c_str());
  });
}

bool make_folder(const std::string& dir, const cuda::CUuuid& gpu) {
  if (::mkdir(dir.c_str(), 0700) < 0 && errno != EEXIST) return false;
  return ::mkdir((dir + "/" + to_text(gpu)).c_str(), 0700) == 0 || errno == EEXIST;
}

}  // namespace

void Fd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

std::uint64_t random_id() {
  std::uint64_t value = 0;
  while (value == 0) {
    if (::getrandom(&value, sizeof value, 0) != sizeof value) value = 0;
  }
  return value;
}

void forget_own_files() {
  for (auto& slot : own_files) {
    const int fd = slot.fd.exchange(-1);
    if (slot.nonce.exchange(0) != 0 && fd >= 0) ::close(fd);
  }
}

void renew_nonce() { process_nonce.store(random_id()); }

Usage usage(const std::string& dir, const cuda::CUuuid& gpu) {
  return add_up(read_owners(dir, gpu));
}

bool sweep(const std::string& dir, const cuda::CUuuid& gpu) {
  if (!make_folder(dir, gpu)) return false;
  Lock lock(dir + "/" + to_text(gpu));
  if (!lock) return false;
  sweep_locked(dir, gpu);
  return true;
}

void note_switch(const std::string& dir, const cuda::CUuuid& gpu) {
  const auto name = dir + "/" + to_text(gpu) + "/switched";
  const Fd file(::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  const std::uint64_t by = nonce();
  (void)!::pwrite(file.get(), &by, sizeof by, 0);
}

std::int64_t last_switch(const std::string& dir, const cuda::CUuuid& gpu) {
  const auto name = dir + "/" + to_text(gpu) + "/switched";
  const Fd file(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat st;
  std::uint64_t by = 0;
  if (!file || ::fstat(file.get(), &st) < 0) return 0;
  if (::pread(file.get(), &by, sizeof by, 0) != sizeof by || by == nonce()) return 0;
  return st.st_mtim.tv_sec * std::int64_t{1'000'000'000} + st.st_mtim.tv_nsec;
}

bool read_trailer(int file, ObjectTrailer& out) {
  struct stat st;
  if (::fstat(file, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size <= off_t{kPage}) return false;
  if (::pread(file, &out, sizeof out, st.st_size - off_t{kPage}) != sizeof out) return false;
  return std::memcmp(out.magic, kObjectMagic, sizeof kObjectMagic) == 0 &&
         out.size == static_cast<std::uint64_t>(st.st_size) - kPage;
}

Fd open_object(const std::string& dir, const cuda::CUuuid& gpu, const ObjectId& id) {
  const auto path = dir + "/" + to_text(gpu) + "/mem-" + hex(id.owner) + "-" + hex(id.id);
  return Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
}

Holding::Holding(const std::string& dir, const GpuSpec& gpu) : dir_(dir), gpu_(gpu) {}
Holding::~Holding() { close(); }

std::string Holding::folder() const { return dir_ + "/" + to_text(gpu_.uuid); }

// Adopted objects lie under our own nonce as well, so that they are swept with us.
std::string Holding::path(const ObjectId& id) const {
  return folder() + "/mem-" + hex(nonce()) + "-" + hex(id.id);
}

bool Holding::open() {
  if (!make_folder(dir_, gpu_.uuid)) return false;
  Lock lock(folder());
  if (!lock) return false;
  sweep_locked(dir_, gpu_.uuid);
  const auto name = folder() + "/owner-" + hex(nonce());
  Fd file(::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) return false;
  struct flock own {};
  own.l_type = F_WRLCK;
  if (::fcntl(file.get(), F_SETLK, &own) < 0) return false;
  OwnerHeader header{};
  std::memcpy(header.magic, kOwnerMagic, sizeof kOwnerMagic);
  if (Fd comm(::open("/proc/self/comm", O_RDONLY | O_CLOEXEC)); comm) {
    const auto n = ::read(comm.get(), header.name, sizeof header.name - 1);
    if (n > 0 && header.name[n - 1] == '\n') header.name[n - 1] = 0;
  }
  if (::pwrite(file.get(), &header, sizeof header, 0) != sizeof header) return false;
  for (auto& slot : own_files) {
    if (slot.nonce.load() != 0) continue;
    slot.fd.store(file.get());
    slot.gpu.store(half(gpu_.uuid));
    slot.nonce.store(nonce());
    break;
  }
  file_ = std::move(file);
  return true;
}

void Holding::close() {
  if (!file_) return;
  for (const auto& [id, size] : objects_) {
    if (size) ::unlink(path(id).c_str());
  }
  objects_.clear();
  ::unlink((folder() + "/owner-" + hex(nonce())).c_str());
  forget();
}

void Holding::forget() {
  for (auto& slot : own_files) {
    if (file_ && slot.fd.load() == file_.get()) {
      slot.nonce.store(0);
      slot.fd.store(-1);
    }
  }
  nameless_.clear();
  file_.reset();
}

bool Holding::count(const ObjectId& id, std::uint64_t size) {
  std::size_t slot = 0;
  while (slot < objects_.size() && objects_[slot].second)
    ++slot;
  if (slot == objects_.size()) objects_.emplace_back();
  const OwnerRecord record{id, size};
  const auto at = static_cast<off_t>(sizeof(OwnerHeader) + slot * sizeof record);
  if (::pwrite(file_.get(), &record, sizeof record, at) != sizeof record) return false;
  objects_[slot] = {id, size};
  return true;
}

Holding::Outcome Holding::create(std::uint64_t size, ObjectKind kind, ObjectId& id, Fd& file) {
  Lock lock(folder());
  if (!lock) return Outcome::kFailed;
  if (size > gpu_.capacity) return Outcome::kFull;
  if (size > gpu_.capacity - std::min(gpu_.capacity, usage(dir_, gpu_.uuid).used)) {
    return Outcome::kFull;
  }
  id = {nonce(), random_id()};
  file.reset(::open(path(id).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  ObjectTrailer trailer{};
  std::memcpy(trailer.magic, kObjectMagic, sizeof kObjectMagic);
  trailer.id = id;
  trailer.size = size;
  trailer.gpu = gpu_.uuid;
  trailer.kind = kind;
  const auto length = static_cast<off_t>(size + kPage);
  if (file && ::ftruncate(file.get(), length) == 0 &&
      ::pwrite(file.get(), &trailer, sizeof trailer, static_cast<off_t>(size)) == sizeof trailer &&
      count(id, size)) {
    return Outcome::kOk;
  }
  ::unlink(path(id).c_str());
  return errno == ENOSPC ? Outcome::kFull : Outcome::kFailed;
}

Holding::Outcome Holding::adopt(const ObjectTrailer& object, int file) {
  Lock lock(folder());
  if (!lock) return Outcome::kFailed;
  // The creator may let go of its name, or have done so already: then the descriptor is all there
  // is.
  const auto source = "/proc/self/fd/" + std::to_string(file);
  const std::string ours = path(object.id);
  int done = ::linkat(AT_FDCWD, source.c_str(), AT_FDCWD, ours.c_str(), AT_SYMLINK_FOLLOW);
  // A container has the folder by a mount of its own, across which the kernel makes no links.
  if (done < 0 && errno == EXDEV) {
    const auto theirs = folder() + "/mem-" + hex(object.id.owner) + "-" + hex(object.id.id);
    done = ::link(theirs.c_str(), ours.c_str());
  }
  if (done < 0 && errno == ENOENT) {
    Fd held(::open(source.c_str(), O_RDWR | O_CLOEXEC));
    if (!held) return Outcome::kFailed;
    nameless_.emplace_back(object.id, std::move(held));
    done = 0;
  }
  if (done < 0 && errno != EEXIST) return Outcome::kFailed;
  return count(object.id, object.size) ? Outcome::kOk : Outcome::kFailed;
}

Fd Holding::reopen(const ObjectId& id) const {
  for (const auto& [known, file] : nameless_) {
    if (known == id)
      return Fd(
          ::open(("/proc/self/fd/" + std::to_string(file.get())).c_str(), O_RDWR | O_CLOEXEC));
  }
  return Fd(::open(path(id).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
}

void Holding::drop(const ObjectId& id) {
  std::erase_if(nameless_, [&](const auto& one) { return one.first == id; });
  for (std::size_t slot = 0; slot < objects_.size(); ++slot) {
    if (!(objects_[slot].first == id) || !objects_[slot].second) continue;
    objects_[slot].second = 0;
    const OwnerRecord record{};
    const auto at = static_cast<off_t>(sizeof(OwnerHeader) + slot * sizeof record);
    if (::pwrite(file_.get(), &record, sizeof record, at) < 0) return;
    const bool held_twice = std::any_of(objects_.begin(), objects_.end(),
                                        [&](const auto& o) { return o.second && o.first == id; });
    if (!held_twice) ::unlink(path(id).c_str());
    return;
  }
}

bool Holding::shared(const ObjectId& id) const {
  for (const auto& owner : read_owners(dir_, gpu_.uuid)) {
    if (!owner.alive || owner.nonce == nonce()) continue;
    for (const auto& record : owner.records) {
      if (record.id == id) return true;
    }
  }
  return false;
}

std::uint64_t Holding::bytes() const {
  std::uint64_t sum = 0;
  for (const auto& object : objects_)
    sum += object.second;
  return sum;
}

}  // namespace stasis::sim
