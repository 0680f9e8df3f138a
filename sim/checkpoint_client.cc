#include "sim/checkpoint_client.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "abi/descriptor_message.h"
#include "sim/config.h"
#include "sim/faults.h"
#include "sim/registry.h"

namespace stasis::sim {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

// What is read of a target's control block.
struct Found {
  char magic[16];
  std::uint32_t version;
  std::uint32_t size;
  std::uint32_t active;
  std::uint32_t state;
  std::int32_t restore_tid;
  std::int32_t client_fd;
};
static_assert(sizeof(Found) == offsetof(ControlBlock, client_fd) + sizeof(std::int32_t));

std::string proc_path(int pid, const char* name) {
  return "/proc/" + std::to_string(pid) + "/" + name;
}

// The whole of a /proc file; false with errno.
bool slurp(const std::string& path, std::string& out) {
  Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return false;
  std::size_t used = 0;
  out.resize(64 << 10);
  for (;;) {
    const auto n = ::read(file.get(), out.data() + used, out.size() - used);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    if (n == 0) break;
    used += static_cast<std::size_t>(n);
    if (used == out.size()) out.resize(2 * used);
  }
  out.resize(used);
  return true;
}

bool read_target(int pid, std::uint64_t address, Found& out) {
  // A process may keep the lock of its mappings for ever. This wait for it ends with SIGKILL, and
  // so with the program; that of process_vm_readv(2) does not.
  if (const Fd memory(
          ::open(("/proc/" + std::to_string(pid) + "/mem").c_str(), O_RDONLY | O_CLOEXEC));
      memory) {
    char nothing = 0;
    (void)!::pread(memory.get(), &nothing, sizeof nothing, 0);
  }
  iovec to{&out, sizeof out};
  iovec from{reinterpret_cast<void*>(address), sizeof out};
  return ::process_vm_readv(pid, &to, 1, &from, 1, 0) == ssize_t{sizeof out};
}

// One line of maps: a writable private mapping of a file called libcuda.so*, or nothing.
bool driver_data(std::string_view line, std::uint64_t& start, std::uint64_t& end) {
  const auto slash = line.rfind('/');
  if (slash == line.npos || !line.substr(slash + 1).starts_with("libcuda.so")) return false;
  const char* const last = line.data() + line.size();
  const auto from = std::from_chars(line.data(), last, start, 16);
  if (from.ec != std::errc{} || from.ptr == last || *from.ptr != '-') return false;
  const auto to = std::from_chars(from.ptr + 1, last, end, 16);
  return to.ec == std::errc{} && std::string_view(to.ptr, last).starts_with(" rw-p ");
}

bool is_control(const Found& block) {
  return std::memcmp(block.magic, kControlMagic, sizeof block.magic) == 0;
}

// Where the control blocks of processes were seen: of one with very many mappings the list takes
// seconds to read.
class KnownPlaces {
 public:
  bool read(int pid, Found& out) {
    const std::lock_guard lock(mutex_);
    const auto place = places_.find(pid);
    return place != places_.end() && read_target(pid, place->second, out) && is_control(out) &&
           out.version == kControlVersion && out.active != 0;
  }
  void note(int pid, std::uint64_t address) {
    const std::lock_guard lock(mutex_);
    places_[pid] = address;
  }

 private:
  std::mutex mutex_;
  std::map<int, std::uint64_t> places_;
};

// Never destroyed: a plugin of criu's asks while that exits.
KnownPlaces& known_places() {
  static auto* const places = new KnownPlaces;
  return *places;
}

// In what the process maps now. kNoControl: its control block is not there.
constexpr CUresult kNoControl = CUDA_ERROR_NOT_FOUND;
CUresult find_in(int pid, std::string_view rest, Found& out) {
  while (!rest.empty()) {
    const auto line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    std::uint64_t start = 0;
    std::uint64_t end = 0;
    if (!driver_data(line, start, end)) continue;
    for (; start < end; start += kControlAlignment) {
      if (!read_target(pid, start, out)) return CUDA_ERROR_OPERATING_SYSTEM;
      if (!is_control(out)) continue;
      if (out.version != kControlVersion) return CUDA_ERROR_UNKNOWN;
      known_places().note(pid, start);
      return out.active ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    }
  }
  return kNoControl;
}

CUresult find_target(int pid, Found& out) {
  if (pid <= 0) return CUDA_ERROR_OPERATING_SYSTEM;
  if (known_places().read(pid, out)) return CUDA_SUCCESS;
  std::string maps;
  constexpr int kTries = 20;
  for (int tries = 0; tries < kTries; ++tries) {
    if (!slurp(proc_path(pid, "maps"), maps)) {
      // A zombie has no memory any more, but it is still there.
      std::string status;
      if (errno == ESRCH && slurp(proc_path(pid, "status"), status) &&
          status.find("State:\tZ") != status.npos) {
        return CUDA_ERROR_NOT_INITIALIZED;
      }
      return CUDA_ERROR_OPERATING_SYSTEM;
    }
    const CUresult found = find_in(pid, maps, out);
    if (found != kNoControl) return found;
    // A line may be missing while the process maps something else.
    if (maps.find("/libcuda.so") == maps.npos && tries > 0) break;
    ::usleep(1000);
  }
  return CUDA_ERROR_NOT_INITIALIZED;
}

// What /proc writes fits; text that is no number is 0.
int number_at(const char* text) { return static_cast<int>(std::strtol(text, nullptr, 10)); }

int open_pidfd(int pid) {
  int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd >= 0) return fd;
  // A thread's id: its process is in the status.
  std::string status;
  if (!slurp(proc_path(pid, "status"), status)) return -1;
  const auto at = status.find("\nTgid:\t");
  if (at == status.npos) return -1;
  const int process = number_at(status.c_str() + at + 7);
  return process == pid ? -1 : static_cast<int>(syscall(SYS_pidfd_open, process, 0));
}

