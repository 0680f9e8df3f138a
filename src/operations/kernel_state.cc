#include "operations/kernel_state.h"

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <ctime>
#include <map>

#include <fmt/format.h>

#include "base/listing.h"
#include "base/threads.h"
#include "criu/criu_core.h"
#include "image/manifest_format.h"
#include "operations/lost.h"
#include "proc/file_state.h"
#include "proc/parking.h"
#include "proc/procfs.h"
#include "proc/terminal_state.h"
#include "proc/thread_state.h"
#include "proc/timerfd.h"

namespace stasis {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

// The processors that a process has without a doing of its own.
struct GivenProcessors {
  std::string of_parent;  // of the root's parent: what it was started with
  std::string of_cpuset;
};

// Of a thread that has set none: this one's.
std::uint64_t usual_slice() {
  const auto own = proc::scheduling(Tid{static_cast<int>(::syscall(SYS_gettid))});
  return own ? own->slice : 0;
}

ThreadStateRecord read_thread(Pid pid, Tid thread, const GivenProcessors& given) {
  ThreadStateRecord state;
  state.thread = thread;
  if (auto cpus = proc::affinity(thread); cpus && *cpus != given.of_parent &&
                                          *cpus != given.of_cpuset &&
                                          cpus->size() <= manifest_format::kMaxPolicy) {
    state.cpus = std::move(*cpus);
  }
  if (const auto priority = proc::io_priority(thread)) state.io_priority = *priority;
  if (const auto slack = proc::timer_slack(thread)) state.timer_slack = *slack;
  if (auto policy = proc::memory_policy(pid, thread);
      policy && policy->size() <= manifest_format::kMaxPolicy) {
    state.memory_policy = std::move(*policy);
  }
  state.personality = proc::personality(pid, thread).value_or(0);
  state.machine_check = proc::machine_check(pid, thread);
  if (const auto scheduling = proc::scheduling(thread)) {
    if (scheduling->slice != usual_slice() && scheduling->slice <= manifest_format::kMaxInteger)
      state.slice = scheduling->slice;
    state.least_load = scheduling->least_load;
    state.most_load = scheduling->most_load;
  }
  return state;
}

// One that CRIU restores as it was needs nothing: it arms those that are armed with what was left,
// and tells the kernel how often others have expired. But it knows whole seconds only of a deadline
// (timerfd_arm in CRIU's pie/restorer.c), and takes one of the day for one that moves with the
// time that the program was away; and one that was to expire again, and waits to be read for that,
// comes back disarmed, with one expiration for all that it missed.
std::vector<TimerRecord> read_timers(Pid pid) {
  std::vector<TimerRecord> records;
  for (proc::TimerFd& timer : proc::timer_fds(pid)) {
    const bool expired = timer.left.count() == 0 && timer.interval.count() > 0 && timer.ticks > 0;
    const bool by_clock = (timer.flags & TFD_TIMER_ABSTIME) != 0;
    if (!expired && !(by_clock && timer.left.count() > 0)) continue;
    proc::read_exactly(pid, timer);
    const bool at_time = by_clock && timer.left.count() > 0;
    if (!at_time && !expired) continue;
    const auto interval = static_cast<std::uint64_t>(timer.interval.count());
    if (interval > manifest_format::kMaxInteger || timer.flags < 0 || timer.flags > 3 ||
        timer.clock < 0 || timer.clock > 15 || records.size() == manifest_format::kMaxTimers) {
      continue;
    }
    const auto now = timer.read_at + proc::clock_ahead(pid, timer.clock);
    const auto in_microseconds = [](nanoseconds time) {
      return static_cast<std::uint64_t>(
          std::max<std::int64_t>(0, std::chrono::duration_cast<microseconds>(time).count()));
    };
    // One that is about to expire is not one that has.
    const auto left = at_time ? std::max<std::uint64_t>(in_microseconds(timer.left), 1) : 0;
    records.push_back({timer.descriptor, timer.clock, timer.flags, left, interval,
                       std::min(timer.ticks, manifest_format::kMaxInteger), in_microseconds(now)});
  }
  return records;
}

// In its own PID namespace; 0 if it has ended. It may be another process's.
std::uint32_t own_number_of(Tid thread) {
  if (thread.value == 0) return 0;
  const auto details = proc::ProcFs().details(Pid{thread.value});
  return details ? static_cast<std::uint32_t>(details->ns_pid) : 0;
}

std::vector<FileStateRecord> read_files(Pid pid) {
  std::vector<FileStateRecord> records;
  for (const proc::FileState& file : proc::file_states(pid)) {
    if (records.size() == manifest_format::kMaxFileStates) break;
    std::string settings;
    for (const char c : file.locked_settings)
      settings += fmt::format("{:02x}", static_cast<unsigned char>(c));
    records.push_back({file.descriptor, file.exclusive, file.polling.microseconds,
                       file.polling.budget, file.polling.prefer, std::move(settings), file.signals,
                       own_number_of(file.owner_thread), file.value_high, file.mode, file.uid,
                       file.gid});
  }
  return records;
}

FileStateRecord* record_of(std::vector<FileStateRecord>& records, int descriptor) {
  for (FileStateRecord& record : records)
    if (record.descriptor == descriptor) return &record;
  if (records.size() == manifest_format::kMaxFileStates) return nullptr;
  return &records.emplace_back(FileStateRecord{descriptor});
}

// The ends of one may be in two processes.
void read_terminals(std::vector<ProcessRecord>& processes, std::vector<std::string>& out) {
  std::vector<Pid> tree;
  std::map<Pid, ProcessRecord*> by_number;
  for (ProcessRecord& process : processes) {
    tree.push_back(process.pid);
    by_number.emplace(process.pid, &process);
  }
  const proc::TerminalStates terminals = proc::terminal_states(tree);
  for (const auto& [pid, state] : terminals.states) {
    auto& kernel_state = by_number.at(pid)->kernel_state;
    FileStateRecord* const record =
        kernel_state ? record_of(kernel_state->files, state.descriptor) : nullptr;
    if (record == nullptr) continue;
    record->stopped = state.is_stopped;
    record->stop_typed = state.has_typed_stop;
    record->in_speed = state.input_speed;
    record->out_speed = state.output_speed;
  }
  Lost lost(out);
  for (const auto& [pid, descriptor] : terminals.unknown)
    lost.add(pid, descriptor,
             "that output to the terminal is stopped: whether by ^S or by TCOOFF cannot be told of "
             "one in packet mode (TIOCPKT), or whose other end is full");
}

Result<void> set_file(Pid pid, const Pidfd& process, const FileStateRecord& record) {
  proc::FileState state;
  state.descriptor = record.descriptor;
  state.exclusive = record.exclusive;
  state.polling = {record.poll_microseconds, static_cast<std::uint16_t>(record.poll_budget),
                   record.poll_prefer};
  state.value_high = record.value_high;
  state.mode = record.mode;
  state.uid = record.uid;
  state.gid = record.gid;
  state.is_stopped = record.stopped;
  state.has_typed_stop = record.stop_typed;
  state.input_speed = record.in_speed;
  state.output_speed = record.out_speed;
  const std::string& digits = record.locked_settings;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    unsigned byte = 0;
    std::from_chars(digits.data() + i, digits.data() + i + 2, byte, 16);
    state.locked_settings += static_cast<char>(byte);
  }
  return proc::set_file_state(pid, process, state);
}

