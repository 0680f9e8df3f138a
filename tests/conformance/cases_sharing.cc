// Cases about several GPUs and about memory shared between processes.
#include <algorithm>
#include <cstring>
#include <string>

#include "api.h"
#include "checkpoint_calls.h"
#include "report.h"
#include "target.h"

namespace stasis::conformance {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): CUDA's result codes, by their names

CUresult restore_with(pid_t pid, std::vector<CUcheckpointGpuPair> pairs) {
  CUcheckpointRestoreArgs args{};
  args.gpuPairs = pairs.empty() ? nullptr : pairs.data();
  args.gpuPairsCount = static_cast<unsigned>(pairs.size());
  return api().cuCheckpointProcessRestore(pid, &args);
}

std::vector<CUuuid> uuids() {
  int count = 0;
  api().cuInit(0);
  api().cuDeviceGetCount(&count);
  std::vector<CUuuid> out(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i)
    api().cuDeviceGetUuid_v2(&out[static_cast<std::size_t>(i)], i);
  return out;
}

void map_one_gpu(Report& r) {
  const auto gpus = uuids();
  if (gpus.size() != 1) return r.skip("only where there is exactly one GPU");
  Target t;
  t.ask("init");
  t.ask("alloc device");
  lock(t.pid());
  r.note("checkpoint", api().cuCheckpointProcessCheckpoint(t.pid(), nullptr));
  CUuuid unknown = gpus[0];
  unknown.bytes[0] = static_cast<char>(unknown.bytes[0] ^ 1);
  r.note("unknown_new", restore_with(t.pid(), {{gpus[0], unknown}}));
  r.note("unknown_old", restore_with(t.pid(), {{unknown, gpus[0]}}));
  r.note("twice", restore_with(t.pid(), {{gpus[0], gpus[0]}, {gpus[0], gpus[0]}}));
  r.note("state", state(t.pid()));
  r.note("identity", restore_with(t.pid(), {{gpus[0], gpus[0]}}));
  r.note("state_restored", state(t.pid()));
  r.note("unlock", api().cuCheckpointProcessUnlock(t.pid(), nullptr));
  r.note("wrong", t.ask("check"));
}

void map_gpus(Report& r) {
  const auto gpus = uuids();
  if (gpus.size() < 2) return r.skip("needs two GPUs");
  Target t;
  t.ask("init");
  t.ask("alloc device");
  auto swapped = [&] {
    std::vector<CUcheckpointGpuPair> pairs;
    for (std::size_t i = 0; i < gpus.size(); ++i) {
      pairs.push_back({gpus[i], gpus[i < 2 ? 1 - i : i]});
    }
    return pairs;
  };
  lock(t.pid());
  r.note("checkpoint", api().cuCheckpointProcessCheckpoint(t.pid(), nullptr));
  r.note("partial", restore_with(t.pid(), {{gpus[0], gpus[1]}}));
  r.note("state_partial", state(t.pid()));
  auto both = swapped();
  both[1].newUuid = gpus[1];
  r.note("not_injective", restore_with(t.pid(), both));
  both = swapped();
  both[1].oldUuid = gpus[0];
  r.note("old_twice", restore_with(t.pid(), both));
  r.note("state_refused", state(t.pid()));
  r.note("plain", restore_with(t.pid(), {}));
  r.note("unlock", api().cuCheckpointProcessUnlock(t.pid(), nullptr));
  r.note("wrong_plain", t.ask("check"));
  lock(t.pid());
  api().cuCheckpointProcessCheckpoint(t.pid(), nullptr);
  r.note("swap", restore_with(t.pid(), swapped()));
  r.note("unlock_swap", api().cuCheckpointProcessUnlock(t.pid(), nullptr));
  r.note("wrong_swap", t.ask("check"));
  r.note("add_swap", t.ask("add"));
  r.note("wrong_add", t.ask("check"));
}

void map_hidden_gpus(Report& r) {
  const auto gpus = uuids();
  if (gpus.size() < 2) return r.skip("needs two GPUs");
  Target t("CUDA_VISIBLE_DEVICES=0");
  t.ask("init");
  t.ask("alloc device");
  lock(t.pid());
  r.note("checkpoint", api().cuCheckpointProcessCheckpoint(t.pid(), nullptr));
  r.note("only_visible", restore_with(t.pid(), {{gpus[0], gpus[0]}}));
  r.note("state", state(t.pid()));
  std::vector<CUcheckpointGpuPair> all;
  for (const auto& gpu : gpus)
    all.push_back({gpu, gpu});
  std::swap(all[0].newUuid, all[1].newUuid);
  r.note("all", restore_with(t.pid(), all));
  r.note("unlock", api().cuCheckpointProcessUnlock(t.pid(), nullptr));
  r.note("wrong", t.ask("check"));
}

void ipc_exported(Report& r) {
  Target t;
  t.ask("init");
  t.ask("alloc device");
  r.yes_no("exported", t.ask_text("ipcget").size() == 128);
  r.note("lock", lock(t.pid()));
  r.note("checkpoint", api().cuCheckpointProcessCheckpoint(t.pid(), nullptr));
  r.note("restore", restore_with(t.pid(), {}));
  r.note("unlock", api().cuCheckpointProcessUnlock(t.pid(), nullptr));
  r.note("wrong", t.ask("check"));
}

