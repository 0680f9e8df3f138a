#include "direct/agent_client.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>
#include <type_traits>

#include <fmt/format.h>

#include "abi/cuda_abi.h"
#include "abi/descriptor_message.h"
#include "abi/futex.h"
#include "base/trace.h"
#include "base/units.h"
#include "proc/address_space.h"
#include "proc/procfs.h"

namespace stasis::direct {

namespace {

constexpr std::chrono::milliseconds kAgentPoll{50};
constexpr int kPollsUntilExec = 10;
// How long an agent may take for the command under way when the user asks to stop.
constexpr std::chrono::milliseconds kLeaveAfter{3000};
// The same for an agent that brings its memory back when the user asks a second time.
constexpr std::chrono::seconds kLeaveBack{10};
// The same for an agent that has not answered in time once: it may be about to answer, and it may
// hold up the tool for as long as it gets.
constexpr std::chrono::milliseconds kAfterSilence{15000};

// Reads once, whatever the compiler would do: the other side may write at any time.
template <class T>
T once(const T& place) {
  T value;
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  __atomic_load(&place, &value, __ATOMIC_RELAXED);
  return value;
}

bool lock_file(const UniqueFd& file, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
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

bool is_agent_page(const proc::Mapping& mapping) {
  return mapping.path.find(fmt::format("/memfd:{}", kAgentMemfd)) != std::string::npos;
}

// The target chooses the name, and what it stands for: only memory is opened.
Result<UniqueFd> open_page(const std::string& path, int access) {
  return open_checked(AT_FDCWD, path, access, &is_memory_file);
}

// A descriptor outlives execve(2) if a program wants that; a mapping does not. As agents map it, so
// that no other program does by mistake.
bool is_mapped_in(Pid pid, const struct stat& file) {
  const auto mappings = proc::ProcFs().mappings(pid);
  return mappings &&
         std::any_of(mappings->begin(), mappings->end(), [&](const proc::Mapping& mapping) {
           return mapping.inode == file.st_ino && mapping.permissions == "rw-s" &&
                  is_agent_page(mapping);
         });
}

bool in_first_user_namespace(Pid pid) {
  constexpr ino_t kFirst = 0xEFFFFFFDU;  // PROC_USER_INIT_INO of linux/proc_ns.h
  struct stat space {};
  return ::stat(fmt::format("/proc/{}/ns/user", pid.value).c_str(), &space) != 0 ||
         space.st_ino == kFirst;
}

// An agent that was restored in a user namespace maps its page again, within a second (ADR 36).
bool becomes_mapped(const proc::AddressSpace& space, const struct stat& file) {
  constexpr std::chrono::milliseconds kMapsAgain{5000};
  constexpr std::chrono::milliseconds kPoll{20};
  const auto deadline = Clock::now() + kMapsAgain;
  // There no program gains rights over others by exec: a setuid program's user is not known in it.
  if (!in_first_user_namespace(space.pid())) return true;
  while (!is_mapped_in(space.pid(), file)) {
    if (Clock::now() >= deadline || !space.is_current()) return false;
    std::this_thread::sleep_for(kPoll);
  }
  return true;
}

// The socket is the target's to choose: nothing here waits for it.
bool send_descriptor(const UniqueFd& socket, ShareId id, int fd) {
  return send_with_descriptor(socket.get(), id.data(), sizeof id, fd, MSG_DONTWAIT);
}

// Whether the answer to a command is worth nothing to a tool that is asked to stop: the agent makes
// the program run again when its peer goes.
bool can_be_left(AgentCommand command) {
  return command == AgentCommand::kNone || command == AgentCommand::kPrepare ||
         command == AgentCommand::kClose || command == AgentCommand::kExport ||
         command == AgentCommand::kPin || command == AgentCommand::kShares;
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

const char* agent_command_name(AgentCommand command) {
  switch (command) {
    case AgentCommand::kNone:
      return "do nothing";
    case AgentCommand::kPrepare:
      return "prepare a buffer";
    case AgentCommand::kClose:
      return "hold the program back";
    case AgentCommand::kExport:
      return "export its device memory";
    case AgentCommand::kEvict:
      return "give its device memory back";
    case AgentCommand::kHold:
      return "stay as it is";
    case AgentCommand::kRepopulate:
      return "take its device memory again";
    case AgentCommand::kCopyIn:
      return "copy its device memory in";
    case AgentCommand::kOpen:
      return "let the program go on";
    case AgentCommand::kBuffer:
      return "have a buffer";
    case AgentCommand::kPin:
      return "keep its device memory";
    case AgentCommand::kUnpin:
      return "let go of its device memory";
    case AgentCommand::kShares:
      return "say what it shares with other processes";
    case AgentCommand::kDetach:
      return "give up memory that the driver cannot restore";
    case AgentCommand::kRetake:
      return "take such memory again";
    case AgentCommand::kLend:
      return "lend its memory to another process";
    case AgentCommand::kAttach:
      return "take other processes' memory again";
  }
  return "do an unknown thing";
}

bool is_away(AgentState state) {
  return state == AgentState::kEvicted || state == AgentState::kHeld ||
         state == AgentState::kFilling || state == AgentState::kClosed;
}

bool ProbedAgent::waits() const { return is_away(state) && !has_peer; }

std::string ProbedAgent::until_when(Pid pid) const {
  if (!of_our_version) {
    return "stands still until its GPU memory is back; its agent is of another version: use the "
           "stasis that came with it";
  }
  // Only a tool finds content in an image, and an agent whose process the driver holds does nothing
  // by itself.
  if (content_id != ContentId{} || state == AgentState::kHeld || detached) {
    return fmt::format("stands still until `stasis recover {}` brings its GPU memory back",
                       pid.value);
  }
  return "stands still until there is room for its GPU memory, and goes on by itself then";
}

Result<std::optional<AgentClient::Seen>> AgentClient::see(Pid pid, int access) {
  std::error_code failed;
  const auto paths = candidates(pid, failed);
  if (failed == std::errc::permission_denied)
    return fail(errno_error(fmt::format("cannot look at process {}", pid.value), EACCES));
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
      return std::optional(Seen{
          std::move(*file), {page.state.load(), {}, false, true, false, false, false, 0, false}});
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
                            false};
    return std::optional(Seen{std::move(*file), agent});
  }
  return std::optional<Seen>();
}

bool AgentClient::says_it_shares(Pid pid) {
  // By its mapping: the program may have closed the descriptor.
  const auto space = proc::AddressSpace::open(pid);
  const auto mappings = proc::ProcFs().mappings(pid);
  if (!space || !mappings) return false;
  return std::any_of(mappings->begin(), mappings->end(), [&](const proc::Mapping& mapping) {
    if (!is_agent_page(mapping) || mapping.end - mapping.start < sizeof(ControlPage)) return false;
    alignas(ControlPage) std::byte bytes[sizeof(ControlPage)];
    if (!space->read(mapping.start, bytes, sizeof bytes)) return false;
    const auto& page = *reinterpret_cast<const ControlPage*>(bytes);
    // The magic comes when the agent's thread has begun to listen.
    return page.version == kAgentVersion && page.bytes == sizeof(ControlPage) &&
           (page.share_count != 0 || page.driver_share_count != 0);
  });
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

void AgentClient::note_hold(Pid pid) {
  const auto seen = see(pid, O_RDWR);
  if (!seen || !*seen || !(*seen)->agent.of_our_version) return;
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
    if (!becomes_mapped(*space, status)) {
      if (!pidfd.alive()) return std::optional<AgentClient>();
      return fail(refusal(
          {"lost-agent", Severity::kRed, pid,
           fmt::format("process {} has the descriptor of an agent's page, and not the page: "
                       "it has become another program (exec)",
                       pid.value),
           "its GPU memory, if it has any, is the driver's to move: leave --path direct out"}));
    }
    if (!lock_file(client.file_, timeout)) {
      return fail(ErrorCode::kBusy,
                  fmt::format("the agent in process {} has another peer", pid.value),
                  "wait for the other operation to end");
    }
    if (!pidfd.alive()) return std::optional<AgentClient>();
    client.number_ = client.page_->request.load();
    client.take_figures();
    return std::optional<AgentClient>(std::move(client));
  }
  return std::optional<AgentClient>();
}

AgentClient::AgentClient(AgentClient&& other) noexcept
    : pid_(other.pid_),
      pidfd_(std::move(other.pidfd_)),
      space_(std::move(other.space_)),
      file_(std::move(other.file_)),
      page_(std::exchange(other.page_, nullptr)),
      figures_(other.figures_),
      asked_(other.asked_),
      asked_at_(other.asked_at_),
      number_(other.number_),
      interrupt_(other.interrupt_),
      heeds_(other.heeds_),
      silent_(other.silent_) {}

AgentClient& AgentClient::operator=(AgentClient&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  std::swap(space_, other.space_);
  std::swap(file_, other.file_);
  std::swap(page_, other.page_);
  std::swap(figures_, other.figures_);
  std::swap(asked_, other.asked_);
  std::swap(asked_at_, other.asked_at_);
  std::swap(number_, other.number_);
  std::swap(interrupt_, other.interrupt_);
  std::swap(heeds_, other.heeds_);
  std::swap(silent_, other.silent_);
  return *this;
}

AgentClient::~AgentClient() {
  if (page_) ::munmap(page_, sizeof(ControlPage));
}

bool AgentClient::has_few_zeros() const {
  return bytes() >> 20 < 2 * std::uint64_t{page_->few_zeros.load(std::memory_order_relaxed)};
}

void AgentClient::note_few_zeros(bool few) {
  const std::uint64_t mib = std::min<std::uint64_t>(bytes() >> 20, UINT32_MAX);
  page_->few_zeros.store(few ? static_cast<std::uint32_t>(mib) : 0, std::memory_order_relaxed);
}

void AgentClient::take_figures() {
  // Its size has been checked, and is not another one at each answer.
  const bool anew = asked_ == AgentCommand::kNone || asked_ == AgentCommand::kPrepare ||
                    asked_ == AgentCommand::kClose;
  if (anew) {
    figures_.bytes = once(page_->segment_bytes);
    figures_.segments = once(page_->segment_count);
    figures_.staying_bytes = once(page_->staying_bytes);
  }
  figures_.buffer_address = once(page_->buffer_address);
  figures_.buffer_bytes = once(page_->buffer_bytes);
  figures_.content_id = {once(page_->content_id[0]), once(page_->content_id[1])};
  figures_.driver_shares = once(page_->driver_share_count);
  figures_.multicasts = once(page_->multicast_count);
  figures_.shares = once(page_->share_count);
  figures_.detached = once(page_->detached_count);
  figures_.managed_areas = once(page_->managed_areas);
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
    struct stat other {};
    return ::stat(path.c_str(), &other) == 0 && other.st_ino == status.st_ino;
  });
}

