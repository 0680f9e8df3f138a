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

// The path of the agent's page among the target's descriptors. A child that the target forked may
// hold one of its parent's, so there may be several.
std::vector<std::string> candidates(Pid pid, std::error_code& failed) {
  std::vector<std::string> found;
  const std::string directory = fmt::format("/proc/{}/fd", pid.value);
  const std::string wanted = fmt::format("/memfd:{} (deleted)", kAgentMemfd);
  for (std::filesystem::directory_iterator it(directory, failed), end; !failed && it != end;
       it.increment(failed)) {
    std::error_code gone;
    if (std::filesystem::read_symlink(it->path(), gone) == wanted) found.push_back(it->path());
  }
  return found;
}

// A file of any file system may be called so; to read what a program serves itself (FUSE) may never
// end.
bool is_agent_page(const proc::Mapping& mapping) {
  static const std::uint64_t memory = [] {
    const UniqueFd one(::memfd_create("stasis", MFD_CLOEXEC));
    struct stat own {};
    return ::fstat(one.get(), &own) == 0 ? std::uint64_t{own.st_dev} : 0;
  }();
  return mapping.device == memory &&
         mapping.path.find(fmt::format("/memfd:{}", kAgentMemfd)) != std::string::npos;
}

// The target chooses the name, and what it stands for: only memory is opened.
Result<UniqueFd> open_page(const std::string& path, int access) {
  return open_checked(AT_FDCWD, path, access, &is_memory_file);
}

// A descriptor outlives execve(2) if a program wants that; a mapping does not. As agents map it, so
// that no other program does by mistake.
Result<bool> is_mapped_in(Pid pid, const struct stat& file) {
  bool found = false;
  STASIS_TRY(proc::ProcFs().for_each_mapping(pid, [&](const proc::Mapping& mapping) {
    found = mapping.inode == file.st_ino && mapping.permissions == "rw-s" && is_agent_page(mapping);
    return !found;
  }));
  return found;
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
  timespec now{};
  if (!info || ::clock_gettime(CLOCK_BOOTTIME, &now) != 0) return false;
  const double started =
      static_cast<double>(info->start_ticks) / static_cast<double>(::sysconf(_SC_CLK_TCK));
  return static_cast<double>(now.tv_sec) - started < kYoung;
}

