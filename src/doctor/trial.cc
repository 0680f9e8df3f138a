#include "doctor/trial.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "abi/cuda_abi.h"
#include "base/fd.h"
#include "base/units.h"
#include "checkpoint/process.h"
#include "doctor/machine_parts.h"
#include "driver/library.h"

namespace stasis::doctor {
namespace {

namespace fn = cuda::fn;

constexpr std::size_t kBytes = 4U << 20;
constexpr unsigned kTimeoutSeconds = 30;
constexpr std::chrono::seconds kLockTimeout{10};
constexpr int kTrialPollMs = 50;
constexpr int kReapMs = 5000;

// What the child says, and the two words that it is told.
enum class Said : std::uint32_t { kReady, kIntact, kChanged, kRefused, kHidden, kNoLibrary };
struct Message {
  Said said = Said::kReady;
  std::uint32_t cu_result = 0;   // kRefused
  std::array<char, 256> text{};  // kRefused: the call's name; kNoLibrary: the linker's words
};
constexpr char kBegin = 'b';
constexpr char kCheck = 'c';

// --- In the child

class Target {
 public:
  Target(int channel, const std::string& library, const GpuUuid& gpu)
      : channel_(channel), library_(library), gpu_(gpu) {}

  [[noreturn]] void run() {
    await(kBegin);
    // The kernel's own end to it, also while a call of the driver about us hangs.
    ::alarm(kTimeoutSeconds);
    const auto pattern = make_pattern();
    load();
    take_gpu();
    cuda::CUdeviceptr memory = 0;
    must("cuMemAlloc", call<fn::cuMemAlloc_v2>("cuMemAlloc_v2")(&memory, kBytes));
    must("cuMemcpyHtoD",
         call<fn::cuMemcpyHtoD_v2>("cuMemcpyHtoD_v2")(memory, pattern.data(), kBytes));
    say({Said::kReady});
    await(kCheck);
    std::vector<std::uint32_t> now(pattern.size());
    must("cuMemcpyDtoH", call<fn::cuMemcpyDtoH_v2>("cuMemcpyDtoH_v2")(now.data(), memory, kBytes));
    say({now == pattern ? Said::kIntact : Said::kChanged});
    ::_exit(0);
  }

 private:
  static std::vector<std::uint32_t> make_pattern() {
    std::vector<std::uint32_t> words(kBytes / sizeof(std::uint32_t));
    std::uint32_t value = 0x9e3779b9;
    for (std::uint32_t& word : words)
      word = value = value * 1664525 + 1013904223;
    return words;
  }

  void await(char word) const {
    char got = 0;
    ssize_t size = 0;
    do {
      size = ::read(channel_, &got, 1);
    } while (size < 0 && errno == EINTR);
    if (size != 1 || got != word) ::_exit(1);
  }

  void say(const Message& message) const {
    if (::send(channel_, &message, sizeof message, MSG_NOSIGNAL) != sizeof message) ::_exit(1);
  }

  [[noreturn]] void give_up(Said said, std::uint32_t cu_result, const std::string& text) const {
    Message message{said, cu_result};
    text.copy(message.text.data(), message.text.size() - 1);
    say(message);
    ::_exit(1);
  }

  void load() {
    auto loaded = Library::load(library_);
    if (!loaded) give_up(Said::kNoLibrary, 0, loaded.error());
    cuda_ = std::move(*loaded);
  }

  template <class Function>
  Function& call(const char* name) const {
    auto* function = cuda_->function<Function>(name);
    if (function == nullptr) give_up(Said::kNoLibrary, 0, fmt::format("it has no {}", name));
    return *function;
  }

  void must(const char* name, cuda::CUresult result) const {
    if (result != cuda::CUDA_SUCCESS) give_up(Said::kRefused, result, name);
  }

