// What all workloads share: options, the loop of rounds, the status file, the way to fail.
//
// A workload is a function that sets itself up and then does
//   while (run.next()) { ...compute, verify...; run.finish(); }
// until SIGTERM or --rounds says stop. A round counts only when all of it was verified. Content is
// keyed by round and seed, so that a lost byte as well as a skipped or repeated round is a
// mismatch.
//
// Run is used by the main thread; seed() and mismatch() by any.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/fd.h"
#include "examples/common/cuda_api.h"

namespace stasis::workloads {

struct Options {
  std::string kind;
  std::string status;        // file for the heartbeat; empty: none
  std::uint64_t rounds = 0;  // 0: until SIGTERM
  std::uint64_t seed = 0;    // 0: from the kernel's random numbers
  std::uint64_t size = 0;    // bytes of device memory, of kind host of the host's; 0: its default
  // Kind memory: bytes besides that stay as they are; variable: of cuMemAllocManaged besides.
  std::uint64_t still = 0;
  std::uint32_t anew = 1;          // kind host: 64ths of its memory that each round writes
  std::uint32_t idle_threads = 0;  // any kind: threads that do nothing
  std::uint64_t zeros = 0;  // kind memory: bytes besides, of which all but a little are zeros
  // Between two rounds; none given: some, and more where a round takes much of a processor, which
  // the tests that run beside need.
  std::optional<std::uint32_t> pause_ms;
  std::uint32_t busy_ms = 0;  // of each long kernel; 0: the kind's own default
  // Kind collective: by how much the first rank is ahead; kinds graph...: other work of the launch.
  std::uint32_t ahead_ms = 0;
  std::uint32_t own_us = 0;  // kind poll: work between two questions
  std::uint32_t threads = 3;
  std::uint32_t children = 2;
  std::uint32_t copies = 1;  // kind torture: allocations with the same content
  std::string child_kind = "memory";
  std::string report;           // kind state: where it answers
  bool locks = false;           // kind state: locks of files, too
  bool signal_threads = false;  // kind state: files that signal threads, too
  std::string ipc_handle;       // hexadecimal; set by the parent of kind ipc for its child
  std::string meeting;      // meeting.h; set by the parent of kind collective for its ranks, as are
  std::uint32_t rank = 0;   // its number, and
  std::uint32_t ranks = 1;  // how many there are
  // Kind sharing: pieces of memory, imports of them, rounds between two changes (0: none), the
  // kinds of pieces, whether their owners free what others have.
  std::uint32_t pieces = 5;
  std::uint32_t imports = 8;
  std::uint32_t renew_every = 5;
  std::string piece_kinds = "dhi";
  bool owners_free = false;
  bool talk = false;       // kind rank, by TCP: send each other numbers besides
  bool meet = false;       // kind threads: wait for each other on the GPU
  bool of_host = false;    // with sharing: that memory is the host's, as NCCL's without P2P
  bool sharing = false;    // kind collective: each rank writes into the memory of all others
  bool like_nccl = false;  // kind collective: hold the socket that NCCL's ranks listen on
  bool restless = false;   // kind loader: start a worker after the other
  bool print_pid = false;
  programs::Lookup lookup = programs::Lookup::kDlsym;
};

class Run {
 public:
  // Installs the SIGTERM handler and opens the status file.
  explicit Run(Options options);

  const Options& options() const { return options_; }
  std::uint64_t size_or(std::uint64_t bytes) const { return options_.size ? options_.size : bytes; }
  std::uint32_t busy_ms_or(std::uint32_t ms) const {
    return options_.busy_ms ? options_.busy_ms : ms;
  }

  // Begins the next round; false if there shall be none.
  bool next();
  // The same for one that may not stop alone.
  void begin() { ++round_; }
  // Sleeps for ahead_ms.
  void pause_ahead() const;
  // The current one; the first is 1.
  std::uint64_t round() const { return round_; }
  // The round was verified: heartbeat, and the pause.
  void finish();
  // How many were.
  std::uint64_t verified() const { return verified_; }

  // True once SIGTERM has come.
  static bool stop_requested();

  // The seed of the content number `which` in a round: never the same for another round or number.
  std::uint64_t seed(std::uint64_t round, std::uint64_t which = 0) const;

  // Ends the program: something was not what it had to be.
  [[noreturn]] void mismatch(const std::string& what) const;

 private:
  void heartbeat();
  std::uint64_t pause() const;

  Options options_;
  std::uint64_t used_ = 0;  // processor time at the end of the last round, in nanoseconds
  UniqueFd status_;
  std::uint64_t round_ = 0;
  std::uint64_t verified_ = 0;
};

// The kinds. Each returns when Run says stop, and ends the program at the first mismatch.
void run_memory(Run& run);
void run_pinned(Run& run);
void run_host(Run& run);
void run_streams(Run& run);
void run_pool(Run& run);
void run_vmm(Run& run);
void run_sleep(Run& run);
void run_graph(Run& run);
void run_graph_host(Run& run);
void run_contexts(Run& run);
void run_threads(Run& run);
void run_churn(Run& run);
void run_torture(Run& run);
void run_peer(Run& run);
void run_poll(Run& run);
void run_managed(Run& run);
void run_managed_variable(Run& run);
void run_ipc(Run& run);
void run_ipc_child(Run& run);
void run_tree(Run& run);
void run_loader(Run& run);
void run_collective(Run& run);
void run_rank(Run& run);
void run_sharing(Run& run);
void run_sharer(Run& run);
void run_idle(Run& run);
void run_spin(Run& run);
void run_spin_stream(Run& run);
void run_spin_context(Run& run);
void run_starve(Run& run);
void run_sockets(Run& run);
void run_none(Run& run);
void run_state(Run& run);

}  // namespace stasis::workloads