// An agent that was saved in a user namespace maps its page again, within a second of the restore
// there or elsewhere (ADR 36). kBusy: it may still do so.
Result<bool> becomes_mapped(const proc::AddressSpace& space, const struct stat& file,
                            std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kMapsAgain{5000};
  constexpr std::chrono::milliseconds kPoll{20};
  const Pid pid = space.pid();
  const auto deadline = Clock::now() + std::min(timeout, kMapsAgain);
  for (;;) {
    STASIS_TRY_ASSIGN(const bool is_mapped, is_mapped_in(pid, file));
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

// As much as lies at the same place in all versions, which may be larger and smaller than ours.
constexpr std::size_t kOfAllVersions = offsetof(ControlPage, state) + sizeof(ControlPage::state);

bool is_page_of(const ControlPage& page, int ns_pid) {
  return page.magic == kAgentMagic && page.version == kAgentVersion &&
         page.bytes == sizeof(ControlPage) && page.pid == ns_pid;
}

bool is_page_of_another_version(const ControlPage& page, int ns_pid) {
  return page.magic == kAgentMagic && page.version != kAgentVersion && page.pid == ns_pid;
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

Result<std::optional<AgentClient::Seen>> AgentClient::see(Pid pid, int access) {
  std::error_code failed;
  const auto paths = candidates(pid, failed);
  if (failed == std::errc::permission_denied)
    return fail(errno_error(fmt::format("cannot probe process {}", pid.value), EACCES));
  if (paths.empty()) return std::optional<Seen>();
  STASIS_TRY_ASSIGN(auto details, proc::ProcFs().details(pid));
  for (const std::string& path : paths) {
    auto file = open_page(path, access);
    if (!file && file.error().code == ErrorCode::kNotSupported) continue;
    if (!file) return fail(std::move(file.error()));
    alignas(ControlPage) std::byte bytes[sizeof(ControlPage)];
    const ssize_t got = ::pread(file->get(), bytes, sizeof bytes, 0);
    if (got < static_cast<ssize_t>(kOfAllVersions)) continue;
    const auto& page = *reinterpret_cast<const ControlPage*>(bytes);
    if (is_page_of_another_version(page, details.ns_pid))
      return std::optional(
          Seen{std::move(*file),
               {page.state.load(), {}, false, true, false, false, false, 0, false, {}}});
    if (got != sizeof bytes || !is_page_of(page, details.ns_pid)) continue;
    const AgentState state = page.state.load();
    const ProbedAgent agent{state,
                            {page.content_id[0], page.content_id[1]},
                            true,
                            page.held_before.load() != 0,
                            is_away(state) && page.pinned_count != 0,
                            page.share_count != 0,
                            is_away(state) && page.detached_count != 0,
                            page.managed_areas,
                            false,
                            page.origin};
    return std::optional(Seen{std::move(*file), agent});
  }
  return std::optional<Seen>();
}

namespace {

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

bool AgentClient::says_it_shares(Pid pid) {
  return any_page(pid, [](const ControlPage& page) {
    return page.share_count != 0 || page.driver_share_count != 0 || page.multicast_count != 0;
  });
}

std::uint32_t AgentClient::services_of(Pid pid) {
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

Result<std::optional<ProbedAgent>> AgentClient::probe(Pid pid) {
  STASIS_TRY_ASSIGN(auto seen, see(pid, O_RDONLY));
  if (!seen) return std::optional<ProbedAgent>();
  // For an instant, and shared: a tool that wants the lock tries again.
  seen->agent.has_peer = ::flock(seen->file.get(), LOCK_SH | LOCK_NB) != 0;
  if (seen->agent.has_peer) return std::optional(seen->agent);
  // A peer that has just gone left another state than the one that was read before.
  STASIS_TRY_ASSIGN(auto now, see(pid, O_RDONLY));
  return now ? std::optional(now->agent) : std::optional<ProbedAgent>();
}

bool AgentClient::is_held_by_no_tool(Pid pid) {
  const auto seen = see(pid, O_RDONLY);
  return seen && *seen && proc::lock_holder_that_is_no_tool((*seen)->file).has_value();
}

void AgentClient::note_hold(Pid pid, const Pidfd& pidfd) {
  const auto seen = see(pid, O_RDWR);
  // Or it is another process's, which has got the number.
  if (!seen || !*seen || !(*seen)->agent.of_our_version || !pidfd.alive()) return;
  constexpr std::uint32_t kHeld = 1;
  (void)!::pwrite((*seen)->file.get(), &kHeld, sizeof kHeld, offsetof(ControlPage, held_before));
}

Result<std::optional<AgentClient>> AgentClient::find(Pid pid, const Pidfd& pidfd,
                                                     std::chrono::milliseconds timeout) {
  std::error_code ignored;
  if (candidates(pid, ignored).empty()) return std::optional<AgentClient>();
  // In this order: a page that the process has mapped after this was opened, it had when it was
  // opened, because exec takes the mappings.
  STASIS_TRY_ASSIGN(auto opened, proc::AddressSpace::open(pid));
  const auto space = std::make_shared<const proc::AddressSpace>(std::move(opened));
  const auto paths = candidates(pid, ignored);
  STASIS_TRY_ASSIGN(auto details, proc::ProcFs().details(pid));
  for (const std::string& path : paths) {
    auto file = open_page(path, O_RDWR);
    if (!file && file.error().code == ErrorCode::kNotSupported) continue;
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
    const auto is_mapped = becomes_mapped(*space, status, timeout);
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

bool AgentClient::is_out_of_reach(Pid pid) {
  std::error_code failed;
  if (!candidates(pid, failed).empty() || failed) return false;
  const auto mappings = proc::ProcFs().mappings(pid);
  return mappings && std::any_of(mappings->begin(), mappings->end(), is_agent_page);
}

bool AgentClient::can_be_found() const {
  struct stat status {};
  std::error_code failed;
  const auto paths = candidates(pid_, failed);
  if (failed || ::fstat(file_.get(), &status) != 0) return true;
  return std::any_of(paths.begin(), paths.end(), [&](const std::string& path) {
    const auto other = proc::known_status(path);
    return other && other->st_ino == status.st_ino;
  });
}

}  // namespace stasis::direct