Result<void> set_timer(Pid pid, const Pidfd& process, const TimerRecord& record) {
  STASIS_TRY_ASSIGN(auto timer, proc::borrow_timer_fd(process, record.descriptor));
  const nanoseconds interval(record.interval);
  if (record.left == 0) return proc::arm_as_expired(timer, interval, record.ticks);
  // Beyond this nanoseconds have no room.
  constexpr std::uint64_t kMost = std::uint64_t{1} << 52;
  const nanoseconds left = microseconds(std::min(record.left, kMost));
  const nanoseconds then = microseconds(std::min(record.clock_at_dump, kMost));
  const nanoseconds ahead = proc::clock_ahead(pid, record.clock);
  const nanoseconds now = proc::clock_now(record.clock);
  const bool of_the_day = record.clock == CLOCK_REALTIME || record.clock == CLOCK_REALTIME_ALARM;
  // A clock since the machine's start that has gone back is another machine's, or another life's of
  // it, and CRIU could give the program no time namespace: then what was left of the time counts.
  const bool goes_on = of_the_day || now + ahead + std::chrono::seconds(1) >= then;
  const nanoseconds due = goes_on ? then + left - ahead : now + left;
  STASIS_TRY(proc::arm_at(timer, record.flags, std::max(due, nanoseconds(1)), interval));
  if (record.ticks == 0) return {};
  return proc::set_unread(timer, record.ticks, due <= now);
}

