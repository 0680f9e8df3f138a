// One process, and a tree of them, by the driver's own calls.
#include "capi/handles.h"
#include "checkpoint/process_tree.h"
#include "checkpoint/suspend_record.h"
#include "direct/agent_probe.h"
#include "direct/bring_back_alone.h"
#include "direct/left_to_driver.h"
#include "driver/gpu_plan.h"
#include "report/report.h"

namespace stasis::capi {
namespace {

Result<Process> open_process(const stasis_session* session, int pid) {
  if (session == nullptr) return misuse("there is no session");
  if (pid <= 0) return misuse(fmt::format("a process number is positive, and not {}", pid));
  return Process::open(*session->driver, Pid{pid});
}

// The map as the driver demands it, from what was given in part.
Result<std::vector<GpuPair>> complete(Driver& driver, const Process& process,
                                      const stasis_gpu_pair* pairs, std::size_t count) {
  STASIS_TRY_ASSIGN(auto entries, gpu_map(pairs, count));
  if (entries.empty()) return std::vector<GpuPair>();
  STASIS_TRY_ASSIGN(auto gpus, driver.gpus());
  // Of an image from another machine they were others.
  const auto before = recall_suspended(process);
  return plan_gpu_map(driver, entries, before && !before->gpus.empty() ? before->gpus : gpus, gpus);
}

Result<ProcessTree> open_group(const stasis_group& group) {
  if (!group.root.alive()) {
    return fail(
        ErrorCode::kProcessGone,
        fmt::format("process {} ({}) has ended", group.root.pid().value, group.root.info().comm),
        "start the program again, or restore it from an image");
  }
  STASIS_TRY_ASSIGN(auto opened, ProcessTree::open(*group.driver, group.root.pid()));
  if (opened.cuda_count() == 0) {
    return fail(ErrorCode::kNotCuda,
                fmt::format("no process below {} ({}) uses CUDA", group.root.pid().value,
                            group.root.info().comm),
                "wait until it has begun to, or name the process that does: `stasis ps`");
  }
  return opened;
}

// What it found them in is what each call brings them back to.
Result<ProcessTree> open_group_in(const stasis_group& group, CudaState wanted, const char* action) {
  STASIS_TRY_ASSIGN(auto opened, open_group(group));
  for (const TreeMember& member : opened.members()) {
    if (!member.initial || *member.initial == wanted) continue;
    const int pid = member.process.pid().value;
    opened.dismiss();
    return fail(
        member.initial == CudaState::kFailed ? ErrorCode::kFailedState : ErrorCode::kWrongState,
        fmt::format("process {} is {}, and {} needs it {}", pid, cuda_state_name(*member.initial),
                    action, cuda_state_name(wanted)),
        fmt::format("`stasis recover {}` makes all of them run again", group.root.pid().value));
  }
  return opened;
}

Result<void> finish(ProcessTree& group, Result<void> done) {
  if (done) {
    group.dismiss();
    return done;
  }
  auto back = group.roll_back();
  if (back) return done;
  back.error().message = done.error().message + "; " + back.error().message;
  return back;
}

}  // namespace
}  // namespace stasis::capi

using namespace stasis;  // NOLINT(google-build-using-namespace): what follows is C's

const char* stasis_state_name(stasis_state state) {
  if (state < STASIS_RUNNING || state > STASIS_FAILED) return nullptr;
  return cuda_state_name(static_cast<CudaState>(state)).data();
}

stasis_error* stasis_process_open(stasis_session* session, int pid, stasis_process** process) {
  return capi::guarded([&]() -> Result<void> {
    if (process == nullptr) return capi::misuse("no pointer for the process");
    STASIS_TRY_ASSIGN(auto opened, capi::open_process(session, pid));
    *process = new stasis_process{session->driver, std::move(opened)};
    return {};
  });
}
void stasis_process_close(stasis_process* process) { delete process; }
int stasis_process_pid(const stasis_process* process) {
  return process == nullptr ? 0 : process->process.pid().value;
}

stasis_error* stasis_process_state(stasis_process* process, stasis_state* state) {
  return capi::guarded([&]() -> Result<void> {
    if (process == nullptr || state == nullptr) return capi::misuse("no process, or no pointer");
    STASIS_TRY_ASSIGN(auto now, process->process.state());
    *state = static_cast<stasis_state>(now);
    return {};
  });
}

stasis_error* stasis_process_restore_thread_id(stasis_process* process, int* thread_id) {
  return capi::guarded([&]() -> Result<void> {
    if (process == nullptr || thread_id == nullptr) {
      return capi::misuse("no process, or no pointer");
    }
    STASIS_TRY_ASSIGN(auto tid, process->process.restore_thread_id());
    *thread_id = tid.value;
    return {};
  });
}

stasis_error* stasis_process_lock(stasis_process* process, uint32_t timeout_ms,
                                  const stasis_call* call) {
  return capi::guarded([&]() -> Result<void> {
    if (process == nullptr) return capi::misuse("there is no process");
    STASIS_TRY_ASSIGN(auto given, capi::Call::make(call));
    return process->process.lock_unless(capi::ms(timeout_ms), given->interrupt());
  });
}

stasis_error* stasis_process_checkpoint(stasis_process* process) {
  return capi::guarded([&]() -> Result<void> {
    if (process == nullptr) return capi::misuse("there is no process");
    STASIS_TRY(refuse_loss_by_driver(process->process));
    direct::note_hold(process->process.pid(), process->process.pidfd());
    return process->process.checkpoint();
  });
}

