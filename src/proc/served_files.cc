#include "proc/served_files.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/nsfs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/call_within.h"
#include "base/file_systems.h"
#include "base/units.h"
#include "proc/mounts.h"
#include "proc/pagemap.h"
#include "proc/silent_child.h"

namespace stasis::proc {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::size_t kEntries = 512;

// On a disk of this machine, or in its memory: the kernel itself brings such a page. What is
// mounted on top of others (overlay) may be on any.
constexpr std::array<std::string_view, 12> kNear{"ext2",      "ext3",     "ext4",     "xfs",
                                                 "btrfs",     "f2fs",     "tmpfs",    "ramfs",
                                                 "hugetlbfs", "squashfs", "devtmpfs", "erofs"};

// Whether a user with fewer rights than ours may have mounted what the process sees: its mounts
// belong to a user namespace below ours. One above ours the kernel does not name (EPERM).
bool has_users_mounts(Pid process) {
  const auto space = open_file(AT_FDCWD, fmt::format("/proc/{}/ns/mnt", process.value), O_RDONLY);
  if (!space) return true;
  const UniqueFd owner(::ioctl(space->get(), NS_GET_USERNS));
  if (!owner.valid()) return errno != EPERM;
  struct stat theirs {};
  struct stat ours {};
  return ::fstat(owner.get(), &theirs) != 0 || ::stat("/proc/self/ns/user", &ours) != 0 ||
         theirs.st_ino != ours.st_ino || theirs.st_dev != ours.st_dev;
}

// An overlay asks the file systems below it with the rights of the user who has mounted it, so that
// the kernel does not keep others out of what that user serves.
bool is_served_type(Pid process, const std::string& type) {
  return type.starts_with("fuse") || (type == "overlay" && has_users_mounts(process));
}

// What a file system is asked for when such a file is opened, used and closed; a device, a pipe and
// a socket have calls of their own.
bool has_calls_of_its_system(const struct stat& info) {
  return S_ISREG(info.st_mode) || S_ISDIR(info.st_mode);
}

}  // namespace

bool may_be_far(const std::string& type) {
  return std::find(kNear.begin(), kNear.end(), type) == kNear.end();
}