// Warnings, one for each kind and process: a program may have a thousand threads.
class Warnings {
 public:
  Warnings(Pid pid, const Warn& warn) : pid_(pid), warn_(warn) {}
  void add(std::string_view what, const Error& why) {
    auto [place, is_new] = seen_.try_emplace(std::string(what));
    if (is_new) place->second.first = why.to_string();
    ++place->second.second;
  }
  ~Warnings() {
    for (const auto& [what, seen] : seen_)
      warn_(fmt::format("process {}: {} is not as at the dump ({} time{}): {}", pid_.value, what,
                        seen.second, seen.second == 1 ? "" : "s", seen.first));
  }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;

 private:
  Pid pid_;
  const Warn& warn_;
  std::map<std::string, std::pair<std::string, int>> seen_;
};

// By thread; the others have the defaults.
using ThreadStates = std::map<Tid, const ThreadStateRecord*>;
ThreadStates states_of(const KernelStateRecord& state) {
  ThreadStates states;
  for (const ThreadStateRecord& thread : state.threads)
    states.emplace(thread.thread, &thread);
  return states;
}
const ThreadStateRecord& state_of(const ThreadStates& states, Tid thread) {
  static const ThreadStateRecord usual;
  const auto found = states.find(thread);
  return found == states.end() ? usual : *found->second;
}

void set_thread(Tid thread, const ThreadStateRecord& wanted, Warnings& warnings) {
  if (!wanted.cpus.empty()) {
    auto done = proc::set_affinity(thread, wanted.cpus);
    const auto now = proc::affinity(thread);
    if (done && now && *now != wanted.cpus) {
      done = fail(ErrorCode::kIo,
                  fmt::format("of the processors {} it has {} here", wanted.cpus, *now), {});
    }
    if (!done) warnings.add("what a thread is bound to", done.error());
  }
  if (const auto now = proc::io_priority(thread); now && *now != wanted.io_priority) {
    if (auto done = proc::set_io_priority(thread, wanted.io_priority); !done)
      warnings.add("the IO priority of a thread", done.error());
  }
  if (const auto now = proc::timer_slack(thread); now && *now != wanted.timer_slack) {
    if (auto done = proc::set_timer_slack(thread, wanted.timer_slack); !done)
      warnings.add("the timer slack of a thread", done.error());
  }
  if (wanted.slice != 0) {
    if (auto done = proc::set_slice(thread, wanted.slice); !done)
      warnings.add("the time slice of a thread", done.error());
  }
  if (wanted.least_load != 0 || wanted.most_load != proc::kMostLoad) {
    if (auto done = proc::set_load(thread, wanted.least_load, wanted.most_load); !done)
      warnings.add("the load that a thread is taken to be (utilisation clamps)", done.error());
  }
}

// A system call for a thread to make.
struct Call {
  std::string what;
  std::uint64_t number = 0;
  std::array<std::uint64_t, 5> arguments{};
  std::vector<std::uint64_t> data;  // whose address is the second argument, if there is any
};

