#include "agent.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <span>
#include <string>

#include "abi/agent_protocol.h"
#include "abi/agent_thread.h"
#include "abi/descriptor_message.h"
#include "abi/fd_table.h"
#include "abi/futex.h"
#include "deepbind_scan.h"
#include "eviction.h"
#include "gate.h"
#include "intercept.h"
#include "local_memory.h"
#include "managed.h"
#include "pools.h"
#include "sharing.h"
#include "thread.h"

namespace stasis::preload {
namespace {

using direct::AgentCommand;
using direct::AgentState;
using direct::ControlPage;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How often the agent looks whether its peer still lives, while there is something to undo.
constexpr milliseconds kLook{100};
// How often an agent in a user namespace looks whether its page is still the tools' (rejoin_file).
constexpr std::chrono::seconds kIdleLook{1};
// The buffer is a bit larger than what was there when it was made: programs go on allocating until
// the gate closes.
constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
// When a peer that cannot be seen any more has certainly given up: it limits its copies by 30 s and
// 200 MB/s (direct/agent_client.cc).
constexpr std::chrono::seconds kPeerGivesUp{60};
constexpr std::uint64_t kSlowestCopy = 200000000;
// Descriptors below FD_SETSIZE that a program finds free while its memory is kept.
constexpr std::uint64_t kSpareNumbers = 64;
// A batch of exports, and what the driver may open for it.
constexpr int kExportRoom = 4 * direct::kExportBatch;

std::atomic<ControlPage*> g_page{nullptr};
int g_fd = -1;
// The program is ending: the driver's own end is about to come, or has.
std::atomic<bool> g_ending{false};
std::atomic<bool> g_started{false};

// Descriptors of exported memory. Changed under a mutex that a fork waits for: a child that kept
// one would keep the memory from the GPU for as long as it lives.
pthread_mutex_t g_exporting = PTHREAD_MUTEX_INITIALIZER;

template <std::uint32_t kMost>
struct Exported {
  int fds[kMost] = {};
  // What they were when they were made: a program may close all that it did not open, and open
  // others, which get the same numbers.
  dev_t devices[kMost] = {};
  ino_t inodes[kMost] = {};
  std::uint32_t count = 0;

  // One more, by `make`, which is given where to put it.
  template <class Make>
  Outcome add(Make make) {
    ::pthread_mutex_lock(&g_exporting);
    int& fd = fds[count];
    fd = -1;
    const Outcome outcome = make(fd);
    if (outcome.ok()) {
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);
      struct stat status {};
      if (::fstat(fd, &status) == 0) {
        devices[count] = status.st_dev;
        inodes[count] = status.st_ino;
      }
      ++count;
    }
    ::pthread_mutex_unlock(&g_exporting);
    return outcome;
  }
  void close_all() {
    if (count == 0) return;
    ::pthread_mutex_lock(&g_exporting);
    close_held();
    ::pthread_mutex_unlock(&g_exporting);
  }
  // Where a thread may be kept still in the middle of a fork, with the mutex: it changes nothing
  // here then, and its child closes what it gets.
  void close_while_held() {
    const bool ours = ::pthread_mutex_trylock(&g_exporting) == 0;
    close_held();
    if (ours) ::pthread_mutex_unlock(&g_exporting);
  }
  // With the mutex held.
  void close_held() {
    for (std::uint32_t i = 0; i < count; ++i) {
      struct stat status {};
      const bool same = ::fstat(fds[i], &status) == 0 && status.st_dev == devices[i] &&
                        status.st_ino == inodes[i];
      if (same) ::close(fds[i]);
    }
    count = 0;
  }
};
// To a tool at this moment.
Exported<direct::kExportBatch> g_exported;
// What keeps memory and content that was given up until they are elsewhere (kKeep).
constexpr std::uint32_t kMostKept = FD_SETSIZE;
Exported<kMostKept> g_kept;

// The program may need descriptors meanwhile: half of what it may have stays free for it. And what
// it opens then must not get a number that select() cannot take.
bool may_have_descriptors(std::uint64_t more) {
  rlimit limit{};
  DIR* open = ::opendir("/proc/self/fd");
  if (!open) return false;
  std::uint64_t wanted = more;
  while (::readdir(open) != nullptr)
    ++wanted;
  ::closedir(open);
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && wanted <= limit.rlim_cur / 2 &&
         wanted < FD_SETSIZE - kSpareNumbers;
}

// Whether the descriptor is still the page's: a program may close all that it did not open, and
// open others, which get the same numbers. By what CRIU restores, so not by the inode.
bool holds_page(int fd) {
  struct stat status {};
  return fd >= 0 && ::fcntl(fd, F_GET_SEALS) == direct::kAgentSeals && ::fstat(fd, &status) == 0 &&
         status.st_size == sizeof(ControlPage);
}

// Whether a dump of this process may be one without the right to read /proc/PID/map_files. A
// process of several threads, as this one is, stays in its user namespace.
bool in_own_user_namespace() {
  constexpr char kInitial[] = "user:[4026531837]";  // PROC_USER_INIT_INO, the same on all kernels
  char name[sizeof kInitial + 8] = {};
  const auto length = ::readlink("/proc/self/ns/user", name, sizeof name - 1);
  return length > 0 && std::strcmp(name, kInitial) != 0;
}

// Waits for all devices, in a thread that may be left behind: what it waits for may need threads
// that the gate holds.
struct DeviceWait {
  std::vector<cuda::CUcontext> contexts;
  std::atomic<std::uint32_t> done{0};
  std::atomic<std::uint32_t> users{2};  // the last frees it
  Outcome outcome;