namespace {

// Memory and pipes of the kernel's own, which are on no mount.
bool is_kernels(dev_t device) {
  const auto device_of = [](int file) {
    const UniqueFd own(file);
    const auto info = own.valid() ? known_status(own) : std::nullopt;
    return info ? info->st_dev : dev_t{0};
  };
  static const dev_t memory = device_of(::memfd_create("stasis", MFD_CLOEXEC));
  static const dev_t pipes = [&] {
    std::array<int, 2> ends{-1, -1};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return dev_t{0};
    ::close(ends[1]);
    return device_of(ends[0]);
  }();
  return device != 0 && (device == memory || device == pipes);
}

struct Asked {
  bool answers = true;  // within five seconds
  bool known = false;   // what it says
  struct statfs system {};
};

// A call that a program has begun to serve ends with that program alone: no signal ends it
// (request_wait_answer() of fs/fuse/dev.c), and a thread in one holds up the end of its process. So
// it is a child's, which keeps nothing of ours but a copy of the memory, and may be left behind.
Asked ask_by_a_child(const std::string& link) {
  constexpr std::chrono::seconds kLongest{5};
  void* const memory =
      ::mmap(nullptr, sizeof(Asked), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return {};
  auto* const told = static_cast<Asked*>(memory);
  *told = {};
  // A descriptor of ours is none of the child's.
  constexpr std::string_view kOurs = "/proc/self/";
  const std::string name = link.starts_with(kOurs)
                               ? fmt::format("/proc/{}/", ::getpid()) + link.substr(kOurs.size())
                               : link;
  const char* const path = name.c_str();
  const auto child = SilentChild::start([&] {
    ::syscall(SYS_close_range, 0U, ~0U, 0U);
    (void)!::chdir("/");
    told->known = ::statfs(path, &told->system) == 0;
  });
  Asked out;
  if (child.is_there()) out = child.ends_within(kLongest) ? *told : Asked{false, false, {}};
  ::munmap(memory, sizeof(Asked));
  return out;
}

// Of the file that a link of /proc leads to. Linux before 5.8 tells it of descriptors alone.
std::optional<std::uint64_t> mount_number(const std::string& link) {
  struct statx info {};
  if (::statx(AT_FDCWD, link.c_str(), AT_STATX_DONT_SYNC, STATX_MNT_ID, &info) == 0 &&
      (info.stx_mask & STATX_MNT_ID) != 0)
    return info.stx_mnt_id;
  constexpr std::string_view kDescriptors = "/fd/";
  constexpr std::string_view kKey = "mnt_id:";
  const std::size_t at = link.rfind(kDescriptors);
  if (at == std::string::npos) return std::nullopt;
  const auto told =
      read_file(AT_FDCWD, std::string(link).replace(at, kDescriptors.size(), "/fdinfo/"));
  const std::size_t key = told ? told->find(kKey) : std::string::npos;
  if (key == std::string::npos) return std::nullopt;
  return std::strtoull(told->c_str() + key + kKey.size(), nullptr, 10);
}

std::optional<Mount> mount_with(Pid process, std::optional<std::uint64_t> number) {
  const auto all = known_mounts(process);
  if (!all || !number) return std::nullopt;
  const auto mount = std::find_if(all->begin(), all->end(), [&](const Mount& one) {
    return static_cast<std::uint64_t>(one.id) == *number;
  });
  return mount == all->end() ? std::nullopt : std::optional(*mount);
}

// A process in a chroot does not see the mount of what lies around its root, which we may.
std::optional<Mount> mount_of(Pid process, const std::string& link) {
  const auto number = mount_number(link);
  auto mount = mount_with(process, number);
  return mount ? mount : mount_with(Pid{::getpid()}, number);
}

// Nothing is asked of those on this machine, as the process's mounts say.
Asked ask(Pid process, const std::string& link) {
  const auto info = known_status(link);
  if (info && is_kernels(info->st_dev)) return {};
  const auto mount = mount_of(process, link);
  if (mount && !may_be_far(mount->type)) return {};
  return ask_by_a_child(link);
}

// Where it keeps others out the kernel tells their kind and nothing else (fuse_statfs() of
// fs/fuse/inode.c); a file system on top of one takes that over. Of an overlay that is on none of
// the process's mounts it is not known who has made it.
bool is_served_system(const Asked& asked) {
  if (!asked.answers) return true;
  return asked.known && (asked.system.f_type == OVERLAYFS_SUPER_MAGIC ||
                         (asked.system.f_type == kFuseMagic && asked.system.f_bsize == 0));
}

}  // namespace

bool answers(Pid process, const std::string& link) { return ask(process, link).answers; }

bool is_served(Pid process, int descriptor) {
  return is_served(process, fmt::format("/proc/{}/fd/{}", process.value, descriptor));
}

bool is_served(Pid process, const std::string& link) {
  // Who serves files may keep our user from asking what one is (EACCES).
  const auto info = known_status(link);
  if (info && (!has_calls_of_its_system(*info) || is_kernels(info->st_dev))) return false;
  if (const auto mount = mount_of(process, link)) return is_served_type(process, mount->type);
  return is_served_system(ask(process, link));
}

bool is_on_this_machine(const std::string& path) {
  const auto all = known_mounts(Pid{::getpid()});
  const Mount* nearest = nullptr;
  for (const Mount& mount : all ? *all : std::vector<Mount>()) {
    const bool is_above =
        mount.point == "/" || path == mount.point || path.starts_with(mount.point + "/");
    if (is_above && (nearest == nullptr || mount.point.size() >= nearest->point.size()))
      nearest = &mount;
  }
  return nearest != nullptr && (!may_be_far(nearest->type) || nearest->type == "overlay");
}

bool leads_over_served(Pid process, const std::string& path) {
  const auto all = known_mounts(process);
  return !all || std::any_of(all->begin(), all->end(), [&](const Mount& mount) {
    const bool is_on_the_way =
        mount.point == "/" || path == mount.point || path.starts_with(mount.point + "/");
    return is_on_the_way && is_served_type(process, mount.type);
  });
}

std::optional<struct statfs> file_system_of(Pid process, const std::string& link) {
  const auto info = known_status(link);
  if (!info) return std::nullopt;
  const auto mount = mount_of(process, link);
  if (is_kernels(info->st_dev) || (mount && !may_be_far(mount->type))) {
    struct statfs out {};
    if (::statfs(link.c_str(), &out) != 0) return std::nullopt;
    return out;
  }
  const Asked asked = ask_by_a_child(link);
  return asked.answers && asked.known ? std::optional(asked.system) : std::nullopt;
}

ServedPages::ServedPages(Pid pid) : pid_(pid) {
  auto pages = open_file(AT_FDCWD, fmt::format("/proc/{}/pagemap", pid.value), O_RDONLY);
  if (pages) pages_ = std::move(*pages);
}

bool ServedPages::is_there(std::uint64_t address) const {
  PageEntry entry;
  return !pages_.valid() || read_pagemap(pages_.get(), address, {&entry, 1}) == 0 ||
         entry.is_touched();
}

ServedPages::Waits ServedPages::waits_in(std::uint64_t address, std::size_t size, Access access,
                                         const UniqueFd* memory) {
  if (size == 0) return Waits::kNever;
  if (!pages_.valid()) return Waits::kByNumber;
  const std::uint64_t last = std::max(address, address + (size - 1)) / kPage;
  std::array<PageEntry, kEntries> entries{};
  std::uint64_t near_to = 0;  // the end of the mapping that was looked at last, if it is near
  Waits waits = Waits::kNever;
  std::vector<std::uint64_t> far;
  for (std::uint64_t page = address / kPage; page <= last;) {
    const std::size_t wanted = std::min<std::uint64_t>(kEntries, last - page + 1);
    const std::size_t count =
        read_pagemap(pages_.get(), page * kPage, std::span(entries).first(wanted));
    for (std::size_t i = 0; i < count; ++i) {
      if (access == Access::kWrite && entries[i].is_write_protected()) waits = Waits::kByNumber;
      if (entries[i].is_touched()) continue;
      const std::uint64_t at = (page + i) * kPage;
      // One page of a mapping tells of all: who provides a part of one makes two of it.
      if (at < near_to) continue;
      const Absent absent = probe(at);
      if (absent.is_far) {
        far.push_back(at);
        continue;
      }
      near_to = absent.end;
      if (memory == nullptr) continue;
      char byte = 0;
      if (::pread(memory->get(), &byte, 1, static_cast<off_t>(at)) != 1) waits = Waits::kByNumber;
    }
    if (!come(far)) return Waits::kStill;
    far.clear();
    // Beyond all addresses, or of a process that has gone.
    if (count == 0) break;
    page += count;
  }
  return waits;
}

ServedPages::Absent ServedPages::probe(std::uint64_t address) {
  const std::scoped_lock lock(mutex_);
  if (address >= fine_from_ && address < fine_to_) return {false, fine_to_};
  const auto at = mapping_of(address);
  if (!at) return {};
  if (at->inode != 0 && is_far(at->device)) return {true, at->end};
  fine_from_ = at->start;
  fine_to_ = at->end;
  return {false, at->end};
}

std::optional<Mapping> ServedPages::mapping_of(std::uint64_t address) {
  if (!maps_.valid()) {
    auto maps = open_file(AT_FDCWD, fmt::format("/proc/{}/maps", pid_.value), O_RDONLY);
    if (!maps) return std::nullopt;
    maps_ = std::move(*maps);
  }
  if (auto one = mapping_at(maps_, address)) return *one;
  if (!all_) {
    all_.emplace();
    (void)ProcFs().for_each_mapping(pid_, [&](const Mapping& mapping) {
      all_->push_back(mapping);
      all_->back().path.clear();
      return true;
    });
  }
  const auto after = std::upper_bound(
      all_->begin(), all_->end(), address,
      [](std::uint64_t wanted, const Mapping& mapping) { return wanted < mapping.start; });
  if (after == all_->begin() || address >= std::prev(after)->end) return std::nullopt;
  return *std::prev(after);
}

bool ServedPages::is_far(std::uint64_t device) {
  if (!near_) {
    near_.emplace();
    if (const auto all = known_mounts(pid_)) {
      for (const Mount& mount : *all)
        if (!may_be_far(mount.type)) near_->insert(makedev(mount.major, mount.minor));
    }
  }
  return !near_->contains(device);
}

// By the process's number: SIGKILL ends this wait for a page, and not that of /proc/PID/mem
// (FAULT_FLAG_KILLABLE of the kernel's mm/gup.c). What was read is forgotten.
bool ServedPages::come(const std::vector<std::uint64_t>& pages) const {
  if (pages.empty()) return true;
  const auto read_all = [pid = pid_, pages] {
    for (const std::uint64_t page : pages) {
      char byte = 0;
      const iovec local{&byte, 1};
      // NOLINTNEXTLINE(performance-no-int-to-ptr): the target's address
      const iovec remote{reinterpret_cast<void*>(page), 1};
      if (::process_vm_readv(pid.value, &local, 1, &remote, 1, 0) < 0 && errno != EFAULT) break;
    }
    return true;
  };
  return call_within(pid_, read_all, HeldUpBy::kPage).has_value();
}

}  // namespace stasis::proc
