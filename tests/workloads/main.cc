// stasis-workload KIND: a CUDA program that verifies itself, to be suspended, dumped and restored.
//
// One source runs on a real driver and on the simulated one. See tests/workloads/README.md.
#include <pthread.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tests/workloads/runner.h"

namespace stasis::workloads {
namespace {

struct Kind {
  const char* name;
  void (*run)(Run&);
  const char* what;
};

constexpr Kind kKinds[] = {
    {"memory", run_memory, "device memory in many sizes (--size)"},
    {"pinned", run_pinned, "pinned, mapped and registered host memory (--size)"},
    {"host", run_host, "large private memory of the host (--size, --threads)"},
    {"streams", run_streams, "four streams, events, host functions, work in flight (--busy-ms)"},
    {"pool", run_pool, "stream-ordered allocation (--size)"},
    {"vmm", run_vmm, "reserved addresses, exportable physical memory, remapping (--size)"},
    {"sleep", run_sleep, "an allocator that puts its memory to sleep, as servers do (--size)"},
    {"graph", run_graph, "a CUDA graph launched again and again"},
    {"graph-host", run_graph_host, "the same, with a copy to the host in it"},
    {"contexts", run_contexts, "three contexts on every GPU"},
    {"threads", run_threads, "host threads that launch at the same time (--threads)"},
    {"churn", run_churn, "host threads that allocate and free all the time (--size, --threads)"},
    {"torture", run_torture, "hundreds of allocations of all sizes (--size, --copies)"},
    {"peer", run_peer, "two GPUs that work on each other's memory (--size)"},
    {"poll", run_poll, "host threads that ask the driver all the time"},
    {"managed", run_managed, "managed memory, which the driver cannot checkpoint"},
    {"variable", run_managed_variable, "a __managed__ variable (USR1: none, USR2: again)"},
    {"ipc", run_ipc, "memory shared with a child, which cannot be restored"},
    {"ipc-child", run_ipc_child, "the child of ipc"},
    {"loader", run_loader, "a CUDA process and workers that it forked (--children)"},
    {"tree", run_tree, "a root without CUDA and its CUDA children (--children, --child-kind)"},
    {"collective", run_collective, "ranks that wait for each other on the GPU (--children)"},
    {"rank", run_rank, "one of them"},
    {"sharing", run_sharing,
     "processes that share memory in many ways (--children, --pieces, ...)"},
    {"sharer", run_sharer, "one of them"},
    {"idle", run_idle, "a context and nothing else"},
    {"spin", run_spin, "one long kernel after the other (--busy-ms, --size)"},
    {"spin-stream", run_spin_stream, "the same, each in a stream that was made for it"},
    {"spin-context", run_spin_context, "the same, each in a context that was made for it"},
    {"starve", run_starve, "threads that launch without pause (--threads)"},
    {"sockets", run_sockets, "options of sockets and multicast groups, all other than by default"},
    {"none", run_none, "no CUDA at all"},
    {"state", run_state, "what the kernel keeps for a process (--report)"},
};

std::string kinds_text() {
  std::string text = "Kinds:\n";
  for (const Kind& kind : kKinds) {
    const std::string name = kind.name;
    text += "  " + name + std::string(12 - name.size(), ' ') + kind.what + "\n";
  }
  return text;
}

void start_idle_threads(std::uint32_t count) {
  constexpr std::size_t kStack = 64U << 10;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStack);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  const auto idle = [](void*) -> void* {
    for (;;)
      pause();
  };
  for (std::uint32_t i = 0; i < count; ++i) {
    pthread_t thread{};
    if (const int error = pthread_create(&thread, &attributes, idle, nullptr); error != 0)
      programs::die(1, "cannot start thread " + std::to_string(i) + ": " + std::strerror(error));
  }
  pthread_attr_destroy(&attributes);
}

const Kind* find_kind(const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (name == kind.name) return &kind;
  }
  return nullptr;
}

}  // namespace
}  // namespace stasis::workloads

