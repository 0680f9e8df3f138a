// A file of a file system that a program serves itself (FUSE), as another user, and whose pages it
// holds back. For a child of the test, which becomes that user, in namespaces of its own.
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
#include <string>
#include <thread>
#include <vector>

namespace stasis::fakes {

inline constexpr std::size_t kServedBytes = 1 << 20;

namespace served {

inline fuse_attr attributes(std::uint64_t node) {
  fuse_attr out{};
  out.ino = node;
  out.size = node == 1 ? 0 : kServedBytes;
  out.mode = node == 1 ? S_IFDIR | 0755 : S_IFREG | 0755;
  out.nlink = 1;
  return out;
}

template <class Body>
std::vector<char> body(const Body& of) {
  const auto* from = reinterpret_cast<const char*>(&of);
  return {from, from + sizeof of};
}

// Never answers what reads or closes a file.
[[noreturn]] inline void serve(int device) {
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
      out.entry_valid = out.attr_valid = 1000;
      out.attr = attributes(2);
      answer = body(out);
    } else if (in.opcode == FUSE_GETATTR) {
      fuse_attr_out out{};
      out.attr_valid = 1000;
      out.attr = attributes(in.nodeid);
      answer = body(out);
    } else if (in.opcode == FUSE_OPEN) {
      fuse_open_in how{};
      std::memcpy(&how, request.data() + sizeof in, sizeof how);
      fuse_open_out out{};
      // To map it then waits for a read of it by another one, with the process's mappings locked.
      if ((how.flags & O_NONBLOCK) != 0) out.open_flags = FOPEN_DIRECT_IO | FOPEN_KEEP_CACHE;
      answer = body(out);
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

// -1 where that cannot be: no FUSE, no user namespaces, not root. `server` is for the test to kill:
// until it has ended nothing that waits for it does.
inline int open_served_file(pid_t& server, int flags = O_RDWR) {
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
      served::write_file("/proc/self/setgroups", "deny") &&
      served::write_file("/proc/self/uid_map", "0 65534 1") &&
      served::write_file("/proc/self/gid_map", "0 65534 1");
  const int device = made && is_other ? ::open(node.c_str(), O_RDWR | O_CLOEXEC) : -1;
  ::unlink(node.c_str());
  ::rmdir(folder.c_str());
  if (device < 0) return -1;
  const std::string how = "fd=" + std::to_string(device) + ",rootmode=40000,user_id=0,group_id=0";
  if (::mount("none", "/mnt", "fuse", 0, how.c_str()) != 0) return -1;
  const pid_t made_server = ::fork();
  if (made_server == 0) served::serve(device);
  server = made_server;  // which may be memory that both share
  ::close(device);
  return ::open("/mnt/file", flags | O_CLOEXEC);
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

}  // namespace stasis::fakes
