// stasis-inside-target MODE [N]: a program that is looked into while it runs. It verifies itself:
// on SIGTERM it says "right" and ends with 0 if all it did came out as it must.
//
//   load N      N threads that all the time allocate, load and unload a library, make threads,
//   fork,
//               and call the driver (CUDA from libcuda.so.1, if there is one)
//   blocks N    N threads that call the driver all the time, on a block of memory that they share
//   and
//               on others; with addresses of its calls from both ways to have them
//   tail        a thread that uses two blocks in one area of the driver's, with room between them
//   idle        two threads that wait
//   alone       one thread
//   filter      like idle, under a seccomp filter that allows everything
//   refusing    like idle, under one that ends the program for clone(2)
//   cuda-refusing [FILE]  the same with CUDA, and with memory shared by that file
//   cuda-without CALL  the same under one that ends the program for the system call of that number
//   cuda-errno CALL  the same under one that answers EPERM to it
//   cuda-mdwe  with CUDA, and has forbidden itself to make memory executable (PR_SET_MDWE)
//   cuda-sqpoll  with CUDA, and with a thread of the kernel's own (io_uring)
//   cuda-stackless  with CUDA, and with a thread whose stack pointer is 0
//   cuda-worker CALL  the same of one thread alone, which calls the driver all the time
//   cuda-vfork  with CUDA; its first thread waits for a child of vfork(2) that does not come back
//   private     like idle, but no other may look into it (PR_SET_DUMPABLE)
//   effective   like idle, with another effective user
//   vfork       like idle, while its first thread waits for a child of vfork(2) again and again
//   exec        becomes this program anew, every few milliseconds
//   become PATH like idle; becomes that program when it is asked to end
//   cuda-become PATH  the same with CUDA and a block of memory
//   leaderless  like idle, but its first thread has ended
//   unload LIBRARY  like idle; has loaded that library, and unloads it on SIGUSR1
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

std::atomic<bool> g_end{false};
std::atomic<int> g_wrong{0};
std::atomic<std::uint64_t> g_rounds{0};

void wrong(int line) {
  int none = 0;
  g_wrong.compare_exchange_strong(none, line);
}
#define RIGHT(condition)               \
  do {                                 \
    if (!(condition)) wrong(__LINE__); \
  } while (false)

// What of the driver it uses.
struct Cuda {
  using Result = unsigned;
  Result (*init)(unsigned) = nullptr;
  Result (*retain)(void**, int) = nullptr;
  Result (*set_current)(void*) = nullptr;
  Result (*allocate)(unsigned long long*, std::size_t) = nullptr;
  Result (*free)(unsigned long long) = nullptr;
  Result (*fill)(unsigned long long, unsigned, std::size_t) = nullptr;
  Result (*copy_out)(void*, unsigned long long, std::size_t) = nullptr;
  Result (*attribute)(void*, unsigned, unsigned long long) = nullptr;
  Result (*synchronize)() = nullptr;
  void* context = nullptr;

  bool load() {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return false;
    const auto find = [&](auto& function, const char* name) {
      *reinterpret_cast<void**>(&function) = ::dlsym(library, name);
    };
    find(init, "cuInit");
    find(retain, "cuDevicePrimaryCtxRetain");
    find(set_current, "cuCtxSetCurrent");
    find(allocate, "cuMemAlloc_v2");
    find(free, "cuMemFree_v2");
    find(fill, "cuMemsetD32_v2");
    find(copy_out, "cuMemcpyDtoH_v2");
    find(attribute, "cuPointerGetAttribute");
    Result (*look_up)(const char*, void**, int, std::uint64_t, void*) = nullptr;
    find(look_up, "cuGetProcAddress_v2");
    constexpr int kVersion = 12000;
    if (look_up("cuCtxSynchronize", reinterpret_cast<void**>(&synchronize), kVersion, 0, nullptr) !=
            0 ||
        look_up("cuMemFree", reinterpret_cast<void**>(&free), kVersion, 0, nullptr) != 0)
      return false;
    return init(0) == 0 && retain(&context, 0) == 0;
  }
};

void use_driver(const Cuda& cuda, unsigned seed) {
  unsigned long long at = 0;
  constexpr std::size_t kWords = 1024;
  RIGHT(cuda.set_current(cuda.context) == 0);
  RIGHT(cuda.allocate(&at, kWords * 4) == 0);
  RIGHT(cuda.fill(at, seed, kWords) == 0);
  std::vector<unsigned> content(kWords);
  RIGHT(cuda.copy_out(content.data(), at, kWords * 4) == 0);
  RIGHT(content.front() == seed && content.back() == seed);
  unsigned type = 0;
  RIGHT(cuda.attribute(&type, 2, at) == 0 && type == 2);
  RIGHT(cuda.free(at) == 0);
}

