// `stasis run --images-dir`: its options.
#pragma once

#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "cli/verbs.h"
#include "job/run.h"

namespace stasis::cli {

struct RunArguments {
  job::RunOptions job;       // images_dir is empty if the program is only started
  bool best_effort = false;  // started without images where it cannot be saved
  std::vector<std::string> signals = {"TERM", "USR1"};
  int refusal_fd = -1;
};

void add_job_options(CLI::App& command, RunArguments& arguments);

// `preload` is the job's LD_PRELOAD: the workers are to have their own.
Result<job::Outcome> run_job(Context& context, RunArguments& arguments, const std::string& preload);

}  // namespace stasis::cli
