// A job from its start, or its restore, to its end: what `stasis run --images-dir` does.
// docs/adr/0021-run-as-a-job.md.
//
// Blocking; takes all signals of the process, reaps, and copies its standard streams. Once in a
// process, while that has one thread.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/result.h"
#include "job/init.h"
#include "job/worker.h"

namespace stasis::job {

struct RunOptions {
  std::vector<std::string> command;
  std::string name;     // by which other verbs find it; empty: "job-" and our own number
  std::string preload;  // LD_PRELOAD for the command
  IoUring io_uring = IoUring::kAutomatic;
  std::string images_dir;
  std::vector<std::string> visible_dirs;  // JobSpec::keep, besides images_dir
  std::chrono::milliseconds every{0};     // between two saves; 0: none by the clock
  std::set<int> signals;                  // those that save the job and are not passed on
  int keep = 2;                           // complete images
  bool whole = false;                     // no image takes anything over from the one before
  std::chrono::milliseconds grace{120000};
  // A job that has ended by itself with 0 is not run again under the same word. Empty: it is.
  std::string once;
  int exit_code = 75;  // after a save that has ended the job
  // Only from an image: kImageIncomplete where there is none any more, in the place of the command.
  bool goes_on_only = false;
  // Called once: the command has started, or nothing that is known stands in the way of the restore
  // of its newest image. Not called where the command cannot be started (Outcome::why).
  std::function<void()> on_begin = {};
  WorkerOptions worker;
};

struct Outcome {
  int status = 0;            // for the end of this process
  std::optional<Error> why;  // the command could not be started: `status` is 126 or 127
  // Why no job can be started here that can be saved, where there is no image yet. Nothing has been
  // done: the caller may start the command without.
  std::optional<Error> cannot_save;
};

// kUsage, kNotSupported; also what choose_image.h and init.h say.
Result<Outcome> run(RunOptions options, const std::function<void(const std::string&)>& tell);

}  // namespace stasis::job
