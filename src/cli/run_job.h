// `stasis run --images-dir`: its options.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/verbs.h"
#include "job/choose_image.h"
#include "job/run.h"

namespace stasis::cli {

struct RunArguments {
  job::RunOptions job;       // images_dir is empty if the program is only started
  bool best_effort = false;  // started without images where it cannot be saved
  std::vector<std::string> signals = {"TERM", "USR1"};
};

void add_job_options(CLI::App& command, RunArguments& arguments);

// Becomes `stasis run OPTIONS --images-dir`, which goes on with the job: comes back with why not.
Error become_run_of(const Context& context, const std::string& images_dir,
                    const job::SavedJob& saved, const std::vector<std::string>& options);

// `preload` is the job's LD_PRELOAD: the workers are to have their own.
Result<job::Outcome> run_job(Context& context, RunArguments& arguments, const std::string& preload);

}  // namespace stasis::cli
