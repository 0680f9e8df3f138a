// The standard streams of a job: pipes, between whose other ends and its own streams `stasis run`
// copies. Why pipes: docs/adr/0021-run-as-a-job.md.
//
// Owns the pipes and the threads that copy. Not thread-safe. All signals must be blocked in the
// thread that calls start(): that a reader has gone away must be an error here and not a signal.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/result.h"

namespace stasis::job {

inline constexpr std::size_t kStreams = 3;
using StreamEnds = std::array<UniqueFd, kStreams>;

// What CRIU calls a pipe: "pipe:[1234]".
Result<std::string> pipe_name(const UniqueFd& pipe);

class Streams {
 public:
  static Result<Streams> make();
  Streams(Streams&&) noexcept;
  Streams& operator=(Streams&&) = delete;
  ~Streams();  // does not wait for a reader that does not read

  // The job's ends: input, output, error. The process that starts the job takes them; all others
  // close them.
  StreamEnds take_ends();

  // Begins to copy. Once, and after the last fork: it makes threads.
  Result<void> start();
  // From now on what is typed at our terminal goes to the job as it is, while we are in the
  // foreground; finish() makes the terminal what it was. Nothing if the input is none.
  void make_raw();
  // When no process has the job's ends any more: waits until all is copied. Returns what could not
  // be written: "standard output: No space left on device".
  std::vector<std::string> finish();

 private:
  struct State;
  explicit Streams(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;  // the threads have it, too
  StreamEnds ends_;
};

}  // namespace stasis::job
