// SPDX-License-Identifier: GPL-2.0-or-later
#include "restore_session.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>

#include <fmt/format.h>

#include "base/fd.h"
#include "checkpoint/gpu_room.h"
#include "criu/criu_sockets.h"
#include "criu_api.h"
#include "direct/held_neighbours.h"
#include "direct/neighbours.h"
#include "direct/unrestorable_memory.h"
#include "driver/gpu_plan.h"
#include "held_tree.h"
#include "proc/tcp_ports.h"

namespace stasis::plugin {
namespace {

constexpr std::size_t kMapLimit = 1 << 16;

// A map, or with a slash in it the path of a file that holds one.
Result<std::string> map_or_file(std::string text) {
  if (text.find('/') == std::string::npos) return text;
  return read_file(AT_FDCWD, text, kMapLimit);
}

// What the user asks for: CRIU's option, else the environment, else a file in the image's
// directory.
Result<std::vector<GpuMapEntry>> asked_map() {
  constexpr const char* kOption = "device-map";
  constexpr const char* kVariable = "STASIS_DEVICE_MAP";
  constexpr const char* kMapFile = "cuda-device-map";
  STASIS_TRY_ASSIGN(auto option, plugin_option(kOption));
  const char* variable = std::getenv(kVariable);
  Result<std::string> text;
  std::string source;
  if (option) {
    source = fmt::format("{}.{}", kName, kOption);
    text = map_or_file(std::move(*option));
  } else if (variable != nullptr && *variable != '\0') {
    source = kVariable;
    text = map_or_file(variable);
  } else if (const auto directory = image_directory()) {
    source = kMapFile;
    STASIS_TRY_ASSIGN(auto read, read_image_file(*directory, kMapFile, kMapLimit));
    text = std::move(read).value_or(std::string());
  }
  if (!text) return fail(std::move(text.error()).within("while reading " + source));
  // A file may have one entry a line, and end its lines as it likes.
  std::string map;
  for (const char c : *text) {
    const bool ends_entry = c == '\n' || c == ',';
    if (ends_entry && (map.empty() || map.back() == ',')) continue;
    if (ends_entry) map += ',';
    if (!ends_entry && c != ' ' && c != '\t' && c != '\r') map += c;
  }
  if (map.ends_with(',')) map.pop_back();
  if (map.empty()) return std::vector<GpuMapEntry>();
  auto entries = parse_gpu_map(map);
  if (!entries) return fail(std::move(entries.error()).within("while reading " + source));
  return entries;
}

// A connection that was closed holds its address and port for a minute more, and the job could not
// listen there. Of the image's sockets, those with `ports` are of criu's network namespace.
void free_ports(const std::vector<std::uint16_t>& ports) {
  const auto directory = image_directory();
  const UniqueFd image(directory ? ::fcntl(*directory, F_DUPFD_CLOEXEC, 3) : -1);
  if (!image.valid() || ports.empty()) return;
  std::vector<proc::BoundSocket> sockets = bound_sockets(image);
  std::erase_if(sockets, [&](const proc::BoundSocket& one) {
    return !one.is_tcp || std::find(ports.begin(), ports.end(), one.port) == ports.end() ||
           !proc::is_taken(one);
  });
  const int left = proc::count_time_waits(sockets, true);
  if (left == 0) return;
  log_warning(
      fmt::format("{} closed connection(s) still hold ports on which the job listens: if CRIU says "
                  "`Address already in use`, restore it a minute later",
                  left));
}

// What the agents gave up before the dump, because the driver could not have restored it.
Result<void> take_unrestorable_back(Driver& driver, const ProcessTree& tree) {
  const Interrupt never;
  NoProgress quiet;
  UnrestorableMemory unrestorable;
  STASIS_TRY(unrestorable.find({driver, never, quiet, {}}, tree));
  return unrestorable.take_back();
}

// Before the driver makes their contexts again.
Result<void> check_neighbours(Driver& driver, const ProcessTree& tree,
                              const std::set<GpuUuid>& gpus) {
  const Interrupt never;
  NoProgress quiet;
  const Environment env{driver, never, quiet, log_warning};
  auto alone = refuse_beside_ranks(env, tree.infos(), gpus);
  if (!alone) {
    alone.error().remedy =
        "suspend that job first, or let this one come back to other GPUs (STASIS_DEVICE_MAP, "
        "`--plugin-option cuda_plugin.device-map=...`)";
    return alone;
  }
  tell_of_neighbours_to_come(env, tree.infos(), gpus);
  return {};
}

// The worker may have to be left behind, so what it uses is its own.
struct Work {
  std::shared_ptr<Driver> driver;
  Pid root;
  std::vector<GpuPair> pairs;
  std::set<GpuUuid> targets;
  std::vector<std::pair<Pid, CudaState>> wanted;
  std::vector<Pid> all;
  std::vector<Pid> cuda;
  std::optional<Journal> journal;
  std::atomic<bool> entered = false;  // from here on the journal is not the worker's
  Result<void> result;