// Of the block that all threads share: each has a part, whose content outlasts whatever is done to
// the process.
constexpr std::size_t kBlock = std::size_t{64} << 20;
constexpr std::size_t kPart = std::size_t{256} << 10;
unsigned long long g_block = 0;

void make_block(const Cuda& cuda) {
  RIGHT(cuda.set_current(cuda.context) == 0 && cuda.allocate(&g_block, kBlock) == 0);
  RIGHT(cuda.fill(g_block, 7, kBlock / 4) == 0);
}

void use_block(const Cuda& cuda, unsigned number) {
  RIGHT(cuda.set_current(cuda.context) == 0);
  const unsigned long long part = g_block + number % (kBlock / kPart) * kPart;
  std::vector<unsigned> content(kPart / 4);
  for (unsigned last = 7, round = 0;; ++round) {
    RIGHT(cuda.copy_out(content.data(), part, kPart) == 0);
    RIGHT(content.front() == last && content[content.size() / 2] == last && content.back() == last);
    last = number * 1000003 + round;
    RIGHT(cuda.fill(part, last, kPart / 4) == 0);
    if (round % 4 == 1) use_driver(cuda, last);
    if (round % 16 == 3) {
      unsigned long long other = 0;
      RIGHT(cuda.allocate(&other, std::size_t{4} << 20) == 0 && cuda.free(other) == 0);
    }
    std::size_t size = 0;
    RIGHT(cuda.attribute(&size, 12, part) == 0 && size == kBlock);
    unsigned legacy_ipc = 0;
    RIGHT(cuda.attribute(&legacy_ipc, 10, part) == 0 && (legacy_ipc & 1) == 1);
    RIGHT(cuda.synchronize() == 0);
    ++g_rounds;
  }
}

// The driver's area for a large block is for others when that has gone.
void use_tail(const Cuda& cuda) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  constexpr std::size_t kSizes[] = {3 * kMiB, 23 * kMiB};
  unsigned long long large = 0;
  unsigned long long blocks[2] = {};
  RIGHT(cuda.set_current(cuda.context) == 0);
  RIGHT(cuda.allocate(&large, 38 * kMiB) == 0 && cuda.allocate(&blocks[1], kSizes[1]) == 0);
  RIGHT(cuda.free(large) == 0 && cuda.allocate(&blocks[0], kSizes[0]) == 0);
  RIGHT(blocks[0] == large && blocks[1] == large + 38 * kMiB);
  for (int i = 0; i < 2; ++i)
    RIGHT(cuda.fill(blocks[i], 7 + static_cast<unsigned>(i), kSizes[i] / 4) == 0);
  std::vector<unsigned> content(kSizes[1] / 4);
  for (;;) {
    for (unsigned i = 0; i < 2; ++i) {
      RIGHT(cuda.copy_out(content.data(), blocks[i], kSizes[i]) == 0);
      RIGHT(content.front() == 7 + i && content[kSizes[i] / 8] == 7 + i &&
            content[kSizes[i] / 4 - 1] == 7 + i);
    }
    ++g_rounds;
  }
}

void use_memory(unsigned seed) {
  std::vector<std::vector<unsigned char>> pieces;
  unsigned random = seed;
  for (int i = 0; i < 60; ++i) {
    random = random * 1664525 + 1013904223;
    pieces.emplace_back(random % 5000 + 1, static_cast<unsigned char>(seed + pieces.size()));
    if (random % 3 == 0) pieces.erase(pieces.begin());
  }
  for (const auto& piece : pieces)
    RIGHT(piece.front() == piece.back());
}

