// How the tool finds the agent of a process: by the descriptors and the mappings of its page.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "direct/agent_client.h"
#include "direct/agent_page.h"
#include "direct/read_once.h"
#include "proc/address_space.h"
#include "proc/lock_holder.h"
#include "proc/procfs.h"
#include "proc/served_files.h"

namespace stasis::direct {
namespace {

// A tool that is at its end, or its mover, needs the whole timeout at most; any other program that
// has the lock is not waited for. The agent itself has it for microseconds.
constexpr std::chrono::milliseconds kNoTool{1000};

bool lock_file(const UniqueFd& file, std::chrono::milliseconds timeout) {
  const auto start = Clock::now();
  bool asked = false;
  while (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    const auto waited = Clock::now() - start;
    if (waited >= timeout) return false;
    if (waited >= kNoTool && !std::exchange(asked, true) && proc::lock_holder_that_is_no_tool(file))
      return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

Error has_another_peer(Pid pid, const UniqueFd& file) {
  if (const auto other = proc::lock_holder_that_is_no_tool(file)) {
    return {
        ErrorCode::kBusy,
        fmt::format("process {} ({}), which is no stasis, holds a lock on the page of the agent "
                    "in process {}, by which one tool keeps others from it",
                    other->pid.value, other->comm, pid.value),
        fmt::format("end it (`kill {}`), or have it give the lock up", other->pid.value)};
  }
  const auto holder = proc::lock_holder(file);
  return {ErrorCode::kBusy,
          fmt::format(
              "the agent in process {} has another peer, {}", pid.value,
              holder ? fmt::format("process {}", holder->value) : "which cannot be seen from here"),
          holder ? "wait for the other operation to end"
                 : "wait for the other operation to end; it may be in another container"};
}

// The memory that is set aside for a failed allocation serves this as well: without its page a
// process stands still.
void* map_page(const UniqueFd& file) {
  for (;;) {
    void* at =
        ::mmap(nullptr, sizeof(ControlPage), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (at != MAP_FAILED || errno != ENOMEM || !give_up_reserve()) return at;
  }
}

// A descriptor outlives execve(2) if a program wants that; a mapping does not. As agents map it, so
// that no other program does by mistake.
Result<bool> is_mapped_in(Pid pid, const struct stat& file, Clock::time_point until) {
  bool found = false;
  STASIS_TRY(proc::ProcFs().for_each_mapping(
      pid,
      [&](const proc::Mapping& mapping) {
        found =
            mapping.inode == file.st_ino && mapping.permissions == "rw-s" && is_agent_page(mapping);
        return !found && Clock::now() < until;
      },
      proc::ProcFs::Which::kOfFiles));
  return found;
}

tl::unexpected<Error> no_time_for(Pid pid) {
  return fail(ErrorCode::kTimeout,
              fmt::format("the agent in process {} was not found in time", pid.value));
}

bool in_first_user_namespace(Pid pid) {
  constexpr ino_t kFirst = 0xEFFFFFFDU;  // PROC_USER_INIT_INO of linux/proc_ns.h
  struct stat space {};
  return ::stat(fmt::format("/proc/{}/ns/user", pid.value).c_str(), &space) != 0 ||
         space.st_ino == kFirst;
}

// Whether the process's user namespace has one user and one group. There no program gains rights
// over others by exec: a setuid program's user is not known in it.
bool is_alone_in_its_namespace(Pid pid) {
  return std::ranges::all_of(std::array{"uid_map", "gid_map"}, [&](const char* name) {
    const auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/{}", pid.value, name));
    std::istringstream words(text.value_or(""));
    std::uint64_t inside = 0;
    std::uint64_t outside = 0;
    std::uint64_t count = 0;
    std::string more;
    return (words >> inside >> outside >> count) && count == 1 && !(words >> more);
  });
}

// Of a process that was restored, that is since then.
bool is_young(Pid pid) {
  constexpr double kYoung = 5;  // seconds
  const auto info = proc::ProcFs().process(pid);
  return info && proc::age_of(*info) < kYoung;
}

// An agent that was saved in a user namespace maps its page again, within a second of the restore
// there or elsewhere (ADR 36). kBusy: it may still do so.
Result<bool> becomes_mapped(const proc::AddressSpace& space, const struct stat& file,
                            std::chrono::milliseconds timeout, Clock::time_point until) {
  constexpr std::chrono::milliseconds kMapsAgain{5000};
  constexpr std::chrono::milliseconds kPoll{20};
  const Pid pid = space.pid();
  const auto deadline = Clock::now() + std::min(timeout, kMapsAgain);
  for (;;) {
    STASIS_TRY_ASSIGN(const bool is_mapped, is_mapped_in(pid, file, until));
    if (!is_mapped && Clock::now() >= until) return no_time_for(pid);
    const bool may_come = !in_first_user_namespace(pid) || is_young(pid);
    if (is_mapped || !may_come || !space.check_current()) return is_mapped;
    if (is_alone_in_its_namespace(pid)) return true;
    if (Clock::now() >= deadline) {
      return fail(
          ErrorCode::kBusy,
          fmt::format("process {} has the descriptor of an agent's page, and has not mapped "
                      "the page yet, as after a restore in a user namespace",
                      pid.value),
          "if it was just restored, try again; if it has become another program (exec), "
          "it has that descriptor to close");
    }
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace

Result<std::optional<AgentClient>> AgentClient::find(Pid pid, const Pidfd& pidfd,
                                                     std::chrono::milliseconds timeout,
                                                     Clock::time_point until) {
  std::error_code failed;
  const bool none = paths_of_page(pid, failed, until).empty();
  if (failed == std::errc::timed_out) return no_time_for(pid);
  if (none) return std::optional<AgentClient>();
  // In this order: a page that the process has mapped after this was opened, it had when it was
  // opened, because exec takes the mappings.
  STASIS_TRY_ASSIGN(auto opened, proc::AddressSpace::open(pid));
  const auto space = std::make_shared<const proc::AddressSpace>(std::move(opened));
  const auto paths = paths_of_page(pid, failed, until);
  if (failed == std::errc::timed_out) return no_time_for(pid);
  STASIS_TRY_ASSIGN(auto details, proc::ProcFs().details(pid));
  for (const std::string& path : paths) {
    if (Clock::now() >= until) return no_time_for(pid);
    auto file = open_page(path, O_RDWR);
    if (!file && (file.error().code == ErrorCode::kNotSupported || is_closed(path))) continue;
    if (!file) return fail(std::move(file.error()));
    struct stat status {};
    if (::fstat(file->get(), &status) != 0 || status.st_size < static_cast<off_t>(kOfAllVersions))
      continue;
    // A file that could still shrink would end the tool by SIGBUS. The tool believes nothing else
    // in it but numbers that it checks where it uses them: the page belongs to the target.
    const int seals = ::fcntl(file->get(), F_GET_SEALS);
    if (seals < 0 || (seals & kAgentSeals) != kAgentSeals) continue;
    void* at = map_page(*file);
    if (at == MAP_FAILED) return fail(errno_error("cannot map " + path, errno));
    auto own = Pidfd::open(pid);
    if (!own) {
      ::munmap(at, sizeof(ControlPage));
      return fail(std::move(own.error()));
    }
    AgentClient client(std::move(*own), space, std::move(*file), static_cast<ControlPage*>(at));
    // Its memory may be away, and only a tool of its version brings it back.
    if (is_page_of_another_version(*client.page_, details.ns_pid)) {
      return fail(
          refusal({"agent-version", Severity::kRed, pid,
                   fmt::format("the agent in process {} has version {} of its page, and this "
                               "stasis version {}",
                               pid.value, once(client.page_->version), kAgentVersion),
                   "use the stasis that came with that agent"}));
    }
    const bool whole = status.st_size >= static_cast<off_t>(sizeof(ControlPage));
    if (!whole || !is_page_of(*client.page_, details.ns_pid)) continue;
    const auto is_mapped = becomes_mapped(*space, status, timeout, until);
    if (!pidfd.alive()) return std::optional<AgentClient>();
    if (!is_mapped) return fail(is_mapped.error());
    if (!*is_mapped) {
      return fail(refusal(
          {"lost-agent", Severity::kRed, pid,
           fmt::format("process {} has the descriptor of an agent's page, and not the page: "
                       "it has become another program (exec)",
                       pid.value),
           "its GPU memory, if it has any, is the driver's to move: leave --path direct out"}));
    }
    if (!lock_file(client.file_, timeout)) {
      return fail(has_another_peer(pid, client.file_));
    }
    if (!pidfd.alive()) return std::optional<AgentClient>();
    client.number_ = client.page_->request.load();
    client.take_figures();
    return std::optional<AgentClient>(std::move(client));
  }
  return std::optional<AgentClient>();
}

bool AgentClient::can_be_found() const {
  struct stat status {};
  std::error_code failed;
  const auto paths = paths_of_page(pid_, failed);
  if (failed || ::fstat(file_.get(), &status) != 0) return true;
  return std::any_of(paths.begin(), paths.end(), [&](const std::string& path) {
    const auto other = proc::known_status(path);
    return other && other->st_ino == status.st_ino;
  });
}

}  // namespace stasis::direct