  CudaState wanted_of(Pid pid) const {
    for (const auto& [known, state] : wanted) {
      if (known == pid) return state;
    }
    return CudaState::kRunning;
  }
};

// Leaves in the tree what is to be restored, each with the state that it is to have.
void choose_members(Work& work, ProcessTree& tree) {
  for (TreeMember& member : tree.members()) {
    work.all.push_back(member.process.pid());
    if (!member.initial) continue;
    work.cuda.push_back(member.process.pid());
    member.initial = work.wanted_of(member.process.pid());
  }
  std::erase_if(tree.members(),
                [](const TreeMember& m) { return m.initial == CudaState::kCheckpointed; });
}

void enter_into_journal(Work& work, const ProcessTree& tree) {
  auto begun =
      Journal::begin({Operation::kCriuRestore, work.root, {}, {}, journal_targets(tree.members())});
  if (begun) {
    work.journal.emplace(std::move(*begun));
    work.entered = true;
  } else {
    log_warning("if criu is killed now, `stasis recover --all` will not know of it: " +
                begun.error().message);
  }
}

// What this takes is not to be what another operation has found.
Result<void> restore_in_held_room(const Work& work, ProcessTree& tree) {
  NoProgress quiet;
  const Interrupt never;
  const auto room = GpuRoom::hold(work.targets, {never, {}, std::chrono::seconds(20)});
  const auto neighbours = HeldNeighbours::hold_if_possible(
      {*work.driver, never, quiet, log_warning}, tree.infos(), work.targets, kNeighbourTime);
  return tree.restore(work.pairs, quiet);
}

Result<void> bring_to_wanted_states(ProcessTree& tree) {
  for (TreeMember& member : tree.members()) {
    if (!member.initial || !member.process.alive()) continue;
    STASIS_TRY(member.process.bring_to(*member.initial));
    STASIS_TRY_ASSIGN(auto now, member.process.state());
    if (now != *member.initial) {
      return fail(ErrorCode::kWrongState,
                  fmt::format("process {} is {} and should be {}", member.process.pid().value,
                              cuda_state_name(now), cuda_state_name(*member.initial)),
                  "see `dmesg` for messages of the NVIDIA driver");
    }
  }
  return {};
}

Result<void> restore_tree(Work& work) {
  STASIS_TRY_ASSIGN(auto tree, ProcessTree::open(*work.driver, work.root));
  // Nothing is undone: if it cannot be done, the processes go.
  tree.dismiss();
  choose_members(work, tree);
  if (tree.members().empty() || tree.cuda_count() == 0) return {};
  STASIS_TRY(check_neighbours(*work.driver, tree, work.targets));
  enter_into_journal(work, tree);
  STASIS_TRY(restore_in_held_room(work, tree));
  STASIS_TRY(bring_to_wanted_states(tree));
  return take_unrestorable_back(*work.driver, tree);
}

}  // namespace

Result<std::unique_ptr<RestoreSession>> RestoreSession::begin(std::shared_ptr<Driver> driver,
                                                              std::optional<GpuRecord> record) {
  std::unique_ptr<RestoreSession> session(new RestoreSession(std::move(driver), std::move(record)));
  STASIS_TRY(session->plan());
  if (session->record_) free_ports(session->record_->tcp_ports);
  return session;
}

Result<void> RestoreSession::plan() {
  STASIS_TRY_ASSIGN(auto entries, asked_map());
  auto here = driver_->gpus();
  if (!here) {
    // Where NVML is missing (in some containers) only what cannot be done without it is refused.
    if (!entries.empty() || here.error().code != ErrorCode::kDriverMissing) {
      return fail(std::move(here.error()));
    }
    log_warning(
        "the GPUs here are not known, so it is not checked whether the image can run on "
        "them: " +
        here.error().message);
    return {};
  }
  if (here->empty()) {
    return fail(ErrorCode::kGpuMismatch, "the image holds GPU memory, and there is no GPU here",
                "restore it on a machine with a GPU; in a container, start it with the NVIDIA "
                "runtime");
  }
  if (!record_) {
    if (entries.empty()) return {};
    STASIS_TRY_ASSIGN(auto pairs, plan_gpu_map(*driver_, entries, *here, *here));
    pairs_ = std::move(pairs);
    return {};
  }
  if (record_->simulated != driver_->info().simulated) {
    return fail(ErrorCode::kGpuMismatch,
                fmt::format("the image was made on a {} GPU and the driver here is {}",
                            record_->simulated ? "simulated" : "real",
                            driver_->info().simulated ? "the simulated one" : "a real one"),
                "restore it with the driver it was made with (STASIS_LIBCUDA)");
  }
  std::vector<GpuUse> needed;
  for (const ProcessRecord& process : record_->processes) {
    if (process.initial == CudaState::kCheckpointed) continue;
    needed.insert(needed.end(), process.uses.begin(), process.uses.end());
  }
  const bool all_here = std::all_of(needed.begin(), needed.end(), [&](const GpuUse& use) {
    return std::any_of(here->begin(), here->end(),
                       [&](const Gpu& gpu) { return gpu.uuid == use.gpu; });
  });
  if (!entries.empty() || (!all_here && !record_->gpus.empty())) {
    STASIS_TRY_ASSIGN(auto pairs, plan_gpu_map(*driver_, entries, record_->gpus, *here));
    pairs_ = std::move(pairs);
  }
  targets_ = targets_of(needed, pairs_);
  // What is not known may be on any of them.
  const bool all_known = std::all_of(
      record_->processes.begin(), record_->processes.end(), [](const ProcessRecord& process) {
        return process.initial == CudaState::kCheckpointed || !process.uses.empty();
      });
  for (const Gpu& gpu : *here)
    if (!all_known) targets_.insert(gpu.uuid);
  return check_gpu_memory(needed, pairs_, *here);
}

// What was suspended before the dump stays so, and what was locked stays locked.
CudaState RestoreSession::wanted(Pid pid) const {
  if (!record_) return CudaState::kRunning;
  const auto details = proc::ProcFs().details(pid);
  if (!details) return CudaState::kRunning;
  for (const ProcessRecord& process : record_->processes) {
    if (process.ns_pid == details->ns_pid) return process.initial;
  }
  return CudaState::kRunning;
}

int RestoreSession::resume(Pid pid) {
  if (failed_) return -1;
  if (std::find(known_.begin(), known_.end(), pid) == known_.end()) {
    auto done = resume_tree(pid);
    if (!done) {
      failed_ = true;
      log_error("the restore fails, and its processes are killed", done.error());
      kill_tree(pid);
    }
    // All are back or dead: there is nothing to recover.
    if (journal_) journal_->finish();
    journal_.reset();
    if (!done) return -1;
  }
  return std::find(cuda_.begin(), cuda_.end(), pid) != cuda_.end() ? 0 : -ENOTSUP;
}

Result<void> RestoreSession::resume_tree(Pid root) {
  known_.push_back(root);
  STASIS_TRY_ASSIGN(auto awake, wake_tree(*driver_, root, Acting::kDriverAndAgents));
  const auto work = std::make_shared<Work>();
  work->driver = driver_;
  work->root = root;
  work->pairs = pairs_;
  work->targets = targets_;
  if (auto tree = proc::ProcFs().tree(root)) {
    for (const proc::ProcessInfo& info : *tree)
      work->wanted.emplace_back(info.pid, wanted(info.pid));
  }
  const auto limit = timeout(bytes_in_host_memory(root));
  const bool in_time = proc::run_beside(
      awake, [work] { work->result = restore_tree(*work); }, limit);
  auto asleep = put_to_sleep(awake);
  if (work->entered) journal_ = std::move(work->journal);
  if (!in_time) {
    return fail(ErrorCode::kNoAnswer,
                fmt::format("the driver has not answered for {} s",
                            std::chrono::duration_cast<std::chrono::seconds>(limit).count()),
                "see `dmesg` for messages of the NVIDIA driver; the image is whole, and can be "
                "restored again");
  }
  known_.insert(known_.end(), work->all.begin(), work->all.end());
  cuda_.insert(cuda_.end(), work->cuda.begin(), work->cuda.end());
  if (!work->result) return std::move(work->result);
  if (!work->cuda.empty()) log_info(fmt::format("{} process(es) restored", work->cuda.size()));
  return asleep;
}

}  // namespace stasis::plugin
