// The parts of find_undumpable(), one for each concern. Private to src/doctor.
//
// Each adds what it sees to Signs. They read /proc, each on one thread, and several at a time.
#pragma once

#include <cstdint>
#include <istream>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/obstacle.h"
#include "doctor/criu_obstacles.h"
#include "doctor/facts.h"
#include "image/criu_options.h"
#include "proc/held_files.h"
#include "proc/procfs.h"

namespace stasis::doctor {

// A kind of trouble.
struct Kind {
  ObstacleId id;
  Severity severity;
  std::string_view what;  // after "process 12 (python) "
  std::string_view remedy;
  Override by = Override::kIgnoreUndumpable;
};

// What was seen, by process. The kinds are constants, which outlive it. Thread-safe.
class Signs {
 public:
  void add(Pid pid, const Kind& kind, std::string value);
  // An obstacle for each process and kind, in the order of `processes`.
  std::vector<Obstacle> obstacles(const std::vector<proc::ProcessInfo>& processes) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<int, const Kind*>, std::vector<std::string>> seen_;
};

using Processes = std::vector<proc::ProcessInfo>;  // the root of the tree first

// Memory that the kernel shows under a name, though there is no file.
bool is_of_no_file(std::string_view path);

// criu_namespaces.cc
void probe_namespaces(Facts& facts, const Processes& processes, const CriuOptions& options,
                      Signs& out);
// criu_networks.cc. Network namespaces of the tree's own.
void probe_networks(Facts& facts, const Processes& processes, const CriuOptions& options,
                    Signs& out);
// Open files of namespaces ("net:[4026531840]") that are not of the tree.
void probe_namespace_files(Facts& facts, const Processes& processes, Signs& out);

// Cgroups that are not the root's.
void probe_cgroups(Facts& facts, const Processes& processes, const CriuOptions& options,
                   Signs& out);

// criu_mounts.cc. What CRIU does not find by its mount or its path; nothing with
// `--external file[...]`, by which files are taken out of its hands.
void probe_mounts(Facts& facts, const Processes& processes, const CriuOptions& options,
                  bool simulated, Signs& out);

// criu_threads.cc
void probe_seccomp(Facts& facts, const Processes& processes, const CriuOptions& options,
                   Signs& out);
// Processes that share with their parent what CRIU cannot save of both.
void probe_shared_processes(const Processes& processes, Signs& out);
// How they are scheduled, and what they do not share with their process.
void probe_threads(Facts& facts, const Processes& processes, Signs& out);
// Children that another thread than the first of a process has made, and those that have ended, are
// not waited for, and have left a core. `all_processes`: zombies too.
void probe_children(Facts& facts, const Processes& all_processes, Signs& out);
// What parents are told the end of the processes below the root by.
void probe_exit_signals(const Processes& all_processes, Signs& out);
// `all_processes`: zombies too.
void probe_zombies(Facts& facts, const Processes& all_processes, Pid root, Signs& out);

// criu_code.cc
void probe_code(Facts& facts, const Processes& processes, Signs& out);

// criu_seals.cc. The first mappings of each kind in a text of smaps ("7f0000000000-7f0000010000");
// empty if there is none.
struct GuardedMemory {
  std::string sealed;
  std::string keyed;
  std::string provided;         // by a userfaultfd
  std::uint64_t droppable = 0;  // bytes that the kernel may drop (MAP_DROPPABLE), of all mappings
};
GuardedMemory guarded_memory(std::istream& smaps);
void probe_seals(Facts& facts, const Processes& processes, Signs& out);

// criu_copied_up.cc
void probe_copied_up(Facts& facts, const Processes& processes, Signs& out);

// criu_numa.cc. The first mapping in a text of numa_maps that has a policy of its own, with that
// ("7f0000000000 prefer:0"); empty if there is none.
std::string placed_memory(std::istream& numa_maps);
void probe_numa(const Processes& processes, Signs& out);

// criu_lines.cc
void probe_lines(Facts& facts, const Processes& processes, Signs& out);

// criu_procfs.cc; `all`: zombies too.
void probe_procfs(Facts& facts, const Processes& processes, const Processes& all, Signs& out);

// criu_timers.cc; `all_processes`: zombies too.
void probe_timers(Facts& facts, const Processes& processes, const Processes& all_processes,
                  Signs& out);

// criu_epolls.cc
void probe_epolls(Facts& facts, const Processes& processes, Signs& out);

// criu_held.cc. Whether some file holds up whatever asks after it, so that nothing more is to be
// asked.
bool probe_held(Facts& facts, const Processes& processes, proc::HeldFiles& files, Signs& out);

// criu_locks.cc
void probe_mapped_locks(Facts& facts, const Processes& processes, Signs& out);

// criu_watches.cc
void probe_folder_watches(const Processes& processes, Signs& out);

// criu_sessions.cc
void probe_sessions(Facts& facts, const Processes& processes, Signs& out);

// criu_sockets.cc
// `tcp_close`: TCP connections are not kept.
void probe_socket_states(Facts& facts, const Processes& processes, bool tcp_close, Signs& out);

// criu_names.cc
void probe_socket_names(Facts& facts, const Processes& processes, Signs& out);

// criu_semaphores.cc
void probe_semaphores(Facts& facts, const Processes& processes, Signs& out);

// criu_terminals.cc
void probe_terminals(Facts& facts, const Processes& processes, const CriuOptions& options,
                     Signs& out);
// The number of the terminal that a master is the other end of; negative if it does not tell.
int index_of_master(Pid pid, int descriptor);

// criu_pipes.cc. Of all processes of the tree. `connected`: pipes that a restore connects
// again ("pipe:[1234]").
void probe_pipes(Facts& facts, const Processes& all_processes,
                 std::span<const std::string> connected, Signs& out);

// Is the process below one of the tree, though it was not there when the tree was read?
bool descends_from(const proc::ProcFs& procfs, const std::set<int>& tree, proc::ProcessInfo info);

// criu_shared.cc. What processes outside of the tree have too: memory without a name, eventfds,
// sockets, open files.
void probe_shared(Facts& facts, const Processes& all_processes, const CriuOptions& options,
                  bool simulated, Signs& out);

}  // namespace stasis::doctor