AgentState AgentClient::state() const { return page_->state.load(std::memory_order_acquire); }

void AgentClient::begin(AgentCommand command, std::uint64_t argument) {
  begin(command, ContentId{argument, 0});
}

void AgentClient::begin(AgentCommand command, const ContentId& arguments) {
  asked_ = command;
  asked_at_ = Clock::now();
  page_->command = command;
  page_->arguments[0] = arguments[0];
  page_->arguments[1] = arguments[1];
  page_->request.store(++number_, std::memory_order_release);
  futex::wake_all(page_->request, true);
}

Result<void> AgentClient::finish(std::chrono::milliseconds timeout) {
  const Interrupt never;
  return finish_unless(never, timeout);
}

Result<void> AgentClient::wants_to_leave() const {
  if (interrupt_ == nullptr) return {};
  if (heeds_ == Heeds::kFirst && can_be_left(asked_)) return interrupt_->check();
  if (!interrupt_->insists()) return {};
  const auto waited = std::chrono::floor<std::chrono::seconds>(Clock::now() - asked_at_);
  if (!silent_ && waited < kLeaveBack) return {};
  return fail(ErrorCode::kInterrupted,
              fmt::format("interrupted twice while the agent in process {} was to {} ({} s)",
                          pid_.value, agent_command_name(asked_), waited.count()));
}