void ipc_closed(Report& r) {
  Target owner;
  Target user;
  owner.ask("init");
  owner.ask("alloc device");
  user.ask("init");
  user.ask("alloc device");
  r.note("open", user.ask("ipcopen " + owner.ask_text("ipcget")));
  r.note("close", user.ask("ipcclose"));
  for (auto* t : {&owner, &user}) {
    const std::string who = t == &owner ? "owner_" : "user_";
    r.note(who + "lock", lock(t->pid()));
    r.note(who + "checkpoint", api().cuCheckpointProcessCheckpoint(t->pid(), nullptr));
    r.note(who + "restore", restore_with(t->pid(), {}));
    r.note(who + "unlock", api().cuCheckpointProcessUnlock(t->pid(), nullptr));
    r.note(who + "wrong", t->ask("check"));
  }
}

// On driver 580 this is how a job is lost: nothing refuses before it is too late.
void ipc_open(Report& r) {
  Target owner;
  Target user;
  owner.ask("init");
  owner.ask("alloc device");
  user.ask("init");
  user.ask("alloc device");
  r.note("open", user.ask("ipcopen " + owner.ask_text("ipcget")));
  r.note("owner_lock", lock(owner.pid()));
  r.note("user_lock", lock(user.pid()));
  r.note("owner_checkpoint", api().cuCheckpointProcessCheckpoint(owner.pid(), nullptr));
  r.note("user_checkpoint", api().cuCheckpointProcessCheckpoint(user.pid(), nullptr));
  r.note("owner_state", state(owner.pid()));
  r.note("user_state", state(user.pid()));
  r.note("owner_restore", restore_with(owner.pid(), {}));
  r.note("user_restore", restore_with(user.pid(), {}));
  r.note("owner_state_after", state(owner.pid()));
  r.note("user_state_after", state(user.pid()));
}

void vmm_imported(Report& r, bool closed) {
  Target owner;
  Target user;
  owner.ask("init");
  r.note("alloc", owner.ask("alloc vmm"));
  user.ask("init");
  user.ask("alloc device");
  const auto fd = owner.ask_text("vmmfd");
  r.note("import", user.ask("vmmimport " + std::to_string(owner.pid()) + ":" + fd));
  r.note("close_fd", owner.ask("closefd " + fd));
  if (closed) {
    user.kill();
    user.reap();
  } else {
    r.note("user_lock", lock(user.pid()));
  }
  r.note("owner_lock", lock(owner.pid()));
  r.note("owner_checkpoint", api().cuCheckpointProcessCheckpoint(owner.pid(), nullptr));
  if (!closed) {
    r.note("user_checkpoint", api().cuCheckpointProcessCheckpoint(user.pid(), nullptr));
    r.note("user_state", state(user.pid()));
  }
  r.note("owner_state", state(owner.pid()));
  r.note("owner_restore", restore_with(owner.pid(), {}));
  r.note("owner_state_after", state(owner.pid()));
  if (!closed) {
    r.note("user_restore", restore_with(user.pid(), {}));
    r.note("user_state_after", state(user.pid()));
  }
}
void vmm_open(Report& r) { vmm_imported(r, false); }
void vmm_closed(Report& r) { vmm_imported(r, true); }

void two_at_once(Report& r) {
  Target a;
  Target b;
  for (auto* t : {&a, &b}) {
    t->ask("init");
    t->ask("alloc device");
  }
  for (auto* t : {&a, &b})
    r.note(t == &a ? "lock_a" : "lock_b", lock(t->pid()));
  for (auto* t : {&a, &b}) {
    r.note(t == &a ? "checkpoint_a" : "checkpoint_b",
           api().cuCheckpointProcessCheckpoint(t->pid(), nullptr));
  }
  // In the other order than they went.
  for (auto* t : {&b, &a}) {
    r.note(t == &a ? "restore_a" : "restore_b", restore_with(t->pid(), {}));
    r.note(t == &a ? "unlock_a" : "unlock_b", api().cuCheckpointProcessUnlock(t->pid(), nullptr));
    r.note(t == &a ? "wrong_a" : "wrong_b", t->ask("check"));
  }
}

}  // namespace

std::vector<Case> sharing_cases() {
  return {
      {"map_one_gpu", "device maps on one GPU: unknown, twice, identity", map_one_gpu},
      {"map_gpus", "a partial map or one that is no bijection is refused; a swap works", map_gpus},
      {"map_hidden_gpus", "the map must name GPUs that CUDA_VISIBLE_DEVICES hides",
       map_hidden_gpus},
      {"ipc_exported", "an IPC handle that no process opened is no obstacle", ipc_exported},
      {"ipc_closed", "nor is one that was closed again", ipc_closed},
      {"ipc_open", "memory open in another process: the checkpoint succeeds, the restore fails",
       ipc_open},
      {"vmm_open", "the same for VMM memory that another process imported", vmm_open},
      {"vmm_closed", "VMM memory whose importer is gone is no obstacle", vmm_closed},
      {"two_at_once", "two processes checkpointed together and restored in another order",
       two_at_once},
  };
}

}  // namespace stasis::conformance
