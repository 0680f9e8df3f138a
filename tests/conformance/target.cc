// Long because it is a list, with one command for each thing that a case asks of its target.
#include "target.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include "api.h"
#include "kernels.h"

namespace stasis::conformance {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

Target::Target(const std::string& environment) {
  int to[2];
  int from[2];
  if (::pipe2(to, O_CLOEXEC) != 0 || ::pipe2(from, O_CLOEXEC) != 0) std::abort();
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(to[0], 0);
    ::dup2(from[1], 1);
    if (const auto equals = environment.find('='); equals != environment.npos) {
      ::setenv(environment.substr(0, equals).c_str(), environment.c_str() + equals + 1, 1);
    }
    ::execl("/proc/self/exe", "conformance", "--target", nullptr);
    ::_exit(127);
  }
  ::close(to[0]);
  ::close(from[1]);
  to_ = to[1];
  from_ = from[0];
}

Target::~Target() {
  kill();
  reap();
  ::close(to_);
  ::close(from_);
}

void Target::kill() {
  if (pid_ > 0) ::kill(pid_, SIGKILL);
}

bool Target::died() {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == pid_ && info.si_code != CLD_EXITED;
}

void Target::reap() {
  if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

std::string Target::ask_text(const std::string& command, int timeout_ms) {
  const std::string line = command + "\n";
  if (::write(to_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) return {};
  std::string answer;
  for (;;) {
    pollfd p{from_, POLLIN, 0};
    if (::poll(&p, 1, timeout_ms) <= 0) return {};
    char c;
    if (::read(from_, &c, 1) != 1) return {};
    if (c == '\n') return answer;
    answer += c;
  }
}

long Target::ask(const std::string& command, int timeout_ms) {
  const auto answer = ask_text(command, timeout_ms);
  return answer.empty() ? -1 : std::strtol(answer.c_str(), nullptr, 10);
}

namespace {

constexpr unsigned kTargetWords = 1 << 20;  // 4 MiB

struct Buffer {
  std::string kind;
  CUdeviceptr device = 0;
  unsigned words = 0;
  unsigned expected = 0;  // word i holds expected + i
};

// Everything that a target has; a leaf of globals would do, but this says what belongs together.
class Worker {
 public:
  // False: the end.
  bool perform(const std::string& line, std::ostream& out) {
    std::istringstream words(line);
    std::string command;
    std::string argument;
    words >> command >> argument;
    if (command == "exit") return false;
    const auto found = commands_.find(command);
    if (found == commands_.end()) std::abort();
    found->second(argument, out);
    return true;
  }

 private:
  using Handler = std::function<void(const std::string&, std::ostream&)>;

  static unsigned code(CUresult rc) { return static_cast<unsigned>(rc); }

  CUresult init() {
    if (auto rc = api().cuInit(0)) return rc;
    if (auto rc = api().cuDevicePrimaryCtxRetain(&context_, 0)) return rc;
    if (auto rc = api().cuCtxSetCurrent(context_)) return rc;
    void* flag = nullptr;
    if (auto rc = api().cuMemHostAlloc(&flag, 4096, kMemHostAllocDeviceMap)) return rc;
    flag_ = new (flag) std::atomic<unsigned>(0);
    if (auto rc = api().cuModuleLoadData(&module_, kPtx)) return rc;
    if (auto rc = api().cuModuleGetFunction(&increment_, module_, "increment")) return rc;
    if (auto rc = api().cuModuleGetFunction(&wait_flag_, module_, "wait_flag")) return rc;
    if (auto rc = api().cuMemAlloc_v2(&spare_, 4096)) return rc;
    if (auto rc = api().cuEventCreate(&event_, 0)) return rc;
    if (auto rc = api().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING)) return rc;
    return api().cuEventRecord(event_, stream_);
  }

  CUresult allocate(const std::string& kind, CUdeviceptr& out, unsigned words) {
    const std::size_t bytes = std::size_t{words} * 4;
    if (kind == "pinned") {
      void* host = nullptr;
      auto rc = api().cuMemAllocHost_v2(&host, bytes);
      out = reinterpret_cast<CUdeviceptr>(host);
      return rc;
    }
    if (kind == "registered") {
      void* host =
          ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      std::memset(host, 0, bytes);
      out = reinterpret_cast<CUdeviceptr>(host);
      return api().cuMemHostRegister_v2(host, bytes, kMemHostRegisterDeviceMap);
    }
    if (kind == "pool") {
      auto rc = api().cuMemAllocAsync(&out, bytes, stream_);
      return rc ? rc : api().cuStreamSynchronize(stream_);
    }
    if (kind == "managed") return api().cuMemAllocManaged(&out, bytes, CU_MEM_ATTACH_GLOBAL);
    if (kind == "vmm") {
      CUmemAllocationProp prop{};
      prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
      prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
      prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
      if (auto rc = api().cuMemCreate(&vmm_handle_, bytes, &prop, 0)) return rc;
      return map(vmm_handle_, bytes, out);
    }
    return api().cuMemAlloc_v2(&out, bytes);
  }

  static CUresult map(CUmemGenericAllocationHandle handle, std::size_t bytes, CUdeviceptr& out) {
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, 0},
                                 CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    if (auto rc = api().cuMemAddressReserve(&out, bytes, 0, 0, 0)) return rc;
    if (auto rc = api().cuMemMap(out, bytes, 0, handle, 0)) return rc;
    return api().cuMemSetAccess(out, bytes, &access, 1);
  }

  // The descriptor of another process, by its number there: "PID:FD".
  CUresult vmm_import(const std::string& where) {
    const auto colon = where.find(':');
    const auto process = ::syscall(SYS_pidfd_open, std::stoi(where), 0);
    const auto fd = ::syscall(SYS_pidfd_getfd, process, std::stoi(where.substr(colon + 1)), 0);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    CUmemGenericAllocationHandle handle = 0;
    auto rc = api().cuMemImportFromShareableHandle(
        &handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    ::close(static_cast<int>(fd));
    ::close(static_cast<int>(process));
    return rc ? rc : map(handle, std::size_t{kTargetWords} * 4, opened_);
  }

  int vmm_export() {
    int fd = -1;
    api().cuMemExportToShareableHandle(&fd, vmm_handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                       0);
    return fd;
  }

  CUresult alloc(const std::string& kind) {
    Buffer buffer;
    buffer.kind = kind;
    buffer.words = kind == "small" ? 256 : kTargetWords;
    buffer.expected = 1000 * static_cast<unsigned>(buffers_.size() + 1);
    if (auto rc = allocate(kind, buffer.device, buffer.words)) return rc;
    std::vector<unsigned> content(buffer.words);
    for (unsigned i = 0; i < buffer.words; ++i)
      content[i] = buffer.expected + i;
    buffers_.push_back(buffer);
    if (is_host(kind)) {
      std::memcpy(reinterpret_cast<void*>(buffer.device), content.data(), content.size() * 4);
      return CUDA_SUCCESS;
    }
    return api().cuMemcpyHtoD_v2(buffer.device, content.data(), content.size() * 4);
  }

  static bool is_host(const std::string& kind) {
    return kind == "pinned" || kind == "registered" || kind == "managed";
  }

  long check() {
    long wrong = 0;
    for (const auto& buffer : buffers_) {
      std::vector<unsigned> content(buffer.words);
      if (is_host(buffer.kind)) {
        if (api().cuCtxSynchronize() != CUDA_SUCCESS) ++wrong;
        std::memcpy(content.data(), reinterpret_cast<void*>(buffer.device), content.size() * 4);
      } else if (api().cuMemcpyDtoH_v2(content.data(), buffer.device, content.size() * 4)) {
        ++wrong;
        continue;
      }
      for (unsigned i = 0; i < buffer.words; ++i) {
        if (content[i] != buffer.expected + i) {
          ++wrong;
          break;
        }
      }
    }
    return wrong;
  }

  CUresult add() {
    for (auto& buffer : buffers_) {
      void* params[] = {&buffer.device, &buffer.words};
      const unsigned blocks = (buffer.words + 255) / 256;
      if (auto rc = api().cuLaunchKernel(increment_, blocks, 1, 1, 256, 1, 1, 0, stream_, params,
                                         nullptr)) {
        return rc;
      }
      ++buffer.expected;
    }
    return api().cuStreamSynchronize(stream_);
  }

  CUresult launch_wait() {
    *flag_ = 0;
    CUdeviceptr flag = 0;
    if (auto rc = api().cuMemHostGetDevicePointer_v2(&flag, flag_, 0)) return rc;
    void* params[] = {&flag};
    return api().cuLaunchKernel(wait_flag_, 1, 1, 1, 1, 1, 1, 0, stream_, params, nullptr);
  }

  static void wait_on_host(void* flag) {
    while (static_cast<std::atomic<unsigned>*>(flag)->load() == 0)
      ::usleep(1000);
  }

  void call(const std::string& name) {
    std::thread([this, name] {
      api().cuCtxSetCurrent(context_);
      ++started_;
      named_call(name);
      ++returned_;
    }).detach();
  }

  // The thread above needs a context before it is measured, so that part must not count: it is only
  // started while the API is open, and told to go later.
  void prepare(const std::string& name) {
    ++prepared_;
    std::thread([this, name] {
      api().cuCtxSetCurrent(context_);
      ++ready_;
      while (!go_)
        ::usleep(500);
      named_call(name);
      std::lock_guard lock(mutex_);
      returned_names_.push_back(name);
      ++returned_;
    }).detach();
  }

  void named_call(const std::string& name) {
    int number = 0;
    std::size_t a = 0;
    std::size_t b = 0;
    void* pointer = nullptr;
    const char* text = nullptr;
    CUdriverProcAddressQueryResult status;
    CUcontext context;
    CUdeviceptr address = 0;
    CUuuid uuid;
    CUstream stream;
    CUevent event;
    CUmodule module;
    CUmemGenericAllocationHandle handle;
    const std::map<std::string, std::function<void()>> calls = {
        {"cuMemGetInfo", [&] { api().cuMemGetInfo_v2(&a, &b); }},
        {"cuMemAlloc", [&] { api().cuMemAlloc_v2(&address, 4096); }},
        {"cuCtxSynchronize", [&] { api().cuCtxSynchronize(); }},
        {"cuStreamSynchronize", [&] { api().cuStreamSynchronize(stream_); }},
        {"cuStreamQuery", [&] { api().cuStreamQuery(stream_); }},
        {"cuStreamCreate", [&] { api().cuStreamCreate(&stream, 0); }},
        {"cuEventCreate", [&] { api().cuEventCreate(&event, 0); }},
        {"cuEventQuery", [&] { api().cuEventQuery(event_); }},
        {"cuEventSynchronize", [&] { api().cuEventSynchronize(event_); }},
        {"cuEventRecord", [&] { api().cuEventRecord(event_, stream_); }},
        {"cuStreamWaitEvent", [&] { api().cuStreamWaitEvent(stream_, event_, 0); }},
        {"cuLaunchKernel",
         [&] {
           unsigned words = 0;
           void* params[] = {&buffers_[0].device, &words};
           api().cuLaunchKernel(increment_, 1, 1, 1, 32, 1, 1, 0, stream_, params, nullptr);
         }},
        {"cuMemsetD32Async",
         [&] { api().cuMemsetD32Async(buffers_[0].device, buffers_[0].expected, 1, stream_); }},
        {"cuMemcpyHtoD",
         [&] { api().cuMemcpyHtoD_v2(buffers_[0].device, &buffers_[0].expected, 4); }},
        {"cuMemcpyDtoH", [&] { api().cuMemcpyDtoH_v2(&number, buffers_[0].device, 4); }},
        {"cuMemFree", [&] { api().cuMemFree_v2(spare_); }},
        {"cuMemHostAlloc", [&] { api().cuMemHostAlloc(&pointer, 4096, 0); }},
        {"cuMemAllocAsync", [&] { api().cuMemAllocAsync(&address, 4096, stream_); }},
        {"cuModuleLoadData", [&] { api().cuModuleLoadData(&module, kPtx); }},
        {"cuMemGetAddressRange",
         [&] { api().cuMemGetAddressRange_v2(&address, &a, buffers_[0].device); }},
        {"cuMemCreate",
         [&] {
           CUmemAllocationProp prop{};
           prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
           prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
           api().cuMemCreate(&handle, std::size_t{2} << 20, &prop, 0);
         }},
        {"cuLaunchHostFunc",
         [&] {
           api().cuLaunchHostFunc(
               stream_, [](void*) {}, nullptr);
         }},
        {"cuCtxGetCurrent", [&] { api().cuCtxGetCurrent(&context); }},
        {"cuCtxSetCurrent", [&] { api().cuCtxSetCurrent(context_); }},
        {"cuCtxGetDevice", [&] { api().cuCtxGetDevice(&number); }},
        {"cuDeviceGetCount", [&] { api().cuDeviceGetCount(&number); }},
        {"cuDeviceGet", [&] { api().cuDeviceGet(&number, 0); }},
        {"cuDeviceGetUuid", [&] { api().cuDeviceGetUuid_v2(&uuid, 0); }},
        {"cuDeviceTotalMem", [&] { api().cuDeviceTotalMem_v2(&a, 0); }},
        {"cuDeviceGetAttribute",
         [&] { api().cuDeviceGetAttribute(&number, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0); }},
        {"cuDevicePrimaryCtxRetain", [&] { api().cuDevicePrimaryCtxRetain(&context, 0); }},
        {"cuPointerGetAttribute",
         [&] {
           api().cuPointerGetAttribute(&number, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                       reinterpret_cast<CUdeviceptr>(flag_));
         }},
        {"cuMemAddressReserve",
         [&] { api().cuMemAddressReserve(&address, std::size_t{2} << 20, 0, 0, 0); }},
        {"cuInit", [&] { api().cuInit(0); }},
        {"cuDriverGetVersion", [&] { api().cuDriverGetVersion(&number); }},
        {"cuGetErrorName", [&] { api().cuGetErrorName(CUDA_ERROR_UNKNOWN, &text); }},
        {"cuGetProcAddress",
         [&] { api().cuGetProcAddress_v2("cuInit", &pointer, 12000, 0, &status); }},
    };
    calls.at(name)();
  }

  void start_busy(unsigned count) {
    stop_ = false;
    for (unsigned i = 0; i < count; ++i) {
      busy_.emplace_back([this] {
        api().cuCtxSetCurrent(context_);
        CUstream stream;
        api().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
        while (!stop_) {
          api().cuMemsetD32Async(buffers_[0].device, buffers_[0].expected, 1, stream);
          api().cuStreamSynchronize(stream);
          progress_ += 2;
        }
      });
    }
  }

  std::string ipc_handle() {
    CUipcMemHandle handle;
    if (api().cuIpcGetMemHandle(&handle, buffers_.at(0).device)) return "-1";
    std::string text;
    char digits[3];
    for (char c : handle.reserved) {
      std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(c));
      text += digits;
    }
    return text;
  }

  CUresult ipc_open(const std::string& text) {
    CUipcMemHandle handle;
    for (std::size_t i = 0; i < sizeof handle.reserved; ++i) {
      handle.reserved[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    }
    return api().cuIpcOpenMemHandle_v2(&opened_, handle, kIpcMemLazyEnablePeerAccess);
  }

  static long other_thread() {
    std::atomic<long> tid{0};
    std::thread([&] {
      tid = ::syscall(SYS_gettid);
      for (;;)
        ::pause();
    }).detach();
    while (!tid)
      ::usleep(100);
    return tid;
  }

  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction increment_ = nullptr;
  CUfunction wait_flag_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent event_ = nullptr;
  CUdeviceptr spare_ = 0;
  CUdeviceptr opened_ = 0;
  CUmemGenericAllocationHandle vmm_handle_ = 0;
  std::atomic<unsigned>* flag_ = nullptr;
  std::vector<Buffer> buffers_;
  std::vector<std::thread> busy_;
  std::mutex mutex_;
  std::vector<std::string> returned_names_;
  std::atomic<bool> stop_{false};
  std::atomic<bool> go_{false};
  std::atomic<long> progress_{0};
  std::atomic<long> started_{0};
  std::atomic<long> prepared_{0};
  std::atomic<long> ready_{0};
  std::atomic<long> returned_{0};

  const std::map<std::string, Handler> commands_ = {
      {"init", [this](auto&, auto& out) { out << code(init()); }},
      {"cuinit", [](auto&, auto& out) { out << code(api().cuInit(0)); }},
      {"alloc", [this](auto& kind, auto& out) { out << code(alloc(kind)); }},
      {"big",
       [](auto& mib, auto& out) {
         CUdeviceptr device = 0;
         const auto bytes = std::stoul(mib) << 20;
         auto rc = api().cuMemAlloc_v2(&device, bytes);
         if (!rc) rc = api().cuMemsetD8_v2(device, 7, bytes);
         out << code(rc);
       }},
      {"check", [this](auto&, auto& out) { out << check(); }},
      {"add", [this](auto&, auto& out) { out << code(add()); }},
      {"flagkernel", [this](auto&, auto& out) { out << code(launch_wait()); }},
      {"flaghost",
       [this](auto&, auto& out) {
         *flag_ = 0;
         out << code(api().cuLaunchHostFunc(stream_, wait_on_host, flag_));
       }},
      {"release",
       [this](auto&, auto& out) {
         *flag_ = 1;
         out << 0;
       }},
      {"sync", [](auto&, auto& out) { out << code(api().cuCtxSynchronize()); }},
      {"freemib",
       [](auto&, auto& out) {
         std::size_t free = 0;
         std::size_t total = 0;
         if (api().cuMemGetInfo_v2(&free, &total))
           out << -2;
         else
           out << (free >> 20);
       }},
      {"call",
       [this](auto& name, auto& out) {
         call(name);
         out << 0;
       }},
      {"prepare",
       [this](auto& name, auto& out) {
         prepare(name);
         while (ready_ < prepared_)
           ::usleep(500);
         out << 0;
       }},
      {"go",
       [this](auto&, auto& out) {
         go_ = true;
         out << 0;
       }},
      {"done", [this](auto&, auto& out) { out << returned_; }},
      {"donenames",
       [this](auto&, auto& out) {
         std::lock_guard lock(mutex_);
         out << '|';
         for (const auto& name : returned_names_)
           out << name << '|';
       }},
      {"busy",
       [this](auto& count, auto& out) {
         start_busy(static_cast<unsigned>(std::stoul(count)));
         out << 0;
       }},
      {"stop",
       [this](auto&, auto& out) {
         stop_ = true;
         for (auto& thread : busy_)
           thread.join();
         busy_.clear();
         out << progress_;
       }},
      {"progress", [this](auto&, auto& out) { out << progress_; }},
      {"ipcget", [this](auto&, auto& out) { out << ipc_handle(); }},
      {"ipcopen", [this](auto& text, auto& out) { out << code(ipc_open(text)); }},
      {"ipcclose", [this](auto&, auto& out) { out << code(api().cuIpcCloseMemHandle(opened_)); }},
      {"vmmfd", [this](auto&, auto& out) { out << vmm_export(); }},
      {"closefd", [](auto& fd, auto& out) { out << ::close(std::stoi(fd)); }},
      {"vmmimport", [this](auto& where, auto& out) { out << code(vmm_import(where)); }},
      {"tid", [](auto&, auto& out) { out << other_thread(); }},
  };
};

}  // namespace

int target_main() {
  // Answers while threads of ours are stuck in the driver; never destroyed for the same reason.
  auto* worker = new Worker;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::ostringstream out;
    if (!worker->perform(line, out)) break;
    std::cout << out.str() << std::endl;
  }
  ::_exit(0);
}

}  // namespace stasis::conformance