Result<void> AgentClient::check_size(const GpuMemory& of_all_gpus) const {
  constexpr std::uint64_t kEveryGpuHas = std::uint64_t{8} << 30;
  if (bytes() <= kEveryGpuHas) return {};
  const std::uint64_t most = of_all_gpus();
  if (bytes() <= most) return {};
  return fail(refusal({"agent-page", Severity::kRed, pid_,
                       fmt::format("the agent in process {} claims {} of GPU memory, and all GPUs "
                                   "together have {}",
                                   pid_.value, format_bytes(bytes()), format_bytes(most)),
                       "do not trust that process: its page is forged or damaged"}));
}

Result<void> AgentClient::wait_for_reply(const Interrupt& interrupt, Clock::time_point deadline) {
  std::optional<Clock::time_point> stop_at;
  for (int polls = 1;; ++polls) {
    const auto seen = page_->reply.load(std::memory_order_acquire);
    if (seen == number_) return {};
    if (!pidfd_.alive()) {
      return fail(ErrorCode::kProcessGone, fmt::format("process {} has ended", pid_.value));
    }
    if (polls % kPollsUntilExec == 0 && has_left()) {
      return fail(
          ErrorCode::kProcessGone,
          fmt::format("process {} has become another program (exec), and what it had on the "
                      "GPU has gone",
                      pid_.value));
    }
    if (Clock::now() >= deadline) {
      silent_ = true;
      return fail(
          ErrorCode::kNoAnswer,
          fmt::format(
              "the agent in process {} was to {} and has not answered within {} ms", pid_.value,
              agent_command_name(asked_),
              std::chrono::ceil<std::chrono::milliseconds>(Clock::now() - asked_at_).count()),
          "see whether the driver hangs there: `cat /proc/PID/task/*/wchan`; `stasis "
          "recover` makes the process run when it answers again");
    }
    if (auto leave = wants_to_leave(); !leave && !can_be_left(asked_)) {
      silent_ = true;
      return leave;
    }
    auto stop = interrupt.check();
    if (stop) stop = wants_to_leave();
    if (!stop) {
      page_->abandoned.store(number_, std::memory_order_relaxed);
      if (!stop_at) stop_at = Clock::now() + kLeaveAfter;
      if (Clock::now() >= *stop_at && can_be_left(asked_)) {
        silent_ = true;
        return stop;
      }
    }
    futex::wait(page_->reply, seen, true, kAgentPoll);
  }
}

