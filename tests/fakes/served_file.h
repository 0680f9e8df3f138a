// A file of a file system that a program serves itself (FUSE), as another user, and whose pages it
// holds back, or its attributes, through an overlay on top of it. For a child of the test, which
// becomes that user, in namespaces of its own.
#pragma once

#include <fcntl.h>
#include <linux/fuse.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/ids.h"
#include "tests/fakes/child.h"

namespace stasis::fakes {

inline constexpr std::size_t kServedBytes = 1 << 20;

namespace served {

struct How {
  // No attributes are kept, and once this is set, none are told.
  const std::atomic<bool>* is_silent = nullptr;
  int content = -1;  // a file that has what is read; else no read is answered
};

inline fuse_attr attributes(std::uint64_t node, const How& how) {
  struct stat info {};
  const bool has_content = how.content >= 0 && ::fstat(how.content, &info) == 0;
  fuse_attr out{};
  out.ino = node;
  if (node != 1) out.size = has_content ? static_cast<std::uint64_t>(info.st_size) : kServedBytes;
  out.mode = node == 1 ? S_IFDIR | 0755 : S_IFREG | 0755;
  out.nlink = 1;
  return out;
}

template <class Body>
std::vector<char> body(const Body& of) {
  const auto* from = reinterpret_cast<const char*>(&of);
  return {from, from + sizeof of};
}

// What the request wants to read.
inline std::vector<char> content_for(const std::vector<char>& request, int content) {
  fuse_read_in wanted{};
  std::memcpy(&wanted, request.data() + sizeof(fuse_in_header), sizeof wanted);
  std::vector<char> out(wanted.size);
  const ssize_t got = ::pread(content, out.data(), out.size(), static_cast<off_t>(wanted.offset));
  out.resize(got < 0 ? 0 : static_cast<std::size_t>(got));
  return out;
}

// With no content it never answers what closes a file.
[[noreturn]] inline void serve(int device, const How& how = {}) {
  const std::uint64_t valid = how.is_silent == nullptr ? 1000 : 0;
  // What goes wrong with a test that waits for it must not hold up the machine.
  constexpr unsigned kLongest = 20;
  if (how.is_silent != nullptr) ::alarm(kLongest);
  std::vector<char> request(1 << 20);
  for (;;) {
    if (::read(device, request.data(), request.size()) <
        static_cast<ssize_t>(sizeof(fuse_in_header)))
      ::_exit(0);
    fuse_in_header in{};
    std::memcpy(&in, request.data(), sizeof in);
    std::vector<char> answer;
    int error = 0;
    if (in.opcode == FUSE_INIT) {
      fuse_init_out out{};
      out.major = FUSE_KERNEL_VERSION;
      out.minor = 31;
      out.max_write = 4096;
      answer = body(out);
    } else if (in.opcode == FUSE_LOOKUP) {
      fuse_entry_out out{};
      out.nodeid = 2;
      out.entry_valid = 1000;
      out.attr_valid = valid;
      out.attr = attributes(2, how);
      answer = body(out);
    } else if (in.opcode == FUSE_GETATTR) {
      if (how.is_silent != nullptr && *how.is_silent) continue;
      fuse_attr_out out{};
      out.attr_valid = valid;
      out.attr = attributes(in.nodeid, how);
      answer = body(out);
    } else if (in.opcode == FUSE_OPEN) {
      fuse_open_in wanted{};
      std::memcpy(&wanted, request.data() + sizeof in, sizeof wanted);
      fuse_open_out out{};
      // To map it then waits for a read of it by another one, with the process's mappings locked.
      if ((wanted.flags & O_NONBLOCK) != 0) out.open_flags = FOPEN_DIRECT_IO | FOPEN_KEEP_CACHE;
      answer = body(out);
    } else if (in.opcode == FUSE_STATFS) {
      fuse_statfs_out out{};
      out.st.bsize = 4096;
      out.st.namelen = 255;
      answer = body(out);
    } else if (in.opcode == FUSE_FLUSH && how.content >= 0) {
      // with an answer of nothing: an execve(2) waits for it
    } else if (in.opcode == FUSE_READ && how.content >= 0) {
      answer = content_for(request, how.content);
    } else if (in.opcode == FUSE_READ || in.opcode == FUSE_FLUSH || in.opcode == FUSE_FORGET ||
               in.opcode == FUSE_BATCH_FORGET || in.opcode == FUSE_INTERRUPT) {
      continue;
    } else {
      error = -ENOSYS;
    }
    fuse_out_header head{};
    head.len = static_cast<std::uint32_t>(sizeof head + answer.size());
    head.error = error;
    head.unique = in.unique;
    const auto begin = body(head);
    answer.insert(answer.begin(), begin.begin(), begin.end());
    (void)!::write(device, answer.data(), answer.size());
  }
}

inline bool write_file(const char* path, const char* text) {
  const int file = ::open(path, O_WRONLY | O_CLOEXEC);
  const bool done = file >= 0 && ::write(file, text, std::strlen(text)) > 0;
  ::close(file);
  return done;
}

}  // namespace served

namespace served {

// Makes the calling process another user's, in namespaces of its own. -1 where that cannot be: no
// FUSE, no user namespaces, not root.
inline int open_device_as_other() {
  constexpr unsigned kOther = 65534;
  constexpr unsigned kMisc = 10;
  constexpr unsigned kFuse = 229;
  // The device has to be opened in the namespace that mounts the file system, where /dev/fuse may
  // be root's alone.
  std::string folder = "/tmp/stasis-served-XXXXXX";
  if (::getuid() != 0 || ::mkdtemp(folder.data()) == nullptr) return -1;
  const std::string node = folder + "/fuse";
  const bool made = ::mknod(node.c_str(), S_IFCHR | 0600, makedev(kMisc, kFuse)) == 0 &&
                    ::chown(node.c_str(), kOther, kOther) == 0 &&
                    ::chown(folder.c_str(), kOther, kOther) == 0;
  const bool is_other =
      ::setresgid(kOther, kOther, kOther) == 0 && ::setresuid(kOther, kOther, kOther) == 0 &&
      ::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && ::prctl(PR_SET_DUMPABLE, 1) == 0 &&
      write_file("/proc/self/setgroups", "deny") && write_file("/proc/self/uid_map", "0 65534 1") &&
      write_file("/proc/self/gid_map", "0 65534 1");
  const int device = made && is_other ? ::open(node.c_str(), O_RDWR | O_CLOEXEC) : -1;
  ::unlink(node.c_str());
  ::rmdir(folder.c_str());
  return device;
}

inline bool mount_at(const char* point, int device, pid_t& server, const How& how = {}) {
  if (device < 0) return false;
  const std::string options =
      "fd=" + std::to_string(device) + ",rootmode=40000,user_id=0,group_id=0";
  if (::mount("none", point, "fuse", 0, options.c_str()) != 0) return false;
  const pid_t made_server = ::fork();
  if (made_server == 0) serve(device, how);
  server = made_server;  // which may be memory that both share
  ::close(device);
  return true;
}

}  // namespace served

// -1 where that cannot be: no FUSE, no user namespaces, not root. `server` is for the test to kill:
// until it has ended nothing that waits for it does.
inline int open_served_file(pid_t& server, int flags = O_RDWR) {
  if (!served::mount_at("/mnt", served::open_device_as_other(), server)) return -1;
  return ::open("/mnt/file", flags | O_CLOEXEC);
}

// The same through an overlay on top of it, which passes on to the server what root asks: it keeps
// no one out. Its attributes are told until `is_silent`, which is memory that all share. Its name
// is kOverlaid.
inline constexpr const char* kOverlaid = "/mnt/all/file";
inline int open_overlaid_file(pid_t& server, const std::atomic<bool>& is_silent, int content = -1) {
  const int device = served::open_device_as_other();
  if (device < 0 || ::mount("none", "/mnt", "tmpfs", 0, "") != 0) return -1;
  for (const char* folder : {"/mnt/below", "/mnt/above", "/mnt/work", "/mnt/all"})
    if (::mkdir(folder, 0755) != 0) return -1;
  if (!served::mount_at("/mnt/below", device, server, {&is_silent, content}) ||
      ::mount("none", "/mnt/all", "overlay", 0,
              "lowerdir=/mnt/below,upperdir=/mnt/above,workdir=/mnt/work,userxattr") != 0)
    return -1;
  return ::open(kOverlaid, O_RDONLY | O_CLOEXEC);
}

// Keeps the lock of this process's mappings until the server ends. The same where it cannot be.
inline bool keep_mappings_locked(pid_t& server) {
  const int file = open_served_file(server, O_RDONLY);
  if (file < 0) return false;
  std::thread([file] {
    char byte = 0;
    (void)!::pread(file, &byte, 1, 0);
  }).detach();
  ::usleep(200000);  // it has begun
  const int direct = ::open("/mnt/file", O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  std::thread([direct] { (void)::mmap(nullptr, 1, PROT_READ, MAP_PRIVATE, direct, 0); }).detach();
  return direct >= 0;
}

// Executes another program, which does not begin before the server ends: the kernel closes a file
// of it first. Returns where that cannot be.
inline void execute_held_up(pid_t& server, std::atomic<int>& is_begun) {
  if (open_served_file(server, O_RDONLY) < 0) return;
  is_begun = 2;
  ::execl("/bin/sleep", "sleep", "60", nullptr);
}

// Ends the server after five seconds, or as many as are said, or with its own end.
class ServerEnd {
 public:
  explicit ServerEnd(pid_t server, int seconds = 5)
      : watch_([this, server, seconds] {
          for (int i = 0; i < 10 * seconds && !is_over_; ++i)
            ::usleep(100000);
          ::kill(server, SIGKILL);
        }) {}
  ~ServerEnd() {
    is_over_ = true;
    watch_.join();
  }
  ServerEnd(const ServerEnd&) = delete;
  ServerEnd& operator=(const ServerEnd&) = delete;

 private:
  std::atomic<bool> is_over_ = false;
  std::thread watch_;
};

// A process that has such a file open, whose attributes are not told any more; with `content` it
// runs from it. For ten seconds: then the server ends, and all that waits for it goes on.
class OverlaidFile {
 public:
  explicit OverlaidFile(int content = -1)
      : place_(static_cast<Place*>(::mmap(nullptr, sizeof(Place), PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_ANONYMOUS, -1, 0))),
        holder_([this, content] {
          place_->descriptor = open_overlaid_file(place_->server, place_->is_silent, content);
          place_->is_made = true;
          if (content >= 0 && place_->descriptor >= 0) ::execl(kOverlaid, "sleep", "60", nullptr);
          for (;;)
            ::pause();
        }) {
    constexpr int kLooks = 10000;
    for (int looks = 0; looks < kLooks && !(place_->is_made && (content < 0 || runs())); ++looks)
      ::usleep(1000);
    place_->is_silent = true;
    if (is_there()) end_.emplace(place_->server, 10);
  }
  ~OverlaidFile() {
    end_.reset();
    if (place_->server > 0) ::kill(place_->server, SIGKILL);
  }
  OverlaidFile(const OverlaidFile&) = delete;
  OverlaidFile& operator=(const OverlaidFile&) = delete;

  // False where that cannot be: open_overlaid_file().
  bool is_there() const { return place_->is_made && place_->descriptor >= 0; }
  Pid pid() const { return holder_.pid(); }
  // Leads to it.
  std::string link() const {
    return "/proc/" + std::to_string(pid().value) + "/fd/" + std::to_string(place_->descriptor);
  }

 private:
  struct Place {
    pid_t server = 0;
    int descriptor = -1;
    std::atomic<bool> is_silent = false;
    std::atomic<bool> is_made = false;
  };

  bool runs() const {
    char path[64]{};
    const std::string link = "/proc/" + std::to_string(pid().value) + "/exe";
    const bool is_read = ::readlink(link.c_str(), path, sizeof path - 1) > 0;
    return place_->descriptor < 0 || (is_read && std::string(path) == kOverlaid);
  }

  Place* place_;
  Child holder_;
  std::optional<ServerEnd> end_;
};

}  // namespace stasis::fakes
