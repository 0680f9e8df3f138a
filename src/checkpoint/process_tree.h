// A process tree that is suspended and resumed as one.
//
// Its CUDA processes are locked at the same time, in slices, because locking one after the other
// deadlocks when they wait for each other on the GPU (a collective); only when all are locked is
// any of them checkpointed. The destructor rolls back, unless dismiss() was called: it brings every
// process back to the state it was in, and says nothing. roll_back() does the same and says what
// it could not do.
//
// Moves, never copies. One thread at a time; it uses threads of its own, one per process, and has
// joined them when a call returns.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/interrupt.h"
#include "base/progress.h"
#include "base/units.h"
#include "checkpoint/process.h"
#include "checkpoint/quiesce_round.h"
#include "proc/address_space.h"

namespace stasis {

struct TreeMember {
  Process process;
  // What it was in when we found it; nothing for a process without CUDA.
  std::optional<CudaState> initial;
};

class ProcessTree {
 public:
  // Finds the tree below `root` and asks the state of every process in it. Left out are zombies,
  // the helpers of the calling process, and itself where it is below the root. The errors are those
  // of Process::open for the root, kUsage if that is the calling process and uses CUDA, and "could
  // not ask" for any of them: it is never taken for "does not use CUDA".
  static Result<ProcessTree> open(Driver& driver, Pid root, proc::ProcFs procfs = proc::ProcFs());

  ProcessTree(ProcessTree&& other) noexcept = default;
  ProcessTree(const ProcessTree&) = delete;
  ProcessTree& operator=(const ProcessTree&) = delete;
  ProcessTree& operator=(ProcessTree&&) = delete;
  ~ProcessTree();

  // The root first, parents before children.
  const std::vector<TreeMember>& members() const { return members_; }
  std::vector<TreeMember>& members() { return members_; }
  Pid root() const { return members_.front().process.pid(); }
  std::size_t cuda_count() const;
  std::vector<proc::ProcessInfo> infos() const;

  // Another process, such as CRIU by ptrace, keeps the threads of all processes still while their
  // GPU is away: checkpoint() need not do it. bring_to() of a member still would.
  void leave_threads_alone() { parks_ = false; }

  // Our agents in these processes will be asked for something that takes no driver while their GPU
  // is away (Process::park_threads()).
  void let_agents_work(std::set<Pid> pids) { agents_at_work_ = std::move(pids); }

  // checkpoint() drops the zeros that the driver saves (zero_pages.h), so that CRIU does not write
  // them. Not where another process keeps the threads still.
  void drop_zeros() { drops_zeros_ = true; }
  // How many bytes of them it has dropped until now.
  std::uint64_t dropped_zero_bytes() const { return dropped_zero_bytes_; }

  // Called whenever processes were added to the tree, before anything is done to them; a failure
  // stops the call in progress. The journal is written here.
  std::function<Result<void>(const std::vector<TreeMember>&)> on_members_changed;

  // After checkpoint(): parks also the agents' threads, so that no thread of a process runs but the
  // driver's own. On an error one may run; all others stay parked.
  Result<void> park_agents();

  // Quiesces every CUDA process that runs: those of `gates` by what is given for them, the others
  // by the lock. From then on lock() lets no process go on that is locked already: what it would go
  // on to may wait for a process whose gate is closed. `timeout` zero: no deadline. kTimeout: the
  // tree holds no process any more. `standing` is told when they begin to stand still, and when
  // they run again.
  using Gates = std::map<Pid, Rank*>;
  Result<void> hold_back(const Gates& gates, std::chrono::milliseconds timeout,
                         const Interrupt& interrupt, const std::function<void(bool)>& standing);
  // Those gates are open again.
  void forget_gates() { behind_gates_ = false; }