  void take_gpu() const {
    must("cuInit", call<fn::cuInit>("cuInit")(0));
    int count = 0;
    must("cuDeviceGetCount", call<fn::cuDeviceGetCount>("cuDeviceGetCount")(&count));
    for (int i = 0; i < count; ++i) {
      cuda::CUdevice device = 0;
      cuda::CUuuid uuid{};
      must("cuDeviceGet", call<fn::cuDeviceGet>("cuDeviceGet")(&device, i));
      must("cuDeviceGetUuid", call<fn::cuDeviceGetUuid>("cuDeviceGetUuid")(&uuid, device));
      static_assert(sizeof uuid == sizeof gpu_.bytes);
      if (std::memcmp(&uuid, gpu_.bytes.data(), sizeof uuid) != 0) continue;
      cuda::CUcontext context = nullptr;
      must("cuDevicePrimaryCtxRetain",
           call<fn::cuDevicePrimaryCtxRetain>("cuDevicePrimaryCtxRetain")(&context, device));
      must("cuCtxSetCurrent", call<fn::cuCtxSetCurrent>("cuCtxSetCurrent")(context));
      return;
    }
    give_up(Said::kHidden, 0, {});
  }

  int channel_;
  std::string library_;
  GpuUuid gpu_;
  std::optional<Library> cuda_;
};

[[noreturn]] void run_child(int channel, pid_t parent, const std::string& library,
                            const GpuUuid& gpu) {
  // Of our process group, and with every signal as by default: Ctrl-C ends it at once.
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  for (int number = 1; number < NSIG; ++number)
    ::sigaction(number, &action, nullptr);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  // The process that makes the driver's calls for us need not be its ancestor; yama would mind.
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
  const rlimit no_core{};
  ::setrlimit(RLIMIT_CORE, &no_core);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (null < 0 || ::dup2(null, stream) < 0) ::_exit(1);
  Target(channel, library, gpu).run();
}

// --- In this process

// A child of ours. Killed and reaped with its handle.
class Child {
 public:
  static Result<Child> start(const std::string& library, const GpuUuid& gpu) {
    int pair[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
      return fail(errno_error("cannot make a socket for the trial", errno));
    UniqueFd ours(pair[0]);
    const UniqueFd theirs(pair[1]);
    const pid_t parent = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) return fail(errno_error("cannot start a process for the trial", errno));
    if (pid == 0) {
      ::close(ours.get());
      run_child(theirs.get(), parent, library, gpu);
    }
    return Child(pid, std::move(ours));
  }

  Child(Child&& other) noexcept
      : pid_(std::exchange(other.pid_, 0)), channel_(std::move(other.channel_)) {}
  Child& operator=(Child&&) = delete;
  ~Child() { (void)end(); }

  Pid pid() const { return Pid{static_cast<int>(pid_)}; }

  bool tell(char word) const { return ::send(channel_.get(), &word, 1, MSG_NOSIGNAL) == 1; }

  // Nothing if it has ended, or if the user asked to stop: its alarm bounds the wait.
  std::optional<Message> listen(const Interrupt& interrupt) const {
    while (interrupt.check()) {
      pollfd wait{channel_.get(), POLLIN, 0};
      if (::poll(&wait, 1, kTrialPollMs) <= 0) continue;
      Message message;
      const ssize_t got = ::recv(channel_.get(), &message, sizeof message, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got != sizeof message) return std::nullopt;
      message.text.back() = '\0';
      return message;
    }
    return std::nullopt;
  }

  // Kills it unless it has ended, and says how it did: "" where that was our doing.
  std::string end() {
    if (pid_ == 0) return {};
    ::kill(pid_, SIGKILL);
    // By steps, because a process that hangs in the kernel does not even end by that.
    int status = 0;
    for (int waited = 0; waited < kReapMs; ++waited) {
      const pid_t got = ::waitpid(pid_, &status, WNOHANG);
      if (got == pid_) {
        pid_ = 0;
        return how(status);
      }
      if (got < 0 && errno != EINTR) break;
      ::poll(nullptr, 0, 1);
    }
    return fmt::format("process {} hangs in the kernel and cannot be killed",
                       std::exchange(pid_, 0));
  }