Result<Call> policy_call(const std::string& text) {
  auto policy = proc::parse_memory_policy(text);
  if (!policy)
    return fail(ErrorCode::kNotSupported, fmt::format("'{}' is no policy that is known", text), {});
  while (!policy->nodes.empty() && policy->nodes.back() == 0)
    policy->nodes.pop_back();
  // The kernel looks at one bit less than it is told.
  const std::uint64_t bits = policy->nodes.empty() ? 0 : policy->nodes.size() * 64 + 1;
  return Call{"the NUMA policy of a thread",
              SYS_set_mempolicy,
              {static_cast<std::uint64_t>(policy->mode), 0, bits},
              std::move(policy->nodes)};
}

std::vector<Call> calls_for(Pid pid, Tid thread, const ThreadStateRecord& wanted,
                            Warnings& warnings) {
  std::vector<Call> calls;
  if (const auto now = proc::personality(pid, thread); now && *now != wanted.personality)
    calls.push_back({"the personality of a thread", SYS_personality, {wanted.personality}, {}});
  if (proc::machine_check(pid, thread) != wanted.machine_check) {
    const bool own = !wanted.machine_check.empty();
    static_assert(PR_MCE_KILL_LATE == 0, "and nothing else may stand beside PR_MCE_KILL_CLEAR");
    const std::uint64_t when = wanted.machine_check == "early" ? PR_MCE_KILL_EARLY : 0;
    calls.push_back(
        {"the machine check policy of a thread",
         SYS_prctl,
         {PR_MCE_KILL, static_cast<std::uint64_t>(own ? PR_MCE_KILL_SET : PR_MCE_KILL_CLEAR), when},
         {}});
  }
  if (const auto now = proc::memory_policy(pid, thread); now && *now != wanted.memory_policy) {
    if (auto call = policy_call(wanted.memory_policy))
      calls.push_back(std::move(*call));
    else
      warnings.add("the NUMA policy of a thread", call.error());
  }
  return calls;
}

void make_calls(Pid pid, Tid thread, const std::vector<Call>& calls, Warnings& warnings) {
  for (const Call& call : calls) {
    auto done = call_from_thread(
        pid, thread, call.data,
        [&](const SystemCall& make, std::uint64_t data_address) -> Result<void> {
          auto arguments = call.arguments;
          if (!call.data.empty()) arguments[1] = data_address;
          STASIS_TRY_ASSIGN(auto answer, make(call.number, arguments));
          if (answer >= 0) return {};
          return fail(errno_error("its system call was refused", static_cast<int>(-answer)));
        });
    if (!done) warnings.add(call.what, done.error());
  }
}

}  // namespace

void read_kernel_state(Pid root, std::vector<ProcessRecord>& processes,
                       std::vector<std::string>& lost) {
  const proc::ProcFs procfs;
  GivenProcessors given;
  if (const auto info = procfs.process(root))
    given.of_parent = proc::affinity(Tid{info->parent.value}).value_or(std::string());
  share_out(processes.size(), [&](std::size_t i) {
    ProcessRecord& process = processes[i];
    GivenProcessors its = given;
    its.of_cpuset = proc::cpuset_of(process.pid).value_or(std::string());
    KernelStateRecord state;
    state.core_dump_filter = proc::core_dump_filter(process.pid);
    state.audit_session = proc::audit_session(process.pid);
    // The others' is that of a session outside of the image.
    if (const auto info = procfs.process(process.pid); info && info->session == process.pid.value)
      state.autogroup_nice = proc::autogroup_nice(process.pid);
    for (const Tid thread : procfs.threads(process.pid)) {
      ThreadStateRecord record = read_thread(process.pid, thread, its);
      ThreadStateRecord usual;
      usual.thread = thread;
      if (record != usual && state.threads.size() < manifest_format::kMaxThreads)
        state.threads.push_back(std::move(record));
    }
    state.timers = read_timers(process.pid);
    state.files = read_files(process.pid);
    process.kernel_state = std::move(state);
  });
  read_terminals(processes, lost);
}