stasis_error* stasis_process_restore(stasis_process* process, const stasis_gpu_pair* pairs,
                                     size_t count) {
  return capi::guarded([&]() -> Result<void> {
    if (process == nullptr) return capi::misuse("there is no process");
    STASIS_TRY_ASSIGN(auto map, capi::complete(*process->driver, process->process, pairs, count));
    return process->process.restore(map);
  });
}

stasis_error* stasis_process_unlock(stasis_process* process) {
  return capi::guarded([&]() -> Result<void> {
    if (process == nullptr) return capi::misuse("there is no process");
    auto done = process->process.unlock();
    // What `stasis suspend` has moved past the driver comes back too, so that the program goes on.
    return done ? bring_back_alone(
                      process->process, [process] { return memory_of_all_gpus(*process->driver); },
                      nullptr)
                : done;
  });
}

stasis_error* stasis_process_bring_to(stasis_process* process, stasis_state wanted,
                                      uint32_t timeout_ms) {
  return capi::guarded([&]() -> Result<void> {
    if (process == nullptr) return capi::misuse("there is no process");
    if (wanted < STASIS_RUNNING || wanted > STASIS_CHECKPOINTED) {
      return capi::misuse("a process can be brought to running, locked or checkpointed");
    }
    if (wanted == STASIS_CHECKPOINTED) STASIS_TRY(refuse_loss_by_driver(process->process));
    return process->process.bring_to(static_cast<CudaState>(wanted), capi::ms(timeout_ms));
  });
}

stasis_error* stasis_group_open(stasis_session* session, int root_pid, stasis_group** group) {
  return capi::guarded([&]() -> Result<void> {
    if (group == nullptr) return capi::misuse("no pointer for the group");
    STASIS_TRY_ASSIGN(auto root, capi::open_process(session, root_pid));
    *group = new stasis_group{session->driver, std::move(root)};
    return {};
  });
}
void stasis_group_close(stasis_group* group) { delete group; }

stasis_error* stasis_group_members(stasis_group* group, char** json) {
  return capi::guarded([&]() -> Result<void> {
    if (group == nullptr) return capi::misuse("there is no group");
    STASIS_TRY_ASSIGN(auto opened, capi::open_group(*group));
    opened.dismiss();
    nlohmann::json out = nlohmann::json::array();
    for (const TreeMember& member : opened.members()) {
      const proc::ProcessInfo& info = member.process.info();
      nlohmann::json one = {
          {"pid", info.pid.value}, {"command", info.comm}, {"cuda", member.initial.has_value()}};
      if (member.initial) one["state"] = std::string(cuda_state_name(*member.initial));
      out.push_back(std::move(one));
    }
    return capi::give_text(json_text(out), json);
  });
}

stasis_error* stasis_group_lock(stasis_group* group, uint32_t timeout_ms, const stasis_call* call) {
  return capi::guarded([&]() -> Result<void> {
    if (group == nullptr) return capi::misuse("there is no group");
    STASIS_TRY_ASSIGN(auto given, capi::Call::make(call));
    STASIS_TRY_ASSIGN(auto opened, capi::open_group_in(*group, CudaState::kRunning, "lock"));
    auto done = opened.lock(capi::ms(timeout_ms), given->interrupt());
    if (done) done = given->interrupt().check();
    return capi::finish(opened, std::move(done));
  });
}

stasis_error* stasis_group_checkpoint(stasis_group* group, const stasis_call* call) {
  return capi::guarded([&]() -> Result<void> {
    if (group == nullptr) return capi::misuse("there is no group");
    STASIS_TRY_ASSIGN(auto given, capi::Call::make(call));
    STASIS_TRY_ASSIGN(auto opened, capi::open_group_in(*group, CudaState::kLocked, "checkpoint"));
    for (const TreeMember& member : opened.members()) {
      if (!member.initial) continue;
      if (auto may = refuse_loss_by_driver(member.process); !may)
        return capi::finish(opened, std::move(may));
    }
    for (const TreeMember& member : opened.members())
      if (member.initial) direct::note_hold(member.process.pid(), member.process.pidfd());
    return capi::finish(opened, opened.checkpoint(*given, given->interrupt()));
  });
}

stasis_error* stasis_group_restore(stasis_group* group, const stasis_gpu_pair* pairs, size_t count,
                                   const stasis_call* call) {
  return capi::guarded([&]() -> Result<void> {
    if (group == nullptr) return capi::misuse("there is no group");
    STASIS_TRY_ASSIGN(auto given, capi::Call::make(call));
    STASIS_TRY_ASSIGN(auto opened,
                      capi::open_group_in(*group, CudaState::kCheckpointed, "restore"));
    auto map = capi::complete(*group->driver, opened.members().front().process, pairs, count);
    if (!map) {
      opened.dismiss();
      return fail(std::move(map.error()));
    }
    return capi::finish(opened, opened.restore(*map, *given));
  });
}

stasis_error* stasis_group_unlock(stasis_group* group) {
  return capi::guarded([&]() -> Result<void> {
    if (group == nullptr) return capi::misuse("there is no group");
    STASIS_TRY_ASSIGN(auto opened, capi::open_group_in(*group, CudaState::kLocked, "unlock"));
    auto done = opened.unlock();
    for (const TreeMember& member : opened.members())
      if (done && member.initial)
        done = bring_back_alone(
            member.process, [group] { return memory_of_all_gpus(*group->driver); }, nullptr);
    return capi::finish(opened, std::move(done));
  });
}
