// A process tree: a root without CUDA that supervises children with CUDA, each verifying itself.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "tests/workloads/runner.h"
#include "tests/workloads/spawn.h"

namespace stasis::workloads {
namespace {

constexpr int kTreePollMs = 10;

// The number in a status file, 0 if it has none yet.
unsigned long long round_in(const std::string& path) {
  constexpr std::string_view kPrefix = "round ";
  const auto text = read_file(AT_FDCWD, path);
  if (!text || !text->starts_with(kPrefix)) return 0;
  return std::strtoull(text->c_str() + kPrefix.size(), nullptr, 10);
}

// None has ended.
void require_all(const Run& run, std::vector<Child>& children) {
  for (std::size_t i = 0; i < children.size(); ++i) {
    if (!children[i].exited()) continue;
    if (children[i].exit_status() == programs::kExitSkipped)
      programs::die(programs::kExitSkipped, "skipped: see the child's message");
    run.mismatch("child " + std::to_string(i + 1) + " " + children[i].how_it_ended());
  }
}

}  // namespace

void run_tree(Run& run) {
  const Options& options = run.options();
  std::vector<std::vector<std::string>> children;
  for (std::uint32_t i = 1; i <= options.children; ++i) {
    children.push_back({options.child_kind, "--seed", std::to_string(run.seed(0, i))});
  }
  supervise(run, children);
}

void supervise(Run& run, const std::vector<std::vector<std::string>>& programs) {
  const Options& options = run.options();
  if (options.status.empty()) {
    programs::die(1, "the kind " + options.kind + " needs --status, for its children too");
  }
  std::vector<Child> children;
  std::vector<std::string> files;
  for (const auto& program : programs) {
    files.push_back(options.status + "." + std::to_string(files.size() + 1));
    // What an earlier program's child has left there says nothing of this one.
    (void)::unlink(files.back().c_str());
    std::vector<std::string> arguments = program;
    arguments.insert(arguments.end(), {"--status", files.back()});
    if (options.pause_ms)
      arguments.insert(arguments.end(), {"--pause-ms", std::to_string(*options.pause_ms)});
    if (options.size != 0) {
      arguments.insert(arguments.end(), {"--size", std::to_string(options.size)});
    }
    if (options.zeros != 0) {
      arguments.insert(arguments.end(), {"--zeros", std::to_string(options.zeros)});
    }
    children.emplace_back(arguments);
  }

  std::vector<unsigned long long> before(children.size(), 0);
  while (run.next()) {
    for (std::size_t i = 0; i < children.size(); ++i) {
      while (round_in(files[i]) <= before[i] && !Run::stop_requested()) {
        // Of any: this one may wait for one that has ended.
        require_all(run, children);
        sleep_ms(kTreePollMs);
      }
      before[i] = round_in(files[i]);
    }
    run.finish();
  }
  for (Child& child : children)
    child.request_stop();
  for (std::size_t i = 0; i < children.size(); ++i) {
    children[i].wait();
    if (!children[i].ended_well()) {
      run.mismatch("child " + std::to_string(i + 1) + " " + children[i].how_it_ended() +
                   " when told to stop");
    }
  }
}

}  // namespace stasis::workloads
