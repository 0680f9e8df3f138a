#include "session.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "abi/futex.h"
#include "exported_fds.h"
#include "host_reserve.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "managed.h"
#include "pages.h"
#include "sharing.h"

namespace stasis::preload {
namespace {

using direct::AgentCommand;
using direct::AgentState;
using direct::ControlPage;
using std::chrono::milliseconds;

// How often the agent looks whether its peer still lives, while there is something to undo.
constexpr milliseconds kPollInterval{100};
// How often an agent in a user namespace looks whether its page is still the tools' (rejoin_file).
constexpr std::chrono::seconds kIdlePollInterval{1};
// When a peer that cannot be seen any more has certainly given up: it limits its copies by 30 s and
// 200 MB/s (direct/agent_client.cc).
constexpr std::chrono::seconds kPeerGivesUp{60};
constexpr std::uint64_t kSlowestCopy = 200000000;

// Whether a dump of this process may be one without the right to read /proc/PID/map_files. A
// process of several threads, as this one is, stays in its user namespace.
bool in_own_user_namespace() {
  constexpr char kInitial[] = "user:[4026531837]";  // PROC_USER_INIT_INO, the same on all kernels
  char name[sizeof kInitial + 8] = {};
  const auto length = ::readlink("/proc/self/ns/user", name, sizeof name - 1);
  return length > 0 && std::strcmp(name, kInitial) != 0;
}

}  // namespace

std::atomic<bool> g_ending{false};
std::atomic<bool> g_forks_pass{false};

bool holds_page(int fd) {
  struct stat status {};
  const int seals = fd < 0 ? -1 : ::fcntl(fd, F_GET_SEALS);
  // The kernel adds one where it forbids to execute such files (vm.memfd_noexec).
  return seals >= 0 && (seals & direct::kAgentSeals) == direct::kAgentSeals &&
         ::fstat(fd, &status) == 0 && status.st_size == sizeof(ControlPage);
}

Session::Session(ControlPage& page, int fd)
    : page_(page), fd_(fd), may_be_split_(in_own_user_namespace()) {}

void Session::run() {
  // A tool may have asked already: it asks as soon as the page has its magic.
  auto seen = page_.reply.load(std::memory_order_acquire);
  for (;;) {
    const auto now = page_.request.load(std::memory_order_acquire);
    if (now == seen) {
      if (may_be_split_ && rejoin_file()) continue;
      const bool something_to_undo = undoes_on_its_own();
      futex::wait(page_.request, seen, true, until_poll(something_to_undo));
      if (something_to_undo && page_.request.load() == seen && peer_is_gone()) {
        undo();
        page_.pinned_count = g_pinned.count;
      }
      free_buffer();
      continue;
    }
    last_request_ = Clock::now();
    serving_ = now;
    close_exported();
    answer();
    page_.pinned_count = g_pinned.count;
    page_.reply.store(now, std::memory_order_release);
    futex::wake_all(page_.reply, true);
    free_buffer();
    seen = now;
  }
}

void Session::set_state(AgentState state) {
  state_ = state;
  page_.state.store(state, std::memory_order_release);
}

void Session::set_buffer(std::uint64_t address, std::uint64_t bytes) {
  page_.buffer_address = buffer_address_ = address;
  page_.buffer_bytes = buffer_bytes_ = bytes;
}

bool Session::undoes_on_its_own() const {
  const auto now = state();
  return page_.precopy_state.load(std::memory_order_relaxed) != direct::PrecopyState::kNo ||
         now == AgentState::kClosed || now == AgentState::kEvicted || now == AgentState::kFilling ||
         (now == AgentState::kRunning && (buffer_bytes_ > 0 || has_reserve()));
}

std::chrono::nanoseconds Session::until_poll(bool something_to_undo) const {
  if (something_to_undo) return kPollInterval;
  if (!may_be_split_) return std::chrono::nanoseconds(-1);
  return state() == AgentState::kHeld ? std::chrono::nanoseconds(kPollInterval) : kIdlePollInterval;
}

// A dump in a user namespace separates the page from its file: the kernel does not let CRIU see
// there which file a mapping is of, and the restore makes nameless shared memory of it, and a
// memfd that nothing maps. Tools write into the file. So the agent maps the file again where its
// page is, when the two differ in what a tool writes first or in what the agent alone writes: its
// state, and a number that it writes to see that.
// True if it has. To map a file that was mapped there already does no harm.
bool Session::rejoin_file() {
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
  page_.pinned_count = g_pinned.count;
  page_.detached_count = detached_count();
  page_.services = services_made();
  count_shared(page_.share_count);
  write_managed_areas(page_.managed_areas, g_forks_pass);
  set_buffer(buffer_address_, buffer_bytes_);
  set_content(content_id_[0], content_id_[1]);
  set_state(state_);
  return true;
}

// The peer holds the lock on the page, by an open file of its own, for as long as it lives.
bool Session::peer_is_gone() const {
  if (!holds_page(fd_)) {
    const std::chrono::seconds copying(segment_bytes_ / kSlowestCopy);
    return Clock::now() - last_request_ > kPeerGivesUp + copying;
  }
  if (::flock(fd_, LOCK_SH | LOCK_NB) != 0) return false;
  ::flock(fd_, LOCK_UN);
  return true;
}

void Session::refuse(cuda::CUresult result, const char* what, const char* value) {
  page_.cu_result = static_cast<std::uint32_t>(result);
  std::snprintf(page_.message, sizeof page_.message, "%s: %s", what, value);
}

void Session::refuse(cuda::CUresult result, const char* what, std::uint64_t value) {
  page_.cu_result = static_cast<std::uint32_t>(result);
  std::snprintf(page_.message, sizeof page_.message, "%s: %llu", what,
                static_cast<unsigned long long>(value));
}

void Session::report(const Outcome& outcome) {
  const char* name = nullptr;
  if (outcome.ok()) return done();
  if (driver().cuGetErrorName) driver().cuGetErrorName(outcome.result, &name);
  refuse(outcome.result, outcome.what, name ? name : "unknown error");
}

bool Session::expect(AgentState wanted) {
  if (state() == wanted) return true;
  refuse(cuda::CUDA_ERROR_ILLEGAL_STATE, "not possible in the agent's state",
         static_cast<std::uint64_t>(state()));
  return false;
}

void Session::answer() {
  page_.message[0] = '\0';
  page_.exported_count = 0;
  // Read once: the peer may write at any time.
  AgentCommand command;
  __atomic_load(&page_.command, &command, __ATOMIC_RELAXED);
  // With the program's threads kept still, and any lock of theirs with them.
  if (command == AgentCommand::kUnpin && state() == AgentState::kHeld) {
    g_pinned.close_while_held();
    return done();
  }
  tell_counts();
  for (std::size_t i = 0; i < std::size(arguments_); ++i)
    __atomic_load(&page_.arguments[i], &arguments_[i], __ATOMIC_RELAXED);
  serve(command);
}

// Of what is shared and of managed memory, as it is now.
void Session::tell_counts() {
  page_.driver_share_count = shared_pieces();
  count_shared(page_.share_count);
  write_managed_areas(page_.managed_areas, g_forks_pass);
  page_.multicast_count = multicast_count();
}

void Session::serve(AgentCommand command) {
  switch (command) {
    case AgentCommand::kNone:
      return done();
    case AgentCommand::kPrepare:
      return prepare();
    case AgentCommand::kClose:
      return close_gate();
    case AgentCommand::kExport:
      return export_batch();
    case AgentCommand::kEvict:
      return evict();
    case AgentCommand::kBuffer:
      if (expect(AgentState::kFilling)) make_buffer();
      return;
    case AgentCommand::kHold:
      if (!expect(AgentState::kEvicted)) return;
      set_state(AgentState::kHeld);
      return done();
    case AgentCommand::kRepopulate:
      return repopulate();
    case AgentCommand::kCopyIn:
      if (expect(AgentState::kFilling) && expect_buffer()) report(copy_all(buffer(), false));
      return;
    case AgentCommand::kOpen:
      return open_gate(arguments_[0] == direct::kKeepBuffer);
    case AgentCommand::kPin:
      return pin();
    case AgentCommand::kUnpin:
      g_pinned.close_all();
      return done();
    case AgentCommand::kShares:
      return list_shares();
    case AgentCommand::kDetach:
      return detach();
    case AgentCommand::kInherit:
      if (expect(AgentState::kClosed)) report(inherit({arguments_[0], arguments_[1]}));
      return;
    case AgentCommand::kStay:
      return stay();
    case AgentCommand::kRetake:
      return retake();
    case AgentCommand::kLend:
      return lend_piece();
    case AgentCommand::kAttach:
      return arguments_[0] == direct::kOffer ? offer_socket() : take_pieces();
    case AgentCommand::kAdopt:
      return adopt();
  }
  refuse(cuda::CUDA_ERROR_NOT_SUPPORTED, "unknown command", static_cast<std::uint64_t>(command));
}

// Has a buffer of that size at least; its content is kept.
bool Session::have_buffer(std::uint64_t bytes) {
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
void Session::give_buffer_back() {
  free_buffer();
  unused_ = {buffer(), buffer_bytes_};
  set_buffer(0, 0);
}

void Session::free_buffer() {
  if (!unused_.empty()) ::munmap(unused_.data(), unused_.size());
  unused_ = {};
}

void Session::set_content(std::uint64_t high, std::uint64_t low) {
  page_.content_id[0] = content_id_[0] = high;
  page_.content_id[1] = content_id_[1] = low;
}

bool Session::expect_buffer() {
  if (buffer_bytes_ >= segment_bytes_) return true;
  refuse(cuda::CUDA_ERROR_ILLEGAL_STATE, "there is no buffer for bytes", segment_bytes_);
  return false;
}

void Session::make_buffer() {
  if (have_buffer(segment_bytes_)) return done();
  refuse(cuda::CUDA_ERROR_OUT_OF_MEMORY, "no address range of that many bytes", segment_bytes_);
}

}  // namespace stasis::preload
