#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "abi/descriptor_message.h"
#include "abi/fd_table.h"
#include "attached.h"
#include "copiers.h"
#include "deadline.h"
#include "deepbind_scan.h"
#include "device_wait.h"
#include "export_trial.h"
#include "exported_fds.h"
#include "gate.h"
#include "host_reserve.h"
#include "intercept.h"
#include "ipc_broker.h"
#include "local_memory.h"
#include "managed.h"
#include "pools.h"
#include "precopy.h"
#include "session.h"
#include "sharing.h"

namespace stasis::preload {

using direct::AgentState;
using direct::ControlPage;
using std::chrono::milliseconds;

namespace {

// One message of an id and a descriptor. False: there is none.
bool receive_piece(int socket, direct::ShareId& id, int& fd) {
  const auto got = receive_with_descriptor(socket, id.data(), sizeof id, fd, MSG_DONTWAIT);
  if (got == sizeof id && fd >= 0) return true;
  if (fd >= 0) ::close(fd);
  return false;
}

}  // namespace

void Session::prepare() {
  if (!expect(AgentState::kRunning)) return;
  if (!make_reserve())
    return refuse(cuda::CUDA_ERROR_OUT_OF_MEMORY, "no memory of that many bytes", kReserve);
  make_descriptor_room(kExportRoom);
  buffer_wanted_ = arguments_[0] == 0;
  segment_bytes_ = page_.segment_bytes = movable_bytes();
  if (segment_bytes_ > 0 && refuse_deep_bound()) return;
  if (buffer_wanted_) return make_buffer();
  give_buffer_back();
  done();
}

// With the gate open.
bool Session::refuse_deep_bound() {
  deep_loads_ = deep_loads();
  const auto library = library_deep_bound();
  if (library.empty()) return false;
  refuse(cuda::CUDA_ERROR_NOT_SUPPORTED,
         "a library that was opened with RTLD_DEEPBIND may call the driver past the agent",
         library.c_str());
  return true;
}

// Goes on as long as the peer that has asked lives and waits.
class Session::PeersTimeout final : public Timeout {
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

// Closes the gate when no stream is being captured and no library has been opened past the agent
// since prepare(). False: it is open, and the command is refused.
bool Session::hold_calls(const PeersTimeout& timeout) {
  const auto refused = [&](cuda::CUresult result, const char* what, auto value) {
    refuse(result, what, value);
    return false;
  };
  for (;;) {
    if (!Gate::close(timeout))
      return refused(cuda::CUDA_ERROR_NOT_READY,
                     "a call of the driver did not return within milliseconds", arguments_[0]);
    if (g_ending.load()) {
      Gate::open();
      refuse_ending();
      return false;
    }
    const bool opened = deep_loads() != deep_loads_;
    const bool captures = captures_in_progress() != 0;
    if (!opened && !captures) return true;
    Gate::open();
    if (opened && refuse_deep_bound()) return false;
    if (timeout.over())
      return opened ? refused(cuda::CUDA_ERROR_NOT_SUPPORTED,
                              "all the time it opens libraries with", "RTLD_DEEPBIND")
                    : refused(cuda::CUDA_ERROR_NOT_READY,
                              "a stream was being captured for milliseconds", arguments_[0]);
    // Waiting for the device would spoil the capture, which soon ends by itself.
    if (captures) ::usleep(1000);
  }
}

// With the gate closed. False: it is open, and the command is refused.
bool Session::finish_work(const PeersTimeout& timeout) {
  // With all memory the driver's, its lock waits for the devices, and needs no thread for it.
  if (page_.origin == direct::AgentOrigin::kHooked) return true;
  Outcome outcome;
  const auto waited = wait_for_devices(timeout, outcome);
  if (waited == Waited::kDone) return true;
  Gate::open();
  if (waited == Waited::kFailed)
    report(outcome);
  else
    refuse(cuda::CUDA_ERROR_NOT_READY, "the device did not finish within milliseconds",
           arguments_[0]);
  return false;
}

void Session::close_gate() {
  if (!expect(AgentState::kRunning)) return;
  if (g_ending.load()) return refuse_ending();
  const PeersTimeout timeout(*this, Clock::now() + milliseconds(arguments_[0]));
  if (!hold_calls(timeout) || !finish_work(timeout)) return;
  finish_frees();
  if (managed_areas() > 0) Copiers::start();
  try_exports();
  const auto inventory = take_inventory();
  if (buffer_wanted_ && !have_buffer(inventory.bytes)) {
    Gate::open();
    return refuse(cuda::CUDA_ERROR_OUT_OF_MEMORY, "no address range of that many bytes",
                  inventory.bytes);
  }
  close_door();
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

void Session::export_batch() {
  if (state() != AgentState::kFilling && !expect(AgentState::kClosed)) return;
  const auto first = arguments_[0];
  // Of a process that was restored.
  if (first == 0) make_descriptor_room(kExportRoom);
  for (std::uint32_t i = 0; i < direct::kExportBatch && first + i < segments_.size(); ++i) {
    if (g_pinned.count == 0) {
      const auto outcome =
          g_exported.add([&](int& made) { return export_segment(first + i, made); });
      // A program that may open few files: the tool asks for the rest when it has these.
      if (!outcome.ok() && i > 0) break;
      if (!outcome.ok()) {
        close_exported();
        return report(outcome);
      }
    }
    const int fd = g_pinned.count == 0 ? g_exported.fds[i] : g_pinned.fds[first + i];
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

void Session::close_exported() {
  g_exported.close_all();
  page_.exported_count = 0;
}

void Session::pin() {
  if (!expect(AgentState::kClosed)) return;
  g_pinned.close_all();
  const auto count = static_cast<std::uint32_t>(segments_.size());
  if (segments_.size() > kMostPinned || !may_have_descriptors(count))
    return refuse(cuda::CUDA_ERROR_NOT_SUPPORTED, "too many descriptors", count);
  make_descriptor_room(static_cast<int>(count) + kExportRoom);
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto outcome = g_pinned.add([&](int& made) { return export_segment(i, made); });
    if (outcome.ok()) continue;
    g_pinned.close_all();
    return report(outcome);
  }
  done();
}

// Where the content is in pinned memory and nowhere else, the agent copies it into the buffer
// itself, because the tool or the mover has died. Then all goes on as if it had been copied there
// at once.
bool Session::save_pinned() {
  if (g_pinned.count == 0) return true;
  const auto outcome = copy_pinned(std::span(g_pinned.fds, g_pinned.count), buffer());
  if (outcome.ok()) g_pinned.close_all();
  report(outcome);
  return outcome.ok();
}

void Session::evict() {
  if (!expect(AgentState::kClosed)) return;
  set_content(arguments_[0], arguments_[1]);
  if (!content_is_elsewhere() && !expect_buffer()) return;
  if (content_is_elsewhere()) g_pinned.close_all();
  const auto outcome = evict_all();
  // From here on the gate opens only when all of it is there again, with its content.
  set_state(AgentState::kEvicted);
  if (outcome.ok()) {
    release_local_memory();
    return done();
  }
  if (save_pinned() && repopulate_all().ok()) {
    set_state(AgentState::kFilling);
    // Otherwise the peer brings it.
    if (!content_is_elsewhere() && copy_all(buffer(), false).ok()) set_state(AgentState::kClosed);
  }
  report(outcome);
}

void Session::repopulate() {
  if (state() != AgentState::kHeld && !expect(AgentState::kEvicted)) return;
  if (!save_pinned()) return set_state(AgentState::kEvicted);
  const auto outcome = repopulate_all();
  if (outcome.ok())
    set_state(AgentState::kFilling);
  else
    set_state(AgentState::kEvicted);
  report(outcome);
}

void Session::open_gate(bool keeps_buffer) {
  if (state() != AgentState::kFilling && !expect(AgentState::kClosed)) return;
  if (const auto missing = detached_count(); missing > 0)
    return refuse(cuda::CUDA_ERROR_ILLEGAL_STATE, "pieces of memory that was given up are not back",
                  missing);
  g_pinned.close_all();
  set_content(0, 0);
  set_state(AgentState::kRunning);
  if (was_detached_) forget_saved();
  name_connections();
  was_detached_ = false;
  open_door();
  Gate::open();
  if (!keeps_buffer) {
    give_buffer_back();
    give_reserve_back();
  }
  done();
}

void Session::list_shares() {
  if (arguments_[0] == 0) listed_ = list_shared();
  for (std::uint64_t i = arguments_[0]; i < listed_.size(); ++i) {
    if (page_.exported_count == direct::kShareBatch) break;
    const Shared& one = listed_[i];
    page_.shares[page_.exported_count++] = {one.id, one.bytes, one.role, one.open, -1, one.of_host};
  }
  if (page_.exported_count < direct::kShareBatch) listed_ = {};
  done();
}

void Session::detach() {
  if (!expect(AgentState::kClosed)) return;
  was_detached_ = true;
  std::uint64_t room = arguments_[0] == 0 ? UINT64_MAX : arguments_[0];
  auto outcome = detach_all(room);
  if (outcome.ok()) outcome = save_managed(room);
  page_.detached_count = detached_count();
  report(outcome);
}

void Session::stay() {
  if (!expect(AgentState::kClosed)) return;
  was_detached_ = true;
  done();
}

void Session::retake() {
  auto outcome = retake_saved();
  if (outcome.ok()) outcome = retake_managed();
  page_.detached_count = detached_count();
  report(outcome);
}

void Session::lend_piece() {
  make_descriptor_room(kExportRoom);
  const direct::ShareId id{arguments_[0], arguments_[1]};
  const bool is_closed = state() == AgentState::kClosed || state() == AgentState::kFilling;
  const auto outcome = g_exported.add([&](int& made) { return lend(id, is_closed, made); });
  if (outcome.ok()) {
    page_.shares[0] = {id, 0, direct::ShareRole::kOwner, 0, g_exported.fds[0], 0};
    page_.exported_count = 1;
  }
  report(outcome);
}

// The peer's end is for it to take; what it sends comes out here.
void Session::offer_socket() {
  close_sockets();
  make_descriptor_room(kExportRoom);
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets_) != 0)
    return refuse(cuda::CUDA_ERROR_OPERATING_SYSTEM, "no socket to be had: error",
                  static_cast<std::uint64_t>(errno));
  page_.shares[0] = {{}, 0, direct::ShareRole::kImporter, 0, sockets_[1], 0};
  page_.exported_count = 1;
  done();
}

void Session::take_pieces() {
  Outcome outcome;
  MissingImports missing;
  direct::ShareId id{};
  for (int fd = -1; outcome.ok() && receive_piece(sockets_[0], id, fd); ::close(fd))
    outcome = missing.attach(id, fd);
  close_sockets();
  page_.detached_count = detached_count();
  report(outcome);
}

// One that is told twice has nothing more to find: what it could not have is the driver's.
void Session::adopt() {
  if (!expect(AgentState::kClosed)) return;
  if (page_.origin == direct::AgentOrigin::kStarted)
    return refuse(cuda::CUDA_ERROR_ILLEGAL_STATE, "started with the program, it serves",
                  "all of its memory");
  if (page_.origin == direct::AgentOrigin::kAttached) return done();
  if (arguments_[0] == direct::kLook) return report(look_for_memory());
  const auto outcome = adopt_memory();
  // It serves from here on, also if a block was lost.
  page_.origin = direct::AgentOrigin::kAttached;
  report(outcome);
}

void Session::close_sockets() {
  for (int& socket : sockets_) {
    struct stat status {};
    if (socket >= 0 && ::fstat(socket, &status) == 0 && S_ISSOCK(status.st_mode)) ::close(socket);
    socket = -1;
  }
}

// The peer has died: the agent makes the program run again by itself; if the device has no room
// now, at the next poll.
void Session::undo() {
  end_precopy();
  close_exported();
  close_sockets();
  // Only a tool can ask the owners of the memory that is missing.
  if (detached_count() > 0) return;
  // And only a tool sees whether another process still misses memory that it shares with this one.
  // A kernel that runs before the last import is made ends with 719 (seen by gVisor).
  const bool gave_up =
      state() != AgentState::kRunning && (state() != AgentState::kClosed || was_detached_);
  if (gave_up && !list_shared().empty()) return;
  // The peer had only asked for kPrepare.
  if (state() == AgentState::kRunning) {
    give_reserve_back();
    return give_buffer_back();
  }
  // Only a tool that finds the image can bring the content back.
  if (state() != AgentState::kClosed && content_is_elsewhere()) return;
  if (state() == AgentState::kEvicted) {
    if (!save_pinned() || !repopulate_all().ok()) return;
    set_state(AgentState::kFilling);
  }
  if (state() == AgentState::kFilling && !copy_all(buffer(), false).ok()) return;
  open_gate(false);
}

}  // namespace stasis::preload