void use_loader() {
  void* library = ::dlopen("libm.so.6", RTLD_NOW | RTLD_LOCAL);
  void* other = ::dlopen("libutil.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) RIGHT(::dlsym(library, "cos") != nullptr);
  if (other != nullptr) ::dlclose(other);
  if (library != nullptr) ::dlclose(library);
}

thread_local std::uint64_t g_own = 17;

void use_threads() {
  std::thread([] {
    RIGHT(g_own == 17);
    g_own = 3;
  }).join();
  RIGHT(g_own == 17);
}

void use_fork() {
  const pid_t child = ::fork();
  if (child == 0) {
    std::free(std::malloc(100));
    ::_exit(7);
  }
  int status = 0;
  RIGHT(child > 0 && ::waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
}

void load(const Cuda* cuda, unsigned number) {
  for (unsigned round = 0;; ++round) {
    const unsigned what = (number + round) % 8;
    use_memory(number * 7919 + round);
    if (what == 0) use_loader();
    if (what == 2) use_threads();
    if (cuda != nullptr && what % 2 == 1) use_driver(*cuda, number * 1000003 + round);
    if (number == 1 && round % 64 == 0) use_fork();
    ++g_rounds;
  }
}

void set_filter(unsigned answer, unsigned call, unsigned whose = SECCOMP_FILTER_FLAG_TSYNC) {
  const sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, answer),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog all{static_cast<unsigned short>(std::size(program)),
                       const_cast<sock_filter*>(program)};
  RIGHT(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  RIGHT(::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, whose, &all) == 0);
}

void filter(bool kills, unsigned call = SYS_clone, unsigned whose = SECCOMP_FILTER_FLAG_TSYNC) {
  set_filter(kills ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ALLOW, call, whose);
}

void poll_in_kernel() {
  io_uring_params parameters{};
  parameters.flags = IORING_SETUP_SQPOLL;
  parameters.sq_thread_idle = 60000;
  if (::syscall(SYS_io_uring_setup, 8, &parameters) < 0) std::printf("no io_uring\n");
}

void spin_without_stack() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
  __asm__ volatile(
      "xor %%esp, %%esp\n"
      "1: pause\n"
      "jmp 1b" ::
          : "memory");
}

void work_under_filter(const Cuda& cuda, unsigned call) {
  RIGHT(cuda.set_current(cuda.context) == 0);
  filter(true, call, 0);
  while (!g_end) {
    unsigned long long at = 0;
    RIGHT(cuda.allocate(&at, 4 << 20) == 0 && cuda.free(at) == 0);
    ++g_rounds;
  }
}

void wait_for_children() {
  while (!g_end) {
    const pid_t child = ::vfork();
    if (child == 0) {
      const timespec moment{0, 300'000'000};
      ::syscall(SYS_nanosleep, &moment, nullptr);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ++g_rounds;
  }
}

// As processes do that hand something over; it ends with them.
void share(const char* path) {
  const int file = ::open(path, O_RDWR | O_CREAT, 0600);
  RIGHT(::ftruncate(file, 4096) == 0);
  RIGHT(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) != MAP_FAILED);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until both have it
  ::unlink(path);
}

// The last byte of all code before the library's, where it is not in use, so that the library's is
// the first with room for a system call of the tool's.
void fill_code_before(const char* library) {
  std::ifstream maps("/proc/self/maps");
  std::fstream memory("/proc/self/mem", std::ios::in | std::ios::out | std::ios::binary);
  for (std::string line; std::getline(maps, line) && line.find(library) == std::string::npos;) {
    if (line.find(" r-xp ") == std::string::npos || line.find('/') == std::string::npos) continue;
    const auto end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
    memory.seekg(static_cast<std::streamoff>(end - 1));
    if (memory.get() != 0) continue;
    memory.seekp(static_cast<std::streamoff>(end - 1));
    RIGHT(static_cast<bool>(memory.put('\xcc').flush()));
  }
}

std::atomic<void*> g_library{nullptr};

void unload_when_asked(const char* path) {
  sigset_t one;
  ::sigemptyset(&one);
  ::sigaddset(&one, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &one, nullptr);
  g_library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  RIGHT(g_library != nullptr);
  fill_code_before(path);
  std::thread([one] {
    int signal = 0;
    RIGHT(::sigwait(&one, &signal) == 0 && ::dlclose(g_library) == 0);
    std::printf("unloaded\n");
    std::fflush(stdout);
  }).detach();
}

void idle() {
  std::thread([] {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ++g_rounds;
    }
  }).detach();
}

[[noreturn]] void report_at_end() {
  const std::uint64_t before = g_rounds;
  const auto rest = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  while (!g_end)
    rest();
  // The end may be asked for before the others have got a processor again, and before this looks:
  // they go on until the process ends.
  for (int rests = 0; g_rounds == before && rests < 2000; ++rests)
    rest();
  if (g_rounds == before) wrong(__LINE__);
  // Those that work may be anywhere.
  std::printf(g_wrong == 0 ? "right after %llu rounds\n" : "wrong: line %llu\n",
              g_wrong == 0 ? static_cast<unsigned long long>(g_rounds)
                           : static_cast<unsigned long long>(g_wrong));
  std::fflush(stdout);
  ::_exit(g_wrong == 0 ? 0 : 1);
}

}  // namespace

