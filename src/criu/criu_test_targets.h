// Small programs for criu_integrationtest to dump: the test program itself, started again with a
// kind. Each counts in its memory and writes the count to a file, so that a test sees from outside
// whether it runs, and whether it went on where it was.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"

namespace stasis {

// The other life of the test program: argv is {program, "--target", kind, directory, ...}.
int run_target(int argc, char** argv);

// One running target, a child of the test. Killed and reaped at the end.
class Target {
 public:
  struct Options {
    bool own_session = true;
    const UniqueFd* given = nullptr;  // descriptor 3 of the target
  };
  // `directory` gets its files. Returns when it counts.
  Target(const std::string& kind, const std::string& directory, const Options& options);
  Target(const std::string& kind, const std::string& directory)
      : Target(kind, directory, Options{}) {}
  ~Target();
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;

  Pid pid() const { return Pid{pid_}; }
  std::uint64_t count() const;
  // True if it counts on within some time.
  bool runs() const;
  // Reaps it after it was ended by a dump; false if it did not end.
  bool reap();
  // The number of the child that a "tree" has.
  Pid child() const;
  // The process has come back under the same number, as a child of ours again.
  void adopt(Pid pid) { pid_ = pid.value; }

 private:
  std::string directory_;
  pid_t pid_ = 0;
};

// What CRIU must bring back and what an aborted dump must not change: its signal dispositions and
// mask, whether it is traced, its mappings and its descriptors.
std::string description(Pid pid);

// The letter of the process's state in /proc, e.g. 'S'; '-' if there is none.
char process_state(Pid pid);

}  // namespace stasis