Result<void> AgentClient::finish_unless(const Interrupt& interrupt,
                                        std::chrono::milliseconds timeout) {
  if (silent_) timeout = std::min(timeout, kAfterSilence);
  STASIS_TRY(wait_for_reply(interrupt, Clock::now() + timeout));
  trace_record(
      {TraceKind::kAgent, agent_command_name(asked_), asked_at_, Clock::now(), 0, pid_, 0});
  take_figures();
  const auto result = static_cast<cuda::CUresult>(once(page_->cu_result));
  if (result == cuda::CUDA_SUCCESS) return {};
  std::string words;
  for (const char& letter : page_->message) {
    const char one = once(letter);
    if (one == '\0') break;
    // They go to a terminal.
    words += one >= ' ' && one <= '~' ? one : '?';
  }
  auto message = fmt::format("the agent in process {} could not {}: {}", pid_.value,
                             agent_command_name(asked_), words);
  switch (result) {
    case cuda::CUDA_ERROR_NOT_READY:
      return fail(ErrorCode::kTimeout, std::move(message),
                  "its GPU work takes longer than that: give it more time (--timeout)");
    case cuda::CUDA_ERROR_DEINITIALIZED:
      return fail(ErrorCode::kProcessGone, fmt::format("process {} is about to exit", pid_.value));
    case cuda::CUDA_ERROR_OUT_OF_MEMORY:
      if (asked_ == AgentCommand::kPrepare || asked_ == AgentCommand::kClose ||
          asked_ == AgentCommand::kBuffer || asked_ == AgentCommand::kDetach) {
        return fail(ErrorCode::kOutOfHostMemory, std::move(message),
                    "the content of its GPU memory needs that much host memory: free some, or "
                    "allow more (`ulimit -v`, vm.overcommit_memory)");
      }
      // Addresses, of which there are enough if no limit is set.
      if (words.starts_with("cuMemAddressReserve")) {
        return fail(ErrorCode::kOutOfGpuMemory, std::move(message),
                    fmt::format("allow the program more memory (`ulimit -v`; `prlimit --pid {} "
                                "--as=unlimited`), then try again",
                                pid_.value));
      }
      return fail(ErrorCode::kOutOfGpuMemory, std::move(message),
                  "free memory on the GPU (`stasis ps` shows who uses it), then try again");
    case cuda::CUDA_ERROR_NOT_SUPPORTED:
      return fail(ErrorCode::kNotSupported, std::move(message),
                  "leave --path direct out: the driver can take it");
    default:
      return fail(ErrorCode::kDriverError, std::move(message));
  }
}

Result<void> AgentClient::ask(AgentCommand command, std::uint64_t argument,
                              std::chrono::milliseconds timeout) {
  begin(command, argument);
  return finish(timeout);
}