 private:
  Child(pid_t pid, UniqueFd channel) : pid_(pid), channel_(std::move(channel)) {}

  static std::string how(int status) {
    if (WIFEXITED(status))
      return WEXITSTATUS(status) == 0 ? "" : fmt::format("exit status {}", WEXITSTATUS(status));
    if (WTERMSIG(status) == SIGKILL) return {};
    if (WTERMSIG(status) == SIGALRM)
      return fmt::format("it was given up after {} s", kTimeoutSeconds);
    return fmt::format("killed by signal {}", WTERMSIG(status));
  }

  pid_t pid_;  // 0 once it is reaped
  UniqueFd channel_;
};

constexpr const char* kLookFurther =
    "see `dmesg` for messages of the NVIDIA driver, and whether other CUDA programs run on this "
    "GPU";

constexpr const char* kTryWhenFree = "try again when some 600 MiB are free there";

std::string refusal(const Driver& driver, const Message& message) {
  const DriverFailure failure = driver.describe(static_cast<int>(message.cu_result));
  return fmt::format("{} says {} {}, \"{}\"", message.text.data(), failure.name, failure.number,
                     failure.text);
}

Obstacle no_start(const Driver& driver, const std::string& gpu, const Message& message) {
  if (message.said == Said::kHidden) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return yellow("trial",
                  fmt::format("{} was not tried: CUDA does not show it to this program "
                              "(CUDA_VISIBLE_DEVICES is {})",
                              gpu, visible == nullptr ? "not set" : visible),
                  "run the doctor without CUDA_VISIBLE_DEVICES");
  }
  if (message.said == Said::kNoLibrary) {
    return red("trial",
               fmt::format("{}: a test process cannot use the driver library: {}", gpu,
                           message.text.data()),
               "install the whole driver library");
  }
  const std::string what =
      fmt::format("{}: a test process cannot use it: {}", gpu, refusal(driver, message));
  // Work of other programs is no fault of the machine.
  if (message.cu_result == cuda::CUDA_ERROR_OUT_OF_MEMORY)
    return yellow("trial", what, kTryWhenFree);
  if (message.cu_result == cuda::CUDA_ERROR_DEVICE_UNAVAILABLE)
    return yellow("trial", what, "try again when no other program has it to itself");
  return red("trial", what, kLookFurther);
}

// Kills a process of ours when the user asks to stop: the driver's call about it then ends.
class Watch {
 public:
  Watch(const Pidfd& target, const Interrupt& interrupt) {
    try {
      thread_ = std::jthread([&](const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        while (!stop.stop_requested()) {
          if (!interrupt.check()) {
            (void)target.signal(SIGKILL);
            return;
          }
          changed_.wait_for(lock, stop, std::chrono::milliseconds(kTrialPollMs),
                            [] { return false; });
        }
      });
    } catch (const std::system_error&) {
      // No more threads are to be had: the alarm remains.
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::jthread thread_;  // the last one: it ends first
};

struct Times {
  Seconds suspend{0};
  Seconds resume{0};
};

Result<Times> suspend_and_resume(Driver& driver, Pid pid, const Interrupt& interrupt) {
  STASIS_TRY_ASSIGN(auto process, Process::open(driver, pid));
  const Watch watch(process.pidfd(), interrupt);
  Times times;
  const auto start = Clock::now();
  STASIS_TRY(process.lock(kLockTimeout));
  STASIS_TRY(process.checkpoint());
  times.suspend = since(start);
  STASIS_TRY(interrupt.check());
  const auto middle = Clock::now();
  STASIS_TRY(process.restore());
  STASIS_TRY(process.unlock());
  times.resume = since(middle);
  return times;
}

// Nothing if it was interrupted.
std::optional<Obstacle> try_gpu(Driver& driver, const std::string& gpu, Child& child,
                                const Interrupt& interrupt) {
  const auto ended = [&](const std::string& when) -> std::optional<Obstacle> {
    if (!interrupt.check()) return std::nullopt;
    const std::string how = child.end();
    return red(
        "trial",
        fmt::format("{}: the test process ended {}{}{}", gpu, when, how.empty() ? "" : ": ", how),
        kLookFurther);
  };
  if (!child.tell(kBegin)) return ended("at once");
  const auto first = child.listen(interrupt);
  if (!first) return ended("before it had the GPU");
  if (first->said != Said::kReady) return no_start(driver, gpu, *first);

  const auto times = suspend_and_resume(driver, child.pid(), interrupt);
  if (!interrupt.check()) return std::nullopt;
  if (!times) {
    const bool full = times.error().code == ErrorCode::kOutOfGpuMemory;
    Obstacle obstacle =
        from_error(full ? Severity::kYellow : Severity::kRed, "trial", times.error());
    const std::string how = child.end();
    obstacle.what = fmt::format("{}: a test process cannot be suspended and resumed: {}{}{}", gpu,
                                obstacle.what, how.empty() ? "" : "; ", how);
    // Most remedies are for programs that one wants to keep.
    if (times.error().code != ErrorCode::kNotPermitted || obstacle.remedy.empty())
      obstacle.remedy = full ? kTryWhenFree : kLookFurther;
    return obstacle;
  }
  if (!child.tell(kCheck)) return ended("when it was resumed");
  const auto last = child.listen(interrupt);
  if (!last) return ended("after it was resumed");
  if (last->said == Said::kRefused) {
    return red("trial",
               fmt::format("{}: after it was resumed, a test process cannot use it: {}", gpu,
                           refusal(driver, *last)),
               kLookFurther);
  }
  if (last->said != Said::kIntact) {
    return red("trial", fmt::format("{}: the memory of a test process came back changed", gpu),
               "do not checkpoint programs here; look for errors of the GPU (nvidia-smi -q)");
  }
  return green("trial",
               fmt::format("{}: a test process was suspended in {} and resumed in "
                           "{}, its memory intact",
                           gpu, format_seconds(times->suspend), format_seconds(times->resume)));
}

// By how many processes, as far as NVML knows.
std::map<GpuUuid, int> users_of_gpus(Driver& driver) {
  std::map<GpuUuid, int> users;
  if (const auto use = driver.memory_by_process()) {
    for (const auto& [pid, parts] : *use)
      for (const GpuUse& part : parts)
        ++users[part.gpu];
  }
  return users;
}

}  // namespace

void try_gpus(Driver& driver, const std::vector<Gpu>& gpus, const Interrupt& interrupt,
              const std::function<void()>& on_forked, std::vector<Obstacle>& out) {
  // All of them before the first call of the driver: a restore initialises CUDA in this process,
  // and a child that is forked after that has none.
  std::vector<std::pair<std::string, Result<Child>>> children;
  auto users = users_of_gpus(driver);
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    if (gpus[i].mig) continue;  // probe_gpus() has said what is with it
    const std::string name = fmt::format("GPU {} ({})", i, gpus[i].name);
    if (const int count = users[gpus[i].uuid]; count > 0) {
      // direct/mover_server.h says what is with that.
      out.push_back(yellow("trial",
                           fmt::format("{} was not tested, because {} using it and a test could "
                                       "disturb {}",
                                       name, count == 1 ? "a program is" : "programs are",
                                       count == 1 ? "it" : "them"),
                           "run the doctor when the GPU is free; --no-trial leaves this out"));
      continue;
    }
    children.emplace_back(name, Child::start(driver.info().library, gpus[i].uuid));
  }
  if (on_forked) on_forked();
  for (auto& [gpu, child] : children) {
    if (!interrupt.check()) return;
    if (!child) {
      out.push_back(from_error(Severity::kRed, "trial", child.error(), "end some processes"));
      continue;
    }
    auto obstacle = try_gpu(driver, gpu, *child, interrupt);
    if (obstacle) out.push_back(std::move(*obstacle));
    (void)child->end();
  }
}

}  // namespace stasis::doctor