// The last number of a task's NSpid line: its id in its own namespace.
int inner_id(int pid, int tid) {
  std::string status;
  if (!slurp(proc_path(pid, ("task/" + std::to_string(tid) + "/status").c_str()), status))
    return -1;
  const auto at = status.find("\nNSpid:");
  if (at == status.npos) return -1;
  const auto line = status.substr(at + 1, status.find('\n', at + 1) - at - 1);
  const auto last = line.find_last_of("\t ");
  return last == line.npos ? -1 : number_at(line.c_str() + last + 1);
}

// Faults of the caller's environment and of the file, as one text.
CUresult read_faults(char (&out)[sizeof(Request::faults)]) {
  std::string text;
  if (const char* env = std::getenv("STASIS_SIM_FAULTS")) text = env;
  const char* named = std::getenv("STASIS_SIM_FAULTS_FILE");
  std::string path = named ? named : "";
  if (path.empty()) {
    Config config;
    std::string error;
    if (!load(config, error)) return CUDA_ERROR_INVALID_SOURCE;
    path = config.dir + "/faults";
  }
  std::string file;
  if (slurp(path, file)) {
    text += "\n" + file;
  } else if (errno != ENOENT) {
    return CUDA_ERROR_INVALID_SOURCE;
  }
  std::vector<Fault> parsed;
  std::string error;
  if (text.size() >= sizeof out || !parse_faults(text, parsed, error)) {
    return CUDA_ERROR_INVALID_SOURCE;
  }
  std::memcpy(out, text.c_str(), text.size() + 1);
  return CUDA_SUCCESS;
}

}  // namespace

CUresult target_restore_thread(int pid, int& out) {
  Found found;
  if (auto rc = find_target(pid, found); rc != CUDA_SUCCESS) return rc;
  if (inner_id(pid, found.restore_tid) == found.restore_tid) {
    out = found.restore_tid;
    return CUDA_SUCCESS;
  }
  // The target lives in another PID namespace; its thread has another number here.
  std::unique_ptr<DIR, int (*)(DIR*)> tasks(::opendir(proc_path(pid, "task").c_str()), ::closedir);
  if (!tasks) return CUDA_ERROR_OPERATING_SYSTEM;
  while (const dirent* entry = ::readdir(tasks.get())) {
    const int tid = number_at(entry->d_name);
    if (tid > 0 && inner_id(pid, tid) == found.restore_tid) {
      out = tid;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_NOT_INITIALIZED;
}

namespace {

CUresult ask(int pid, Request& request, Reply& reply) {
  Found found;
  if (auto rc = find_target(pid, found); rc != CUDA_SUCCESS) return rc;
  request.version = kControlVersion;
  Fd process(open_pidfd(pid));
  if (!process) return CUDA_ERROR_OPERATING_SYSTEM;
  Fd socket(static_cast<int>(syscall(SYS_pidfd_getfd, process.get(), found.client_fd, 0)));
  if (!socket) return CUDA_ERROR_OPERATING_SYSTEM;
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  Fd ours(ends[0]);
  Fd theirs(ends[1]);
  if (!send_with_descriptor(socket.get(), &request, sizeof request, theirs.get()))
    return CUDA_ERROR_OPERATING_SYSTEM;
  theirs.reset();
  socket.reset();

  for (;;) {
    pollfd polled[2] = {{ours.get(), POLLIN, 0}, {process.get(), POLLIN, 0}};
    if (::poll(polled, 2, -1) < 0 && errno != EINTR) return CUDA_ERROR_OPERATING_SYSTEM;
    const auto n = ::recv(ours.get(), &reply, sizeof reply, MSG_DONTWAIT);
    if (n == ssize_t{sizeof reply}) {
      // Until it has closed its end: a CRIU that comes now would find a socket with its other end
      // in another process. Not for long, as the thread may be stopped by then.
      constexpr int kClosesIn = 100;  // milliseconds
      pollfd closed{ours.get(), POLLIN, 0};
      (void)::poll(&closed, 1, kClosesIn);
      return static_cast<CUresult>(reply.result);
    }
    if (n == 0 || (polled[1].revents & POLLIN)) return CUDA_ERROR_OPERATING_SYSTEM;  // it died
  }
}

}  // namespace

CUresult ask_target(int pid, Request& request) {
  if (auto rc = read_faults(request.faults); rc != CUDA_SUCCESS) return rc;
  Reply reply;
  return ask(pid, request, reply);
}

// Asked of the restore thread too, as the real driver does: while that waits for a lock, a question
// for the state waits with it.
CUresult target_state(int pid, CUprocessState& out) {
  auto request = std::make_unique<Request>();
  request->action = Action::kState;
  Reply reply{};
  if (auto rc = ask(pid, *request, reply); rc != CUDA_SUCCESS) return rc;
  out = static_cast<CUprocessState>(reply.state);
  return CUDA_SUCCESS;
}

}  // namespace stasis::sim
