#include "direct/agent_probe.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include <fmt/format.h>

#include "base/fd.h"
#include "direct/agent_page.h"
#include "proc/address_space.h"
#include "proc/lock_holder.h"
#include "proc/procfs.h"

namespace stasis::direct {
namespace {

struct Seen {
  UniqueFd file;
  ProbedAgent agent;
};

tl::unexpected<Error> out_of_time(Pid pid) {
  return fail(ErrorCode::kTimeout,
              fmt::format("process {} has so many descriptors that it is not known in time whether "
                          "it has an agent",
                          pid.value));
}

Result<std::optional<Seen>> see(Pid pid, int access,
                                Clock::time_point until = Clock::time_point::max()) {
  std::error_code failed;
  const auto paths = paths_of_page(pid, failed, until);
  if (failed == std::errc::permission_denied)
    return fail(errno_error(fmt::format("cannot probe process {}", pid.value), EACCES));
  if (failed == std::errc::timed_out) return out_of_time(pid);
  if (paths.empty()) return std::optional<Seen>();
  STASIS_TRY_ASSIGN(auto details, proc::ProcFs().details(pid));
  for (const std::string& path : paths) {
    if (Clock::now() >= until) return out_of_time(pid);
    auto file = open_page(path, access);
    if (!file && (file.error().code == ErrorCode::kNotSupported || is_closed(path))) continue;
    if (!file) return fail(std::move(file.error()));
    alignas(ControlPage) std::byte bytes[sizeof(ControlPage)];
    const ssize_t got = ::pread(file->get(), bytes, sizeof bytes, 0);
    if (got < static_cast<ssize_t>(kOfAllVersions)) continue;
    const auto& page = *reinterpret_cast<const ControlPage*>(bytes);
    if (is_page_of_another_version(page, details.ns_pid))
      return std::optional(
          Seen{std::move(*file), {.state = page.state.load(), .of_our_version = false}});
    if (got != sizeof bytes || !is_page_of(page, details.ns_pid)) continue;
    const AgentState state = page.state.load();
    const ProbedAgent agent{.state = state,
                            .content_id = {page.content_id[0], page.content_id[1]},
                            .held_before = page.held_before.load() != 0,
                            .half_way = is_away(state) && page.pinned_count != 0,
                            .shares = page.share_count != 0,
                            .detached = is_away(state) && page.detached_count != 0,
                            .managed_areas = page.managed_areas,
                            .origin = page.origin};
    return std::optional(Seen{std::move(*file), agent});
  }
  return std::optional<Seen>();
}

// Whether that is so of the agent's page, which is found by its mapping: the program may have
// closed the descriptor.
template <class Says>
bool any_page(Pid pid, const Says& says) {
  const auto space = proc::AddressSpace::open(pid);
  const auto mappings = proc::ProcFs().mappings(pid);
  if (!space || !mappings) return false;
  return std::any_of(mappings->begin(), mappings->end(), [&](const proc::Mapping& mapping) {
    if (!is_agent_page(mapping) || mapping.end - mapping.start < sizeof(ControlPage)) return false;
    alignas(ControlPage) std::byte bytes[sizeof(ControlPage)];
    if (!space->read(mapping.start, bytes, sizeof bytes)) return false;
    const auto& page = *reinterpret_cast<const ControlPage*>(bytes);
    // The magic comes when the agent's thread has begun to listen.
    return page.version == kAgentVersion && page.bytes == sizeof(ControlPage) && says(page);
  });
}

}  // namespace

bool is_away(AgentState state) {
  return state == AgentState::kEvicted || state == AgentState::kHeld ||
         state == AgentState::kFilling || state == AgentState::kClosed;
}

bool ProbedAgent::waits() const { return is_away(state) && !has_peer; }

bool ProbedAgent::needs_tool() const {
  return content_id != ContentId{} || state == AgentState::kHeld || detached || shares;
}

std::string ProbedAgent::until_when(Pid root) const {
  if (!of_our_version) {
    return "stands still until its GPU memory is back; its agent is of another version: use the "
           "stasis that came with it";
  }
  if (needs_tool()) {
    return fmt::format("stands still until `stasis recover {}` brings its GPU memory back",
                       root.value);
  }
  if (state == AgentState::kClosed)
    return "stands still until the driver answers its agent, and goes on by itself then";
  return "stands still until there is room for its GPU memory, and goes on by itself then";
}

bool says_it_shares(Pid pid) {
  return any_page(pid, [](const ControlPage& page) {
    return page.share_count != 0 || page.driver_share_count != 0 || page.multicast_count != 0;
  });
}

std::uint32_t services_of(Pid pid) {
  const auto details = proc::ProcFs().details(pid);
  std::uint32_t services = 0;
  // A tool that is at work has its program's page mapped, too.
  (void)any_page(pid, [&](const ControlPage& page) {
    if (!details || page.pid != details->ns_pid) return false;
    services = page.services;
    return true;
  });
  return services;
}

Result<std::optional<ProbedAgent>> probe_agent(Pid pid, Clock::time_point until) {
  STASIS_TRY_ASSIGN(auto seen, see(pid, O_RDONLY, until));
  if (!seen) return std::optional<ProbedAgent>();
  // For an instant, and shared: a tool that wants the lock tries again.
  seen->agent.has_peer = ::flock(seen->file.get(), LOCK_SH | LOCK_NB) != 0;
  if (seen->agent.has_peer) return std::optional(seen->agent);
  // A peer that has just gone left another state than the one that was read before.
  STASIS_TRY_ASSIGN(auto now, see(pid, O_RDONLY, until));
  return now ? std::optional(now->agent) : std::optional<ProbedAgent>();
}

bool is_held_by_no_tool(Pid pid) {
  const auto seen = see(pid, O_RDONLY);
  return seen && *seen && proc::lock_holder_that_is_no_tool((*seen)->file).has_value();
}

void note_hold(Pid pid, const Pidfd& pidfd) {
  const auto seen = see(pid, O_RDWR);
  // Or it is another process's, which has got the number.
  if (!seen || !*seen || !(*seen)->agent.of_our_version || !pidfd.alive()) return;
  constexpr std::uint32_t kHeld = 1;
  (void)!::pwrite((*seen)->file.get(), &kHeld, sizeof kHeld, offsetof(ControlPage, held_before));
}

bool is_out_of_reach(Pid pid) {
  std::error_code failed;
  if (!paths_of_page(pid, failed).empty() || failed) return false;
  const auto mappings = proc::ProcFs().mappings(pid);
  return mappings && std::any_of(mappings->begin(), mappings->end(), is_agent_page);
}

}  // namespace stasis::direct
