#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <thread>

#include "criu/criu_test_targets.h"

namespace stasis {
namespace {

using std::chrono::milliseconds;

int must(int result) {
  if (result < 0) ::_exit(90);
  return result;
}

void connect_to_myself() {
  const int listener = must(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  must(::bind(listener, reinterpret_cast<sockaddr*>(&address), size));
  must(::listen(listener, 1));
  must(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size));
  const int client = must(::socket(AF_INET, SOCK_STREAM, 0));
  must(::connect(client, reinterpret_cast<sockaddr*>(&address), size));
  must(::accept(listener, nullptr, nullptr));
}

void fill_memory(std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) ::_exit(91);
  std::memset(memory, 7, bytes);
}

void prepare(const std::string& kind, const std::string& directory) {
  const std::string file = directory + "/data";
  if (kind == "tcp") connect_to_myself();
  if (kind == "ghost") {
    const int fd = must(::open(file.c_str(), O_RDWR | O_CREAT, 0600));
    const std::string data(2U << 20, 'g');
    must(static_cast<int>(::write(fd, data.data(), data.size())));
    must(::unlink(file.c_str()));
  }
  if (kind == "link") {
    must(::open(file.c_str(), O_RDWR | O_CREAT, 0600));
    must(::link(file.c_str(), (file + ".other").c_str()));
    must(::unlink(file.c_str()));
  }
  if (kind == "lock") must(::flock(must(::open(file.c_str(), O_RDWR | O_CREAT, 0600)), LOCK_EX));
  if (kind == "file") {
    const int fd = must(::open(file.c_str(), O_RDWR | O_CREAT, 0600));
    must(static_cast<int>(::write(fd, "12345", 5)));
  }
  if (kind == "uring") {
    io_uring_params params = {};
    if (::syscall(SYS_io_uring_setup, 8, &params) < 0) ::_exit(77);
  }
  if (kind == "16 MiB") fill_memory(16U << 20);
  if (kind == "large" || kind == "large threads") fill_memory(256U << 20);
  if (kind == "large threads") {
    for (int i = 0; i < 8; ++i) {
      std::thread([] {
        for (;;)
          ::pause();
      }).detach();
    }
  }
  if (kind == "tree") {
    const pid_t child = must(::fork());
    if (child == 0) {
      for (;;)
        ::pause();
    }
    const int fd = must(::open((directory + "/child").c_str(), O_WRONLY | O_CREAT, 0600));
    const std::string text = std::to_string(child);
    must(static_cast<int>(::write(fd, text.data(), text.size())));
    must(::close(fd));
  }
}

}  // namespace

int run_target(int argc, char** argv) {
  if (argc < 4) return 92;
  const std::string directory = argv[3];
  prepare(argv[2], directory);
  const int fd = must(::open((directory + "/count").c_str(), O_RDWR | O_CREAT, 0600));
  for (std::uint64_t count = 1;; ++count) {
    must(static_cast<int>(::pwrite(fd, &count, sizeof count, 0)));
    std::this_thread::sleep_for(milliseconds(2));
  }
}

Target::Target(const std::string& kind, const std::string& directory, const Options& options)
    : directory_(directory) {
  pid_ = ::fork();
  if (pid_ == 0) {
    if (options.own_session) must(::setsid());
    const int null = must(::open("/dev/null", O_RDWR));
    for (int fd = 0; fd < 3; ++fd)
      must(::dup2(null, fd));
    if (options.given != nullptr) must(::dup2(options.given->get(), 3));
    const int first = options.given != nullptr ? 4 : 3;
    must(static_cast<int>(::syscall(SYS_close_range, first, ~0U, 0U)));
    const char* arguments[] = {"criu_target", "--target", kind.c_str(), directory.c_str(), nullptr};
    ::execv("/proc/self/exe", const_cast<char**>(arguments));
    ::_exit(93);
  }
  for (int i = 0; i < 30000 && count() == 0; ++i)
    std::this_thread::sleep_for(milliseconds(2));
}

Target::~Target() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  const Pid grandchild = child();
  if (grandchild.value <= 0) return;
  ::kill(grandchild.value, SIGKILL);
  ::waitpid(grandchild.value, nullptr, 0);
}

std::uint64_t Target::count() const {
  std::uint64_t value = 0;
  const UniqueFd fd(::open((directory_ + "/count").c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid() || ::pread(fd.get(), &value, sizeof value, 0) != sizeof value) return 0;
  return value;
}

bool Target::runs() const {
  const std::uint64_t before = count();
  for (int i = 0; i < 30000; ++i) {  // a criu that we left alone ends its dump first
    if (count() > before + 3) return true;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return false;
}

Pid Target::child() const {
  auto text = read_file(AT_FDCWD, directory_ + "/child", 100);
  return Pid{text ? static_cast<int>(std::strtol(text->c_str(), nullptr, 10)) : 0};
}

bool Target::reap() {
  // An ended child of it is ours too: the test is a subreaper.
  const Pid grandchild = child();
  if (grandchild.value > 0) ::waitpid(grandchild.value, nullptr, 0);
  for (int i = 0; i < 30000; ++i) {
    if (::waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = 0;
      return true;
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
  return false;
}

std::string description(Pid pid) {
  const std::string proc = "/proc/" + std::to_string(pid.value);
  std::string result;
  std::istringstream status(read_file(AT_FDCWD, proc + "/status", 65536).value_or(""));
  for (std::string line; std::getline(status, line);) {
    for (const char* field : {"Umask:", "TracerPid:", "Uid:", "Sig", "Shd", "Cap", "Seccomp:"}) {
      if (line.starts_with(field) && !line.starts_with("SigQ")) result += line + "\n";
    }
  }
  std::istringstream maps(read_file(AT_FDCWD, proc + "/maps", 1U << 20).value_or(""));
  for (std::string line; std::getline(maps, line);)
    result += line + "\n";
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(proc + "/fd", ignored)) {
    result += entry.path().filename().string() + " -> " +
              std::filesystem::read_symlink(entry.path(), ignored).string() + "\n";
  }
  return result;
}

char process_state(Pid pid) {
  auto text = read_file(AT_FDCWD, "/proc/" + std::to_string(pid.value) + "/stat", 4096);
  if (!text) return '-';
  const std::size_t end = text->rfind(')');
  return end == std::string::npos || end + 2 >= text->size() ? '-' : (*text)[end + 2];
}

}  // namespace stasis