std::vector<std::string> set_late(const std::vector<ProcessRecord>& processes) {
  const ThreadStateRecord usual;
  const auto is_late = [&](const ThreadStateRecord& thread) {
    return thread.personality != usual.personality || thread.machine_check != usual.machine_check ||
           thread.memory_policy != usual.memory_policy;
  };
  std::vector<std::string> late;
  for (const ProcessRecord& process : processes) {
    if (process.cuda || !process.kernel_state) continue;
    const auto& threads = process.kernel_state->threads;
    if (std::any_of(threads.begin(), threads.end(), is_late))
      late.push_back(fmt::format(
          "personality, NUMA policy and machine check policy of process {}, which has no CUDA, at "
          "first: it runs for a moment before they are set",
          process.pid.value));
  }
  return late;
}

void set_kernel_state(const std::vector<ProcessRecord>& processes, const Warn& warn) {
  const proc::ProcFs procfs;
  for (const ProcessRecord& process : processes) {
    if (!process.kernel_state) continue;
    auto pidfd = Pidfd::open(process.pid);
    if (!pidfd || !pidfd->alive()) continue;
    Warnings warnings(process.pid, warn);
    const ThreadStates states = states_of(*process.kernel_state);
    for (const Tid thread : procfs.threads(process.pid))
      set_thread(thread, state_of(states, thread), warnings);
    const auto& filter = process.kernel_state->core_dump_filter;
    if (filter && proc::core_dump_filter(process.pid) != filter) {
      if (auto done = proc::set_core_dump_filter(process.pid, *filter); !done)
        warnings.add("what a core dump would hold", done.error());
    }
    const int nice = process.kernel_state->autogroup_nice;
    if (nice != 0) {
      if (auto done = proc::set_autogroup_nice(process.pid, nice); !done)
        warnings.add("the nice value of its session", done.error());
    }
    for (const TimerRecord& timer : process.kernel_state->timers) {
      if (auto done = set_timer(process.pid, *pidfd, timer); !done)
        warnings.add("when a timerfd expires", done.error());
    }
    for (const FileStateRecord& file : process.kernel_state->files) {
      if (auto done = set_file(process.pid, *pidfd, file); !done)
        warnings.add("how an open file is set", done.error());
    }
  }
}

void note_audit_sessions(const std::vector<ProcessRecord>& processes,
                         std::vector<std::string>& lost) {
  std::vector<std::string> changed;
  for (const ProcessRecord& process : processes) {
    if (!process.kernel_state || !process.kernel_state->audit_session) continue;
    const auto now = proc::audit_session(process.pid);
    if (now == process.kernel_state->audit_session) continue;
    changed.push_back(fmt::format("process {}: {}, now {}", process.pid.value,
                                  *process.kernel_state->audit_session,
                                  now ? std::to_string(*now) : "none"));
  }
  if (!changed.empty())
    lost.push_back(fmt::format("the numbers of audit sessions (ausearch --session): {}",
                               listed(changed, ", ")));
}

void set_kernel_state_within(const std::vector<ProcessRecord>& processes, Pid root,
                             bool parent_ends, const UniqueFd& criu_dir, const Warn& warn) {
  const proc::ProcFs procfs;
  for (const ProcessRecord& process : processes) {
    Warnings warnings(process.pid, warn);
    ThreadStates states;
    if (process.kernel_state) states = states_of(*process.kernel_state);
    for (const Tid thread : procfs.threads(process.pid)) {
      std::vector<Call> calls;
      if (process.kernel_state)
        calls = calls_for(process.pid, thread, state_of(states, thread), warnings);
      if (parent_ends && process.pid == root &&
          parent_death_signal(criu_dir, thread).value_or(0) != 0) {
        calls.push_back(
            {"the signal at the parent's end of a thread", SYS_prctl, {PR_SET_PDEATHSIG, 0}, {}});
      }
      make_calls(process.pid, thread, calls, warnings);
    }
  }
}

}  // namespace stasis