int main(int argc, char** argv) {
  struct sigaction action {};
  action.sa_handler = [](int) { g_end = true; };
  ::sigaction(SIGTERM, &action, nullptr);
  const std::string_view mode = argc > 1 ? argv[1] : "idle";
  const auto say = [] {
    std::printf("ready\n");
    std::fflush(stdout);
  };
  if (mode == "exec") {
    if (argc < 3) say();
    std::thread([] { ::pause(); }).detach();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (g_end) ::_exit(0);
    ::execl("/proc/self/exe", argv[0], "exec", "again", nullptr);
    return 1;
  }
  if (mode == "become") {  // another program, when it is asked to end
    idle();
    say();
    while (!g_end)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ::execl(argv[2], argv[2], "idle", nullptr);
    return 1;
  }
  if (mode == "unload") {  // first: all other threads have to block the signal, too
    RIGHT(argc > 2);
    unload_when_asked(argv[2]);
  }
  static Cuda cuda;
  if (mode == "load") {
    const bool has_cuda = cuda.load();
    const int threads = argc > 2 ? static_cast<int>(std::strtol(argv[2], nullptr, 10)) : 50;
    for (int i = 0; i < threads; ++i)
      std::thread(load, has_cuda ? &cuda : nullptr, static_cast<unsigned>(i)).detach();
  } else if (mode == "blocks") {
    RIGHT(cuda.load());
    make_block(cuda);
    const int threads = argc > 2 ? static_cast<int>(std::strtol(argv[2], nullptr, 10)) : 50;
    for (int i = 0; i < threads; ++i)
      std::thread(use_block, std::cref(cuda), static_cast<unsigned>(i)).detach();
  } else if (mode == "tail") {
    RIGHT(cuda.load());
    std::thread(use_tail, std::cref(cuda)).detach();
    while (g_rounds == 0 && g_wrong == 0)
      ::usleep(2000);
  } else if (mode == "alone") {
    say();
    while (!g_end)
      ::usleep(2000);
    std::printf("right\n");
    return 0;
  } else {
    idle();
  }
  if (mode == "cuda-become") {
    RIGHT(cuda.load() && argc > 2);
    make_block(cuda);
    say();
    while (!g_end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ::execl(argv[2], argv[2], "60", nullptr);
    return 1;
  }
  if (mode == "cuda-refusing") {
    RIGHT(cuda.load());
    if (argc > 2) share(argv[2]);
    unsigned long long at = 0;
    RIGHT(cuda.set_current(cuda.context) == 0 && cuda.allocate(&at, 1 << 20) == 0);
    filter(true);
  }
  if (mode == "cuda-without") {
    RIGHT(cuda.load() && argc > 2);
    unsigned long long at = 0;
    RIGHT(cuda.set_current(cuda.context) == 0 && cuda.allocate(&at, 1 << 20) == 0);
    filter(true, static_cast<unsigned>(std::strtoul(argv[2], nullptr, 10)));
  }
  if (mode == "cuda-errno") {
    RIGHT(cuda.load() && argc > 2);
    set_filter(SECCOMP_RET_ERRNO | EPERM,
               static_cast<unsigned>(std::strtoul(argv[2], nullptr, 10)));
  }
  if (mode == "cuda-mdwe") {
    constexpr int kSetDenied = 65;  // linux/prctl.h, since Linux 6.3
    RIGHT(cuda.load());
    if (::prctl(kSetDenied, 1UL, 0UL, 0UL, 0UL) != 0) std::printf("no mdwe\n");
  }
  if (mode == "cuda-sqpoll") {
    RIGHT(cuda.load());
    poll_in_kernel();
  }
  if (mode == "cuda-stackless") {
    RIGHT(cuda.load());
    std::thread(spin_without_stack).detach();
  }
  if (mode == "cuda-worker") {
    RIGHT(cuda.load() && argc > 2);
    const auto call = static_cast<unsigned>(std::strtoul(argv[2], nullptr, 10));
    std::thread(work_under_filter, std::cref(cuda), call).detach();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  if (mode == "filter") filter(false);
  if (mode == "refusing") filter(true);
  if (mode == "private") RIGHT(::prctl(PR_SET_DUMPABLE, 0) == 0);
  if (mode == "effective") RIGHT(::syscall(SYS_setresuid, -1, 65534, -1) == 0);
  say();
  if (mode == "vfork") {
    std::thread(report_at_end).detach();
    wait_for_children();
    std::this_thread::sleep_for(std::chrono::seconds(5));
  }
  if (mode == "cuda-vfork") {
    RIGHT(cuda.load());
    std::thread(report_at_end).detach();
    if (::vfork() == 0) {
      const timespec rest{300, 0};
      ::syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL);
      ::syscall(SYS_nanosleep, &rest, nullptr);
      ::_exit(0);
    }
  }
  if (mode == "leaderless") {
    std::thread(report_at_end).detach();
    ::syscall(SYS_exit, 0);
  }
  report_at_end();
}
