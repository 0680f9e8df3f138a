// What goes between tool and agent besides numbers: the descriptors of the agent's memory, and
// those of memory that processes share.

#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "abi/descriptor_message.h"
#include "base/scope_guard.h"
#include "direct/agent_client.h"
#include "direct/read_once.h"
#include "proc/descriptors.h"

namespace stasis::direct {
namespace {

bool is_socket(const struct stat& info) { return S_ISSOCK(info.st_mode); }

// Both ends of it were made by that process, as its agent makes them. A message that its reader
// wants the sender of (SO_PASSCRED) says that it is from this user, and what it says is the
// target's to choose: it goes to no other program. The other end of such a socket is the same for
// ever.
bool is_own_pair(const UniqueFd& socket, Pid pid) {
  const auto number = [&](int option) {
    int value = -1;
    socklen_t size = sizeof value;
    (void)::getsockopt(socket.get(), SOL_SOCKET, option, &value, &size);
    return value;
  };
  ucred other{};
  socklen_t size = sizeof other;
  return number(SO_DOMAIN) == AF_UNIX && number(SO_TYPE) == SOCK_SEQPACKET &&
         ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 &&
         other.pid == pid.value;
}

// Nothing here waits for the target.
bool send_descriptor(const UniqueFd& socket, ShareId id, int fd) {
  return send_with_descriptor(socket.get(), id.data(), sizeof id, fd, MSG_DONTWAIT);
}

std::chrono::milliseconds time_left(Clock::time_point deadline) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()),
                  std::chrono::milliseconds(0));
}

}  // namespace

Result<std::vector<Share>> AgentClient::shares(std::chrono::milliseconds timeout) {
  constexpr std::size_t kMost = 1 << 16;  // eight ranks of NCCL have some hundreds
  std::vector<Share> shares;
  const auto deadline = Clock::now() + timeout;
  first_at_ = Clock::now();
  const ScopeGuard is_done([&] { first_at_.reset(); });
  for (std::uint32_t count = kShareBatch; count == kShareBatch;) {
    STASIS_TRY(ask(AgentCommand::kShares, shares.size(), time_left(deadline)));
    STASIS_TRY(wants_to_leave());
    count = once(page_->exported_count);
    if (count > kShareBatch || shares.size() + count > kMost) {
      return fail(
          ErrorCode::kInternal,
          fmt::format("the agent in process {} lists more shared memory than there is", pid_.value),
          "do not trust that process: its page is forged or damaged");
    }
    for (std::uint32_t i = 0; i < count; ++i) {
      const AgentShare& place = page_->shares[i];
      shares.push_back({{once(place.id[0]), once(place.id[1])},
                        once(place.bytes),
                        once(place.role),
                        once(place.open),
                        once(place.of_host) != 0});
    }
  }
  return shares;
}

Result<UniqueFd> AgentClient::take_only_descriptor(const FileCheck& accept) const {
  const int number = once(page_->exported_count) == 1 ? once(page_->shares[0].fd) : -1;
  STASIS_TRY_ASSIGN(auto taken, proc::take_descriptor(pid_, pidfd_, number, accept));
  // Or it is another program's.
  auto current = space_->check_current();
  if (current) return taken;
  proc::drop(std::move(taken));
  return fail(std::move(current.error()));
}

Result<UniqueFd> AgentClient::borrow(const ShareId& id, std::chrono::milliseconds timeout) {
  begin(AgentCommand::kLend, ContentId{id[0], id[1]});
  STASIS_TRY(finish(timeout));
  return take_only_descriptor(&proc::may_be_memory);
}

Result<void> AgentClient::attach(const std::vector<Lent>& pieces,
                                 std::chrono::milliseconds timeout) {
  // The kernel takes some hundred messages before the other side reads them.
  constexpr std::size_t kAtOnce = 64;
  for (std::size_t done = 0; done < pieces.size();) {
    STASIS_TRY(ask(AgentCommand::kAttach, kOffer, timeout));
    STASIS_TRY_ASSIGN(auto socket, take_only_descriptor(&is_socket));
    if (!is_own_pair(socket, pid_)) {
      proc::drop(std::move(socket));
      return fail(ErrorCode::kNotSupported,
                  fmt::format("the agent in process {} has named something else than a socket of "
                              "its own",
                              pid_.value),
                  "do not trust that process: its page is forged or damaged");
    }
    for (const std::size_t end = std::min(done + kAtOnce, pieces.size()); done < end; ++done) {
      const auto& [id, descriptor] = pieces[done];
      if (!send_descriptor(socket, id, descriptor->get())) {
        return fail(
            errno_error(fmt::format("cannot send a descriptor to process {}", pid_.value), errno));
      }
    }
    STASIS_TRY(ask(AgentCommand::kAttach, kTake, timeout));
  }
  return {};
}

Result<std::vector<Segment>> AgentClient::take_segments(std::chrono::milliseconds timeout,
                                                        std::vector<SegmentPlace>* places) {
  // Once: each answer may name another number.
  const std::uint32_t wanted = segment_count();
  const auto deadline = Clock::now() + timeout;
  std::vector<Segment> segments;
  first_at_ = Clock::now();
  const ScopeGuard is_done([&] { first_at_.reset(); });
  while (segments.size() < wanted) {
    STASIS_TRY(ask(AgentCommand::kExport, segments.size(), time_left(deadline)));
    STASIS_TRY(wants_to_leave());
    const auto count = once(page_->exported_count);
    if (count == 0 || count > std::min<std::size_t>(kExportBatch, wanted - segments.size())) {
      return fail(ErrorCode::kInternal,
                  fmt::format("the agent in process {} exports {} pieces", pid_.value, count));
    }
    for (std::uint32_t i = 0; i < count; ++i) {
      const auto& place = page_->segments[i];
      AgentSegment given{
          once(place.bytes), once(place.offset), once(place.address), {}, once(place.fd), 0};
      if (places) {
        for (std::size_t byte = 0; byte < sizeof given.gpu; ++byte)
          given.gpu[byte] = once(place.gpu[byte]);
        GpuUuid gpu;
        static_assert(sizeof gpu.bytes == sizeof given.gpu);
        std::memcpy(&gpu.bytes, given.gpu, sizeof given.gpu);
        places->push_back({given.bytes, given.offset, given.address, gpu});
      }
      STASIS_TRY_ASSIGN(auto handle,
                        proc::take_descriptor(pid_, pidfd_, given.fd, &proc::may_be_memory));
      segments.push_back({std::move(handle), given.bytes, given.offset});
    }
    // Or they are another program's.
    STASIS_TRY(space_->check_current());
  }
  // Otherwise the agent keeps the last ones, and with them the memory, until its next command.
  STASIS_TRY(ask(AgentCommand::kNone, 0, time_left(deadline)));
  return segments;
}

}  // namespace stasis::direct