  // Locks every CUDA process that runs. Those that another tool had locked or checkpointed stay
  // so. Then looks for processes that have appeared with CUDA or begun to use it meanwhile, until
  // there are none. `timeout` zero: no deadline. kTimeout: no process is locked by the tree any
  // more. kProcessGone if the root has ended; other processes may come and go.
  Result<void> lock(std::chrono::milliseconds timeout, const Interrupt& interrupt);
  // How often processes were asked until all were locked; 1 is the least.
  int lock_tries() const { return lock_tries_; }
  // Looks for processes that have appeared or begun to use CUDA since, and forgets those without
  // that have ended. True if there are more that use CUDA: call lock() and checkpoint() once more;
  // they leave alone those that are there already.
  Result<bool> probe_again() { return refresh(root()); }
  // Keeps the threads of every locked CUDA process still (Process::park_threads()), in parallel, as
  // checkpoint() does too. In vain where another process does. kBusy of both, with Retry::kSame:
  // one has become another program (exec) since it was found, so that no lock has reached it.
  Result<void> park_threads();
  // Called when all are kept still: remembers which programs they are.
  Result<void> note_programs();
  // They still are those that note_programs() has seen. kBusy, with Retry::kSame.
  Result<void> verify_programs() const;
  // Checkpoints every locked CUDA process, in parallel. Before the first, compares the GPU memory
  // in use with the free memory of the host and with what the processes' memory cgroups leave them
  // (kOutOfHostMemory with the figures). `progress` gets the bytes moved. On an error some may be
  // checkpointed: roll back.
  Result<void> checkpoint(Progress& progress, const Interrupt& interrupt);
  // That comparison alone; checkpoint() makes it. Also notes what is used on the GPUs. `elsewhere`:
  // bytes that will not go into the memory of this host; `at_least`: that will, whatever the driver
  // says.
  Result<void> check_host_memory(const std::map<Pid, std::uint64_t>& elsewhere = {},
                                 const std::map<Pid, std::uint64_t>& at_least = {});
  // Restores every checkpointed CUDA process, in parallel, whatever it was initially.
  Result<void> restore(std::span<const GpuPair> pairs, Progress& progress);
  // Unlocks every locked CUDA process. One that ends meanwhile is no failure.
  Result<void> unlock();

  // Brings each process back to its initial state, all of them even when one fails, and verifies
  // by asking. Processes that have gone are no failure. kNotRolledBack names each that is not back.
  Result<void> roll_back();
  // What was done is meant to stay.
  void dismiss() { armed_ = false; }
  void arm() { armed_ = true; }

  // What all members use now, as NVML says it. Where it counts what they share for each of them,
  // their sum is more than a GPU has in use, and each counts for its part of that. The driver's
  // errors.
  Result<std::map<Pid, std::vector<GpuUse>>> members_use() const;
  // What is used where, by process, as far as NVML knows; taken before the checkpoint.
  const std::map<Pid, std::vector<GpuUse>>& gpu_use() const { return gpu_use_; }
  // Empty where nothing is known of it.
  std::vector<GpuUse> gpu_use_of(Pid pid) const;
  std::uint64_t gpu_bytes() const;

 private:
  // The most that was seen counts: by the direct path a process has little left at its checkpoint.
  void note_use(Pid pid, const std::vector<GpuUse>& use);
  ProcessTree(Driver& driver, proc::ProcFs procfs) : driver_(&driver), procfs_(std::move(procfs)) {}
  // Adds what is new in the tree. True if a process with CUDA was added or one has begun to use it.
  Result<bool> refresh(Pid root);
  struct Tries {
    const Gates& gates;
    std::function<void(bool)> standing;
    std::chrono::milliseconds slice{};  // the next; zero: whatever is best to begin with
    Clock::time_point start = Clock::now();
    int count = 0;
  };
  // Rounds of quiesce_round.h until all that run are quiesced.
  Result<void> quiesce_all(Tries& tries, std::chrono::milliseconds timeout,
                           const Interrupt& interrupt);
  // Whether it is a member without CUDA that uses it by now.
  Result<bool> begins_to_use_cuda(TreeMember& member, proc::FrozenCgroups& cgroups);
  // A process that is new in the tree below `root`. Nothing if it has ended.
  Result<std::optional<TreeMember>> open_member(const proc::ProcessInfo& info, Pid root,
                                                proc::FrozenCgroups& cgroups);
  // Whether a process that ends, or becomes another program, is a failure.
  enum class IfGone { kFail, kPass };
  Result<std::vector<Process*>> members_in(CudaState wanted, IfGone if_gone);
  // Runs `act` for each member in `wanted` state, in parallel; the first error by order.
  Result<void> in_parallel(CudaState wanted, const std::function<Result<void>(Process&)>& act,
                           std::string_view phase, Progress& progress,
                           IfGone if_gone = IfGone::kFail);

  Driver* driver_;
  proc::ProcFs procfs_;
  std::vector<TreeMember> members_;
  std::map<Pid, proc::AddressSpace> programs_;
  std::map<Pid, std::vector<GpuUse>> gpu_use_;
  int lock_tries_ = 0;
  bool armed_ = true;
  bool parks_ = true;
  std::set<Pid> agents_at_work_;
  bool behind_gates_ = false;
  bool drops_zeros_ = false;
  std::uint64_t dropped_zero_bytes_ = 0;
};

}  // namespace stasis