  void leave() {
    if (users.fetch_sub(1) == 1) delete this;
  }
  static void* run(void* argument) {
    // Not the agent's, which it would inherit: this one may be left behind in the driver.
    ::prctl(PR_SET_NAME, "stasis-wait");
    auto* self = static_cast<DeviceWait*>(argument);
    for (auto* context : self->contexts) {
      // Given up: the gate is open again, and the next context may be gone by now.
      if (self->users.load() == 1) break;
      auto result = driver().cuCtxSetCurrent(context);
      // One that was destroyed meanwhile has nothing to wait for.
      if (result != cuda::CUDA_SUCCESS) continue;
      result = driver().cuCtxSynchronize();
      if (result != cuda::CUDA_SUCCESS) {
        self->outcome = {result, "cuCtxSynchronize"};
        break;
      }
    }
    driver().cuCtxSetCurrent(nullptr);
    self->done.store(1, std::memory_order_release);
    futex::wake_all(self->done, false);
    self->leave();
    return nullptr;
  }
};

enum class Waited { kDone, kTimeout, kFailed };

Waited wait_for_devices(const Timeout& timeout, Outcome& outcome) {
  auto* wait = new DeviceWait;
  wait->contexts = known_contexts();
  if (!start_thread(&DeviceWait::run, wait)) {
    delete wait;
    outcome = {cuda::CUDA_ERROR_OPERATING_SYSTEM, "no thread to be had"};
    return Waited::kFailed;
  }
  while (!wait->done.load(std::memory_order_acquire)) {
    if (timeout.over()) break;
    futex::wait(wait->done, 0, false, timeout.nap());
  }
  auto waited = Waited::kTimeout;
  if (wait->done.load(std::memory_order_acquire)) {
    outcome = wait->outcome;
    waited = outcome.ok() ? Waited::kDone : Waited::kFailed;
  }
  wait->leave();
  return waited;
}

// One message of an id and a descriptor. False: there is none.
bool receive_piece(int socket, direct::ShareId& id, int& fd) {
  const auto got = receive_with_descriptor(socket, id.data(), sizeof id, fd, MSG_DONTWAIT);
  if (got == sizeof id && fd >= 0) return true;
  if (fd >= 0) ::close(fd);
  return false;
}

// What the agent itself needs while it has the program's memory in its hands: bytes for each piece.
// A program that gets no more memory then would be ended by it. Made before the gate closes, never
// written to, and given up where an allocation of the agent's fails: this library has the C++
// library to itself.
constexpr std::size_t kReserve = std::size_t{4} << 20;
std::atomic<void*> g_reserve{nullptr};

void use_reserve() {
  if (void* reserve = g_reserve.exchange(nullptr))
    ::munmap(reserve, kReserve);
  else
    std::set_new_handler(nullptr);
}

bool make_reserve() {
  std::set_new_handler(&use_reserve);
  if (g_reserve.load() != nullptr) return true;
  void* at = ::mmap(nullptr, kReserve, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return false;
  g_reserve.store(at);
  return true;
}

void give_reserve_back() {
  if (void* reserve = g_reserve.exchange(nullptr)) ::munmap(reserve, kReserve);
}

// Managed memory is given up with the program's threads kept still, and one that is kept still in a
// fork would have the agent's locks: where there is some, a fork passes the gate like a call, and
// closing it waits for those under way.
std::atomic<bool> g_forks_pass{false};

class Session {
 public:
  explicit Session(ControlPage& page, int fd) : page_(page), fd_(fd) {}

  [[noreturn]] void run() {
    auto seen = page_.request.load(std::memory_order_acquire);
    for (;;) {
      const auto now = page_.request.load(std::memory_order_acquire);
      if (now == seen) {
        if (may_be_split_ && rejoin_file()) continue;
        const bool something_to_undo = undoes_on_its_own();
        futex::wait(page_.request, seen, true, until_look(something_to_undo));
        if (something_to_undo && page_.request.load() == seen && peer_is_gone()) {
          undo();
          page_.kept_count = g_kept.count;
        }
        free_buffer();
        continue;
      }
      last_request_ = Clock::now();
      serving_ = now;
      close_exported();
      answer();
      page_.kept_count = g_kept.count;
      page_.reply.store(now, std::memory_order_release);
      futex::wake_all(page_.reply, true);
      free_buffer();
      seen = now;
    }
  }

 private:
  // What the page says of these is for the peer to read. The agent trusts only its own copies: a
  // process that may open the page may write anything into it.
  AgentState state() const { return state_; }
  void set_state(AgentState state) {
    state_ = state;
    page_.state.store(state, std::memory_order_release);
  }
  void set_buffer(std::uint64_t address, std::uint64_t bytes) {
    page_.buffer_address = buffer_address_ = address;
    page_.buffer_bytes = buffer_bytes_ = bytes;
  }

  bool undoes_on_its_own() const {
    const auto now = state();
    return now == AgentState::kClosed || now == AgentState::kEmptied ||
           now == AgentState::kFilling ||
           (now == AgentState::kRunning && (buffer_bytes_ > 0 || g_reserve.load() != nullptr));
  }

  std::chrono::nanoseconds until_look(bool something_to_undo) const {
    if (something_to_undo) return kLook;
    if (!may_be_split_) return std::chrono::nanoseconds(-1);
    return state() == AgentState::kHeld ? std::chrono::nanoseconds(kLook) : kIdleLook;
  }

  // A dump in a user namespace separates the page from its file: the kernel does not let CRIU see
  // there which file a mapping is of, and the restore makes nameless shared memory of it, and a
  // memfd that nothing maps. Tools write into the file. So the agent maps the file again where its
  // page is, when the two differ in what a tool writes first or in what the agent alone writes: its
  // state, and a number that it writes to see that.
  // True if it has. To map a file that was mapped there already does no harm.
  bool rejoin_file() {
    std::uint32_t request = 0;
    std::uint32_t seen = 0;
    AgentState told{};
    constexpr std::size_t kSpare = direct::kExportBatch - 1;
    page_.segments[kSpare].reserved = ++beat_;
    constexpr std::size_t kSpareAt = offsetof(ControlPage, segments) +
                                     kSpare * sizeof(direct::AgentSegment) +
                                     offsetof(direct::AgentSegment, reserved);
    const auto mapped = page_.request.load(std::memory_order_acquire);
    if (!read_file_at(offsetof(ControlPage, request), request) ||
        !read_file_at(offsetof(ControlPage, state), told) || !read_file_at(kSpareAt, seen))
      return false;
    if (request == mapped && told == state_ && seen == beat_) return false;
    if (page_.request.load(std::memory_order_acquire) != mapped) return false;
    // The program may have closed the descriptor, and have another file of that number.
    std::uint64_t magic = 0;
    std::int32_t tid = 0;
    if (!holds_page(fd_) || !read_file_at(offsetof(ControlPage, magic), magic) ||
        !read_file_at(offsetof(ControlPage, tid), tid) || magic != direct::kAgentMagic ||
        tid != page_.tid)
      return false;
    if (::mmap(&page_, sizeof page_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, 0) ==
        MAP_FAILED)
      return false;
    ::madvise(&page_, sizeof page_, MADV_DONTFORK);
    // What it has done since, unseen.
    page_.segment_count = static_cast<std::uint32_t>(segments_.size());
    page_.segment_bytes = segment_bytes_;
    page_.kept_count = g_kept.count;
    page_.detached_count = detached_count();
    count_shared(page_.share_count);
    write_managed_areas(page_.managed_areas, g_forks_pass);
    set_buffer(buffer_address_, buffer_bytes_);
    set_content(content_id_[0], content_id_[1]);
    set_state(state_);
    return true;
  }
  template <class T>
  bool read_file_at(std::size_t offset, T& value) const {
    return ::pread(fd_, &value, sizeof value, static_cast<off_t>(offset)) == sizeof value;
  }

  // The peer holds the lock on the page, by an open file of its own, for as long as it lives.
  bool peer_is_gone() const {
    if (!holds_page(fd_)) {
      const std::chrono::seconds copying(segment_bytes_ / kSlowestCopy);
      return Clock::now() - last_request_ > kPeerGivesUp + copying;
    }
    if (::flock(fd_, LOCK_SH | LOCK_NB) != 0) return false;
    ::flock(fd_, LOCK_UN);
    return true;
  }

  void done() { page_.cu_result = 0; }
  void refuse(cuda::CUresult result, const char* what, const char* value) {
    page_.cu_result = static_cast<std::uint32_t>(result);
    std::snprintf(page_.message, sizeof page_.message, "%s: %s", what, value);
  }
  void refuse(cuda::CUresult result, const char* what, std::uint64_t value) {
    page_.cu_result = static_cast<std::uint32_t>(result);
    std::snprintf(page_.message, sizeof page_.message, "%s: %llu", what,
                  static_cast<unsigned long long>(value));
  }
  void report(const Outcome& outcome) {
    const char* name = nullptr;
    if (outcome.ok()) return done();
    if (driver().cuGetErrorName) driver().cuGetErrorName(outcome.result, &name);
    refuse(outcome.result, outcome.what, name ? name : "unknown error");
  }
  bool expect(AgentState wanted) {
    if (state() == wanted) return true;
    refuse(cuda::CUDA_ERROR_ILLEGAL_STATE, "not possible in the agent's state",
           static_cast<std::uint64_t>(state()));
    return false;
  }

  void refuse_ending() { refuse(cuda::CUDA_ERROR_DEINITIALIZED, "it is about to exit", "let it"); }

  void answer() {
    page_.message[0] = '\0';
    page_.exported_count = 0;
    // Read once: the peer may write at any time.
    AgentCommand command;
    __atomic_load(&page_.command, &command, __ATOMIC_RELAXED);
    // With the program's threads kept still, and any lock of theirs with them.
    if (command == AgentCommand::kDrop && state() == AgentState::kHeld) {
      g_kept.close_while_held();
      return done();
    }
    page_.driver_share_count = shared_pieces();
    count_shared(page_.share_count);
    write_managed_areas(page_.managed_areas, g_forks_pass);
    page_.multicast_count = multicast_count();
    for (std::size_t i = 0; i < std::size(arguments_); ++i)
      __atomic_load(&page_.arguments[i], &arguments_[i], __ATOMIC_RELAXED);
    switch (command) {
      case AgentCommand::kNone:
        return done();
      case AgentCommand::kPrepare:
        return prepare();
      case AgentCommand::kClose:
        return close_gate();
      case AgentCommand::kExport:
        return export_batch();
      case AgentCommand::kEmpty:
        return empty();
      case AgentCommand::kBuffer:
        if (expect(AgentState::kFilling)) make_buffer();
        return;
      case AgentCommand::kHold:
        if (!expect(AgentState::kEmptied)) return;
        set_state(AgentState::kHeld);
        return done();
      case AgentCommand::kRefill:
        return refill();
      case AgentCommand::kCopyIn:
        if (expect(AgentState::kFilling) && expect_buffer()) report(copy_all(buffer(), false));
        return;
      case AgentCommand::kOpen:
        return open_gate(arguments_[0] == direct::kKeepBuffer);
      case AgentCommand::kKeep:
        return keep();
      case AgentCommand::kDrop:
        g_kept.close_all();
        return done();
      case AgentCommand::kShares:
        return list_shares();
      case AgentCommand::kDetach:
        return detach();
      case AgentCommand::kRetake:
        return retake();
      case AgentCommand::kLend:
        return lend_piece();
      case AgentCommand::kAttach:
        return arguments_[0] == direct::kOffer ? offer_socket() : take_pieces();
    }
    refuse(cuda::CUDA_ERROR_NOT_SUPPORTED, "unknown command", static_cast<std::uint64_t>(command));
  }

  std::byte* buffer() const { return reinterpret_cast<std::byte*>(buffer_address_); }

  // Has a buffer of that size at least; its content is kept.
  bool have_buffer(std::uint64_t bytes) {
    bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    if (bytes <= buffer_bytes_) return true;
    give_buffer_back();
    free_buffer();
    // Room to begin at a huge page. Not reserved: the peer that asks for it looks at free memory
    // first, and touches it before the gate closes.
    const auto room = bytes + kHugePage;
    void* raw = ::mmap(nullptr, room, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return false;
    const auto begin = reinterpret_cast<std::uint64_t>(raw);
    const auto aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
    if (aligned > begin) ::munmap(raw, aligned - begin);
    ::munmap(reinterpret_cast<void*>(aligned + bytes), begin + room - aligned - bytes);
    auto* at = reinterpret_cast<void*>(aligned);
    ::madvise(at, bytes, MADV_HUGEPAGE);
    // A child that the program forks has no use for it, and must not make its pages shared.
    ::madvise(at, bytes, MADV_DONTFORK);
    set_buffer(aligned, bytes);
    return true;
  }

  // The kernel takes 50 ms to free 16 GiB. Neither the program nor the peer has to wait for that.
  void give_buffer_back() {
    free_buffer();
    unused_ = {buffer(), buffer_bytes_};
    set_buffer(0, 0);
  }
  void free_buffer() {
    if (!unused_.empty()) ::munmap(unused_.data(), unused_.size());
    unused_ = {};
  }

  void set_content(std::uint64_t high, std::uint64_t low) {
    page_.content_id[0] = content_id_[0] = high;
    page_.content_id[1] = content_id_[1] = low;
  }
  bool content_is_elsewhere() const { return (content_id_[0] | content_id_[1]) != 0; }

  bool expect_buffer() {
    if (buffer_bytes_ >= segment_bytes_) return true;
    refuse(cuda::CUDA_ERROR_ILLEGAL_STATE, "there is no buffer for bytes", segment_bytes_);
    return false;
  }

  void make_buffer() {
    if (have_buffer(segment_bytes_)) return done();
    refuse(cuda::CUDA_ERROR_OUT_OF_MEMORY, "no address range of that many bytes", segment_bytes_);
  }

  void prepare() {
    if (!expect(AgentState::kRunning)) return;
    if (!make_reserve())
      return refuse(cuda::CUDA_ERROR_OUT_OF_MEMORY, "no memory of that many bytes", kReserve);
    make_descriptor_room(kExportRoom);
    buffer_wanted_ = arguments_[0] == 0;
    segment_bytes_ = page_.segment_bytes = movable_bytes();
    if (segment_bytes_ > 0 && refuse_past_gate()) return;
    if (buffer_wanted_) return make_buffer();
    give_buffer_back();
    done();
  }

  // With the gate open.
  bool refuse_past_gate() {
    deep_loads_ = deep_loads();
    const auto library = library_past_gate();
    if (library.empty()) return false;
    refuse(cuda::CUDA_ERROR_NOT_SUPPORTED,
           "a library that was opened with RTLD_DEEPBIND may call the driver past the agent",
           library.c_str());
    return true;
  }

  // Goes on as long as the peer that has asked lives and waits.
  class PeersTimeout final : public Timeout {
   public:
    PeersTimeout(const Session& session, Clock::time_point deadline)
        : Timeout(deadline), session_(session) {}

   private:
    bool given_up() const override {
      const ControlPage& page = session_.page_;
      // Another peer's request, if it is not the one that is served.
      return page.abandoned.load(std::memory_order_relaxed) == session_.serving_ ||
             page.request.load(std::memory_order_relaxed) != session_.serving_ ||
             session_.peer_is_gone();
    }

    const Session& session_;
  };

  void close_gate() {
    if (!expect(AgentState::kRunning)) return;
    if (g_ending.load()) return refuse_ending();
    const PeersTimeout timeout(*this, Clock::now() + milliseconds(arguments_[0]));
    for (;;) {
      if (!Gate::close(timeout))
        return refuse(cuda::CUDA_ERROR_NOT_READY,
                      "a call of the driver did not return within milliseconds", arguments_[0]);
      if (g_ending.load()) {
        Gate::open();
        return refuse_ending();
      }
      const bool opened = deep_loads() != deep_loads_;
      const bool captures = captures_in_progress() != 0;
      if (!opened && !captures) break;
      Gate::open();
      if (opened && refuse_past_gate()) return;
      if (timeout.over()) {
        if (opened)
          return refuse(cuda::CUDA_ERROR_NOT_SUPPORTED, "all the time it opens libraries with",
                        "RTLD_DEEPBIND");
        return refuse(cuda::CUDA_ERROR_NOT_READY, "a stream was being captured for milliseconds",
                      arguments_[0]);
      }
      // Waiting for the device would spoil the capture, which soon ends by itself.
      if (captures) ::usleep(1000);
    }
    Outcome outcome;
    switch (wait_for_devices(timeout, outcome)) {
      case Waited::kDone:
        break;
      case Waited::kTimeout:
        Gate::open();
        return refuse(cuda::CUDA_ERROR_NOT_READY, "the device did not finish within milliseconds",
                      arguments_[0]);
      case Waited::kFailed:
        Gate::open();
        return report(outcome);
    }
    finish_frees();
    if (managed_areas() > 0) Copiers::start();
    const auto inventory = take_inventory();
    if (buffer_wanted_ && !have_buffer(inventory.bytes)) {
      Gate::open();
      return refuse(cuda::CUDA_ERROR_OUT_OF_MEMORY, "no address range of that many bytes",
                    inventory.bytes);
    }
    // The program does not open or close any from here on.
    page_.driver_share_count = shared_pieces();
    segments_ = inventory.segments;
    page_.segment_count = static_cast<std::uint32_t>(segments_.size());
    segment_bytes_ = page_.segment_bytes = inventory.bytes;
    page_.staying_count = inventory.staying;
    page_.staying_bytes = inventory.staying_bytes;
    set_state(AgentState::kClosed);
    done();
  }

  void export_batch() {
    if (state() != AgentState::kFilling && !expect(AgentState::kClosed)) return;
    const auto first = arguments_[0];
    // Of a process that was restored.
    if (first == 0) make_descriptor_room(kExportRoom);
    for (std::uint32_t i = 0; i < direct::kExportBatch && first + i < segments_.size(); ++i) {
      if (g_kept.count == 0) {
        const auto outcome =
            g_exported.add([&](int& made) { return export_segment(first + i, made); });
        // A program that may open few files: the tool asks for the rest when it has these.
        if (!outcome.ok() && i > 0) break;
        if (!outcome.ok()) {
          close_exported();
          return report(outcome);
        }
      }
      const int fd = g_kept.count == 0 ? g_exported.fds[i] : g_kept.fds[first + i];
      const Segment& segment = segments_[first + i];
      auto& place = page_.segments[i];
      place = {segment.bytes, segment.offset, segment.address, {}, fd, 0};
      cuda::CUuuid uuid{};
      if (driver().cuDeviceGetUuid(&uuid, segment.device) == cuda::CUDA_SUCCESS)
        std::memcpy(place.gpu, &uuid, sizeof place.gpu);
      page_.exported_count = i + 1;
    }
    done();
  }

  void close_exported() {
    g_exported.close_all();
    page_.exported_count = 0;
  }

  void keep() {
    if (!expect(AgentState::kClosed)) return;
    g_kept.close_all();
    const auto count = static_cast<std::uint32_t>(segments_.size());
    if (segments_.size() > kMostKept || !may_have_descriptors(count))
      return refuse(cuda::CUDA_ERROR_NOT_SUPPORTED, "too many descriptors", count);
    make_descriptor_room(static_cast<int>(count) + kExportRoom);
    for (std::uint32_t i = 0; i < count; ++i) {
      const auto outcome = g_kept.add([&](int& made) { return export_segment(i, made); });
      if (outcome.ok()) continue;
      g_kept.close_all();
      return report(outcome);
    }
    done();
  }

  // Where the content is in pinned memory and nowhere else, the agent copies it into the buffer
  // itself, because the tool or the mover has died. Then all goes on as if it had been copied there
  // at once.
  bool save_kept() {
    if (g_kept.count == 0) return true;
    const auto outcome = copy_kept(std::span(g_kept.fds, g_kept.count), buffer());
    if (outcome.ok()) g_kept.close_all();
    report(outcome);
    return outcome.ok();
  }

  void empty() {
    if (!expect(AgentState::kClosed)) return;
    set_content(arguments_[0], arguments_[1]);
    if (!content_is_elsewhere() && !expect_buffer()) return;
    if (content_is_elsewhere()) g_kept.close_all();
    const auto outcome = empty_all();
    // From here on the gate opens only when all of it is there again, with its content.
    set_state(AgentState::kEmptied);
    if (outcome.ok()) {
      release_local_memory();
      return done();
    }
    if (save_kept() && refill_all().ok()) {
      set_state(AgentState::kFilling);
      // Otherwise the peer brings it.
      if (!content_is_elsewhere() && copy_all(buffer(), false).ok()) set_state(AgentState::kClosed);
    }
    report(outcome);
  }

  void refill() {
    if (state() != AgentState::kHeld && !expect(AgentState::kEmptied)) return;
    if (!save_kept()) return set_state(AgentState::kEmptied);
    const auto outcome = refill_all();
    if (outcome.ok())
      set_state(AgentState::kFilling);
    else
      set_state(AgentState::kEmptied);
    report(outcome);
  }

  void open_gate(bool keeps_buffer) {
    if (state() != AgentState::kFilling && !expect(AgentState::kClosed)) return;
    if (const auto missing = detached_count(); missing > 0)
      return refuse(cuda::CUDA_ERROR_ILLEGAL_STATE,
                    "pieces of memory that was given up are not back", missing);
    g_kept.close_all();
    set_content(0, 0);
    set_state(AgentState::kRunning);
    Gate::open();
    if (!keeps_buffer) {
      give_buffer_back();
      give_reserve_back();
    }
    done();
  }

  void list_shares() {
    const auto all = list_shared();
    for (std::uint64_t i = arguments_[0]; i < all.size(); ++i) {
      if (page_.exported_count == direct::kShareBatch) break;
      page_.shares[page_.exported_count++] = {all[i].id,   all[i].bytes, all[i].role,
                                              all[i].open, -1,           0};
    }
    done();
  }

  void detach() {
    if (!expect(AgentState::kClosed)) return;
    auto outcome = detach_all();
    if (outcome.ok()) outcome = save_managed(arguments_[0] == 0 ? UINT64_MAX : arguments_[0]);
    page_.detached_count = detached_count();
    report(outcome);
  }

  void retake() {
    auto outcome = retake_host();
    if (outcome.ok()) outcome = retake_managed();
    page_.detached_count = detached_count();
    report(outcome);
  }

  void lend_piece() {
    make_descriptor_room(kExportRoom);
    const direct::ShareId id{arguments_[0], arguments_[1]};
    const auto outcome = g_exported.add([&](int& made) { return lend(id, made); });
    if (outcome.ok()) {
      page_.shares[0] = {id, 0, direct::ShareRole::kOwner, 0, g_exported.fds[0], 0};
      page_.exported_count = 1;
    }
    report(outcome);
  }

  // The peer's end is for it to take; what it sends comes out here.
  void offer_socket() {
    close_sockets();
    make_descriptor_room(kExportRoom);
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets_) != 0)
      return refuse(cuda::CUDA_ERROR_OPERATING_SYSTEM, "no socket to be had: error",
                    static_cast<std::uint64_t>(errno));
    page_.shares[0] = {{}, 0, direct::ShareRole::kImporter, 0, sockets_[1], 0};
    page_.exported_count = 1;
    done();
  }

  void take_pieces() {
    Outcome outcome;
    direct::ShareId id{};
    for (int fd = -1; outcome.ok() && receive_piece(sockets_[0], id, fd); ::close(fd))
      outcome = attach(id, fd);
    close_sockets();
    page_.detached_count = detached_count();
    report(outcome);
  }

  void close_sockets() {
    for (int& socket : sockets_) {
      struct stat status {};
      if (socket >= 0 && ::fstat(socket, &status) == 0 && S_ISSOCK(status.st_mode)) ::close(socket);
      socket = -1;
    }
  }

  // The peer has died: the agent makes the program run again by itself; if the device has no room
  // now, at the next poll.
  void undo() {
    close_exported();
    close_sockets();
    // Only a tool can ask the owners of the memory that is missing.
    if (detached_count() > 0) return;
    // The peer had only asked for kPrepare.
    if (state() == AgentState::kRunning) {
      give_reserve_back();
      return give_buffer_back();
    }
    // Only a tool that finds the image can bring the content back.
    if (state() != AgentState::kClosed && content_is_elsewhere()) return;
    if (state() == AgentState::kEmptied) {
      if (!save_kept() || !refill_all().ok()) return;
      set_state(AgentState::kFilling);
    }
    if (state() == AgentState::kFilling && !copy_all(buffer(), false).ok()) return;
    open_gate(false);
  }

  ControlPage& page_;
  const int fd_;
  const bool may_be_split_ = in_own_user_namespace();
  std::uint32_t beat_ = 0;
  Clock::time_point last_request_ = Clock::now();
  std::uint32_t serving_ = 0;
  std::vector<Segment> segments_;
  bool buffer_wanted_ = true;
  // What the page says too, where others of the same user can write.
  AgentState state_ = AgentState::kRunning;
  std::uint64_t arguments_[2] = {};
  std::uint64_t segment_bytes_ = 0;
  std::uint64_t content_id_[2] = {};
  std::uint64_t buffer_address_ = 0;
  std::uint64_t buffer_bytes_ = 0;
  std::uint64_t deep_loads_ = 0;  // when library_past_gate() looked last
  int sockets_[2] = {-1, -1};     // kAttach
  std::span<std::byte> unused_;   // a buffer that was given back, and is not yet freed
};

void* run_agent(void*) {
  ::prctl(PR_SET_NAME, kAgentThread);
  auto* page = g_page.load();
  page->tid = static_cast<std::int32_t>(::syscall(SYS_gettid));
  // A tool that finds the magic finds an agent that listens.
  std::atomic_thread_fence(std::memory_order_release);
  page->magic = direct::kAgentMagic;
  Session(*page, g_fd).run();
}

// How many forks this thread is in: a handler of a signal may come in one, and fork.
thread_local int g_forks __attribute__((tls_model("initial-exec"))) = 0;

thread_local bool g_fork_has_pass __attribute__((tls_model("initial-exec"))) = false;
alignas(Gate::Pass) thread_local std::byte g_fork_pass[sizeof(Gate::Pass)]
    __attribute__((tls_model("initial-exec")));

// A child finds the tables whole, and all descriptors that it is to close.
void before_fork() {
  const SignalsBlocked blocked;
  if (g_forks++ > 0) return;
  g_fork_has_pass = g_forks_pass.load();
  if (g_fork_has_pass) new (g_fork_pass) Gate::Pass;
  lock_memory_for_fork();
  ::pthread_mutex_lock(&g_exporting);
  lock_looking_for_fork();
}

void after_fork() {
  const SignalsBlocked blocked;
  if (--g_forks > 0) return;
  unlock_looking_after_fork();
  ::pthread_mutex_unlock(&g_exporting);
  unlock_memory_after_fork();
  if (g_fork_has_pass) std::launder(reinterpret_cast<Gate::Pass*>(g_fork_pass))->~Pass();
}

// The child has this process's memory and descriptors, and no agent. What it inherits belongs to
// its parent; if it comes to use CUDA itself, it gets its own.
void in_forked_child() {
  const Uncancelled uncancelled;
  g_exported.close_held();
  g_kept.close_held();
  after_fork();
  if (holds_page(g_fd)) ::close(g_fd);
  g_fd = -1;
  g_page.store(nullptr);  // not mapped here: MADV_DONTFORK
  g_started.store(false);
  g_ending.store(false);
  g_forks_pass.store(false);
  Gate::reset_after_fork();
  Copiers::forget();
  forget_memory_after_fork();
}

// Registered after the driver's own, which came with cuInit, so it runs before: a program that ends
// while its memory is away waits here, and from then on its gate is not closed any more.
void at_exit() {
  const Gate::Pass pass;
  g_ending.store(true);
}

bool make_page() {
  g_fd = static_cast<int>(
      ::syscall(SYS_memfd_create, direct::kAgentMemfd, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (g_fd < 0) return false;
  if (::fchmod(g_fd, 0600) != 0 || ::ftruncate(g_fd, sizeof(ControlPage)) != 0 ||
      ::fcntl(g_fd, F_ADD_SEALS, direct::kAgentSeals) != 0)
    return false;
  void* at = ::mmap(nullptr, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_SHARED, g_fd, 0);
  if (at == MAP_FAILED) return false;
  ::madvise(at, sizeof(ControlPage), MADV_DONTFORK);
  auto* page = new (at) ControlPage{};
  page->version = direct::kAgentVersion;
  page->bytes = sizeof(ControlPage);
  page->pid = ::getpid();
  g_page.store(page);
  return true;
}

}  // namespace

void Agent::start() {
  if (g_started.load(std::memory_order_relaxed) || g_started.exchange(true)) return;
  static const int registered =
      ::pthread_atfork(&before_fork, &after_fork, &in_forked_child) + std::atexit(&at_exit);
  if (registered != 0) return;
  if (make_page() && start_thread(&run_agent, nullptr)) return;
  if (auto* page = g_page.exchange(nullptr)) ::munmap(page, sizeof *page);
  if (g_fd >= 0) ::close(g_fd);
  g_fd = -1;
  // What was short, a descriptor or a thread, need not be at the next allocation.
  g_started.store(false);
}

void Agent::start_with_import() {
  start();
  if (auto* page = g_page.load()) add_shared(page->share_count);
}

void Agent::start_with_managed() {
  start_with_import();
  note_managed();
}

void Agent::note_managed() {
  auto* page = g_page.load();
  if (!page) return;
  write_managed_areas(page->managed_areas, g_forks_pass);
}

}  // namespace stasis::preload