std::chrono::milliseconds copy_time(std::uint64_t bytes) {
  constexpr double kSlowestRate = 200e6;  // per second
  // A target may name any number of bytes.
  constexpr std::uint64_t kMost = std::uint64_t{1} << 50;
  return std::chrono::milliseconds(
      30000 +
      static_cast<std::int64_t>(static_cast<double>(std::min(bytes, kMost)) / kSlowestRate * 1000));
}

Result<void> AgentClient::bring_back(const Fill& fill,
                                     const std::function<Result<void>(AgentClient&)>& before_open) {
  const auto copying = copy_time(bytes());
  const bool away = state() == AgentState::kHeld || state() == AgentState::kEvicted ||
                    state() == AgentState::kFilling;
  if (away && content_is_elsewhere() && !fill) {
    return fail(ErrorCode::kWrongState,
                fmt::format("the content of process {}'s GPU memory is in an image", pid_.value));
  }
  if (state() == AgentState::kHeld || state() == AgentState::kEvicted) {
    // It may have to copy first, if it has pinned its memory (kPin).
    STASIS_TRY(ask(AgentCommand::kRepopulate, 0, kMappingTimeout + copying));
  }
  if (state() == AgentState::kFilling) {
    if (content_is_elsewhere()) {
      STASIS_TRY(ask(AgentCommand::kBuffer, 0, kMappingTimeout));
      STASIS_TRY(fill(*this));
    }
    STASIS_TRY(ask(AgentCommand::kCopyIn, 0, copying));
  }
  if (state() == AgentState::kRunning) return {};
  if (before_open) STASIS_TRY(before_open(*this));
  return ask(AgentCommand::kOpen, 0, kMappingTimeout);
}

Result<std::vector<Share>> AgentClient::shares(std::chrono::milliseconds timeout) {
  constexpr std::size_t kMost = 1 << 16;  // eight ranks of NCCL have some hundreds
  std::vector<Share> shares;
  for (std::uint32_t count = kShareBatch; count == kShareBatch;) {
    STASIS_TRY(ask(AgentCommand::kShares, shares.size(), timeout));
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
                        once(place.open)});
    }
  }
  return shares;
}

Result<UniqueFd> AgentClient::take_descriptor() {
  const int number = once(page_->exported_count) == 1 ? once(page_->shares[0].fd) : -1;
  UniqueFd taken(static_cast<int>(::syscall(SYS_pidfd_getfd, pidfd_.fd(), number, 0)));
  if (!taken.valid()) {
    return fail(errno_error(
        fmt::format("cannot take descriptor {} of process {}", number, pid_.value), errno));
  }
  // Or it is another program's.
  STASIS_TRY(space_->check_current());
  return taken;
}

Result<UniqueFd> AgentClient::borrow(const ShareId& id, std::chrono::milliseconds timeout) {
  begin(AgentCommand::kLend, ContentId{id[0], id[1]});
  STASIS_TRY(finish(timeout));
  return take_descriptor();
}

Result<void> AgentClient::attach(const std::vector<Lent>& pieces,
                                 std::chrono::milliseconds timeout) {
  // The kernel takes some hundred messages before the other side reads them.
  constexpr std::size_t kAtOnce = 64;
  for (std::size_t done = 0; done < pieces.size();) {
    STASIS_TRY(ask(AgentCommand::kAttach, kOffer, timeout));
    STASIS_TRY_ASSIGN(auto socket, take_descriptor());
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
  const auto time_left = [&] {
    return std::max(std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()),
                    std::chrono::milliseconds(0));
  };
  std::vector<Segment> segments;
  while (segments.size() < wanted) {
    STASIS_TRY(ask(AgentCommand::kExport, segments.size(), time_left()));
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
      UniqueFd handle(static_cast<int>(::syscall(SYS_pidfd_getfd, pidfd_.fd(), given.fd, 0)));
      if (!handle.valid()) {
        return fail(errno_error(
            fmt::format("cannot take descriptor {} of process {}", given.fd, pid_.value), errno));
      }
      segments.push_back({std::move(handle), given.bytes, given.offset});
    }
    // Or they are another program's.
    STASIS_TRY(space_->check_current());
  }
  // Otherwise the agent keeps the last ones, and with them the memory, until its next command.
  STASIS_TRY(ask(AgentCommand::kNone, 0, time_left()));
  return segments;
}

}  // namespace stasis::direct
