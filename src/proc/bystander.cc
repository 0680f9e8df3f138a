#include "proc/bystander.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <utility>

#include <fmt/format.h>

namespace stasis::proc {
namespace {

constexpr long kCreateRuleset = 444;  // SYS_landlock_create_ruleset
constexpr unsigned kVersion = 1;      // LANDLOCK_CREATE_RULESET_VERSION
constexpr const char* kProgram = "/bin/cat";

bool kernel_has_landlock() { return ::syscall(kCreateRuleset, nullptr, 0, kVersion) > 0; }

std::string folder_of(Pid pid, Tid thread) {
  return fmt::format("/proc/{}/task/{}", pid.value, thread.value);
}

bool shares(const std::string& folder, const char* space) {
  struct stat its {};
  struct stat ours {};
  return ::stat((folder + space).c_str(), &its) == 0 &&
         ::stat((std::string("/proc/self") + space).c_str(), &ours) == 0 &&
         its.st_ino == ours.st_ino;
}

// By a security module, which might forbid it to look into other processes.
bool is_confined(const std::string& folder) {
  const auto text = read_file(AT_FDCWD, folder + "/attr/current");
  return text && !text->empty() && !text->starts_with("unconfined");
}

// In a forked child of a program with threads: nothing but system calls. Raw ones, since the C
// library would tell the other threads of a changed user.
bool become(unsigned uid, unsigned gid) {
  if (::geteuid() == 0 && ::syscall(SYS_setgroups, 0, nullptr) != 0) return false;
  if (::syscall(SYS_setresgid, gid, gid, gid) != 0 || ::syscall(SYS_setresuid, uid, uid, uid) != 0)
    return false;
  // Or the other one would need as many capabilities. Those of root would come back by execve().
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  std::array<__user_cap_data_struct, _LINUX_CAPABILITY_U32S_3> none{};
  constexpr unsigned long kNoRoot = 1UL << 0 | 1UL << 1;  // SECBIT_NOROOT, locked
  (void)::prctl(PR_SET_SECUREBITS, kNoRoot, 0, 0, 0);
  return ::syscall(SYS_capset, &header, none.data()) == 0;
}

[[noreturn]] void be_bystander(unsigned uid, unsigned gid, int input, int nowhere, int report) {
  if (become(uid, gid) && ::dup2(input, STDIN_FILENO) == STDIN_FILENO &&
      ::dup2(nowhere, STDOUT_FILENO) == STDOUT_FILENO &&
      ::dup2(nowhere, STDERR_FILENO) == STDERR_FILENO && ::chdir("/") == 0) {
    // execve() closes all others.
    (void)::syscall(SYS_close_range, 3U, ~0U, 1U << 2);  // CLOSE_RANGE_CLOEXEC
    std::array<char*, 2> arguments{const_cast<char*>(kProgram), nullptr};
    std::array<char*, 1> environment{nullptr};
    ::execve(kProgram, arguments.data(), environment.data());
  }
  (void)!::write(report, "", 1);
  ::_exit(1);
}

// The user whose process it is may stop it at any moment: it is given a while, and is then ended.
constexpr int kTimeoutMs = 2000;

bool ends_well(pid_t child) {
  const auto pidfd = Pidfd::open(Pid{child});
  if (!pidfd || !pidfd->wait_exit(kTimeoutMs)) (void)::kill(child, SIGKILL);
  int status = 0;
  pid_t got = 0;
  while ((got = ::waitpid(child, &status, 0)) < 0 && errno == EINTR) {
  }
  return got == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// The other end of the pipe is closed, and nothing was written.
bool is_closed_in_time(const UniqueFd& told) {
  pollfd waits{told.get(), POLLIN, 0};
  int ready = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kTimeoutMs);
  while ((ready = ::poll(&waits, 1, kTimeoutMs)) < 0 && errno == EINTR &&
         std::chrono::steady_clock::now() < deadline) {
  }
  char byte = 0;
  return ready == 1 && ::read(told.get(), &byte, 1) == 0;
}

bool may_look_into(int pid) {
  void* head = nullptr;
  std::size_t size = 0;
  return ::syscall(SYS_get_robust_list, pid, &head, &size) == 0;
}

// Can a process of that user, with no rights and no sandbox, look into it? Anything else would tell
// nothing of the one that is asked.
bool any_may_look_into(int pid, unsigned uid, unsigned gid) {
  const pid_t child = ::fork();
  if (child < 0) return false;
  if (child == 0) ::_exit(become(uid, gid) && may_look_into(pid) ? 0 : 1);
  return ends_well(child);
}

}  // namespace

std::optional<Bystander::User> Bystander::user_of(Pid pid, Tid thread) {
  const std::string folder = folder_of(pid, thread);
  if (!shares(folder, "/ns/user") || !shares(folder, "/ns/pid") || is_confined(folder))
    return std::nullopt;
  const auto text = read_file(AT_FDCWD, folder + "/status");
  if (!text) return std::nullopt;
  const auto real = [&](const char* key) -> std::optional<unsigned> {
    const std::size_t at = text->find(key);
    if (at == std::string::npos) return std::nullopt;
    return static_cast<unsigned>(std::strtoul(text->c_str() + at + 6, nullptr, 10));
  };
  const auto uid = real("\nUid:\t");
  const auto gid = real("\nGid:\t");
  if (!uid || !gid) return std::nullopt;
  return User{*uid, *gid};
}

std::optional<Bystander> Bystander::for_thread(Pid pid, Tid thread) {
  if (!kernel_has_landlock()) return std::nullopt;
  const auto user = user_of(pid, thread);
  std::array<int, 2> input{};
  std::array<int, 2> report{};
  if (!user || ::pipe2(input.data(), O_CLOEXEC) != 0) return std::nullopt;
  UniqueFd its_input(input[0]);
  UniqueFd our_end(input[1]);
  const UniqueFd nowhere(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!nowhere.valid() || ::pipe2(report.data(), O_CLOEXEC) != 0) return std::nullopt;
  UniqueFd told(report[0]);
  UniqueFd tells(report[1]);
  const pid_t child = ::fork();
  if (child < 0) return std::nullopt;
  if (child == 0) be_bystander(user->uid, user->gid, input[0], nowhere.get(), report[1]);
  Bystander out(child, *user, std::move(our_end));
  tells = UniqueFd();
  its_input = UniqueFd();
  // The end of the file comes with the new program.
  if (!is_closed_in_time(told) || !any_may_look_into(child, user->uid, user->gid))
    return std::nullopt;
  return out;
}

Bystander::Bystander(Bystander&& other) noexcept
    : pid_(std::exchange(other.pid_, 0)), user_(other.user_), input_(std::move(other.input_)) {}

Bystander::~Bystander() {
  if (pid_ == 0) return;
  ::kill(pid_, SIGKILL);
  (void)TEMP_FAILURE_RETRY(::waitpid(pid_, nullptr, 0));
}

bool Bystander::suits(Pid pid, Tid thread) const { return user_of(pid, thread) == user_; }

}  // namespace stasis::proc