int main(int argc, char** argv) {
  using stasis::workloads::find_kind;
  using stasis::workloads::Kind;
  using stasis::workloads::kinds_text;
  using stasis::workloads::Options;
  using stasis::workloads::Run;
  using stasis::workloads::start_idle_threads;
  Options options;
  bool proc_address = false;
  bool per_thread = false;
  CLI::App app("Runs a CUDA workload that verifies itself in rounds, until SIGTERM.");
  app.footer(
      kinds_text() +
      "\nExit status: 0 all rounds verified, 1 mismatch or failure, 77 skipped: not possible "
      "here.");
  app.add_option("kind", options.kind, "one of the kinds below")->required();
  app.add_option("--status", options.status, "file that always says \"round N ok\"");
  app.add_option("--rounds", options.rounds, "stop after so many; 0: at SIGTERM");
  app.add_option("--seed", options.seed, "of all content; 0: a random one");
  app.add_option("--zeros", options.zeros,
                 "bytes of memory besides, all zeros but for a page in its middle, kind memory")
      ->transform(CLI::AsSizeValue(false));
  app.add_option(
         "--still", options.still,
         "memory, host: besides --size, device memory that never changes; variable: managed memory")
      ->transform(CLI::AsSizeValue(false))
      ->type_name("BYTES");
  app.add_option("--size", options.size, "device memory, of kind host of the host's, e.g. 16G")
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--pause-ms", options.pause_ms, "between two rounds [40, or more]");
  app.add_option("--busy-ms", options.busy_ms, "how long a long kernel runs");
  app.add_option(
      "--ahead-ms", options.ahead_ms,
      "kind collective: by how much the first rank is ahead of the others, outside of "
      "the driver, with its work on the GPU; kinds graph...: its other work of the launch");
  app.add_option("--own-us", options.own_us, "kind poll: work of its own between two questions");
  app.add_option("--threads", options.threads, "host threads")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--anew", options.anew,
                 "kind host: so many 64ths of its memory are written in each round")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--idle-threads", options.idle_threads, "besides, threads that do nothing")
      ->check(CLI::Range(0, 20000));
  app.add_option("--children", options.children, "of the tree")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--child-kind", options.child_kind, "what they run")->capture_default_str();
  app.add_option("--copies", options.copies,
                 "kind torture: so many allocations in a row have the same content")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--meet", options.meet,
               "kind threads: they wait for each other on the GPU (simulated driver only)");
  app.add_flag("--sharing", options.sharing,
               "kind collective: each rank writes into exported memory of all others");
  app.add_flag("--of-host", options.of_host, "with --sharing: the memory is the host's");
  app.add_flag("--like-nccl", options.like_nccl,
               "kind collective: with the socket of an NCCL rank");
  app.add_option("--pieces", options.pieces, "kind sharing: so many pieces of GPU memory")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  app.add_option("--imports", options.imports, "kind sharing: so many imports of all of them")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  app.add_option(
         "--renew-every", options.renew_every,
         "kind sharing: rounds until some is given up and made anew; 0: never, also of kind vmm")
      ->capture_default_str();
  app.add_option("--piece-kinds", options.piece_kinds,
                 "kind sharing: letters; d: by descriptor, h: the same of the host's, i: by CUDA "
                 "IPC, s: the same and small")
      ->capture_default_str();
  app.add_flag("--owners-free", options.owners_free,
               "kind sharing: owners free what others have mapped");
  app.add_flag("--restless", options.restless,
               "kind loader: a thread that starts short-lived workers all the time");
  app.add_option("--report", options.report,
                 "kind state: asked by a file FILE.ask, it answers in FILE.cuda and FILE.plain");
  app.add_flag("--locks", options.locks, "kind state: locks and leases of files, too");
  app.add_flag("--signal-threads", options.signal_threads,
               "kind state: files that signal threads, too");
  app.add_option("--ipc-handle", options.ipc_handle)->group("");
  app.add_option("--meeting", options.meeting)->group("");
  app.add_flag("--talk", options.talk)->group("");
  app.add_option("--rank", options.rank)->group("");
  app.add_option("--ranks", options.ranks)->group("");
  app.add_flag("--print-pid", options.print_pid, "print the process number first");
  app.add_flag("--proc-address", proc_address, "find the driver's functions by cuGetProcAddress");
  app.add_flag("--per-thread-stream", per_thread,
               "and so that the default stream is each thread's own");
  CLI11_PARSE(app, argc, argv);
  if (proc_address) options.lookup = stasis::programs::Lookup::kGetProcAddress;
  if (per_thread) options.lookup = stasis::programs::Lookup::kPerThreadDefaultStream;

  const Kind* kind = find_kind(options.kind);
  if (!kind) {
    stasis::programs::die(2, "there is no kind \"" + options.kind + "\"\n" + kinds_text());
  }
  if (options.print_pid) {
    std::printf("%d\n", getpid());
    std::fflush(stdout);
  }
  start_idle_threads(options.idle_threads);
  Run run(options);
  kind->run(run);
  std::printf("verified %llu rounds\n", static_cast<unsigned long long>(run.verified()));
  std::fflush(stdout);
  return 0;
}
