#include "cli/target.h"

#include <unistd.h>

#include <fmt/format.h>

namespace stasis::cli {

CLI::Option* add_target(CLI::App& command, Target& target, const std::string& word) {
  return command
      .add_option_function<std::string>(
          word,
          [&target, word](const std::string& text) {
            if (!job::is_target(text)) {
              throw CLI::ValidationError(
                  word,
                  fmt::format("'{}' is neither a process number nor the name of a job", text));
            }
            target.text = text;
          },
          "number of the process, or name of the job (`stasis run --name`); its whole tree is "
          "meant")
      ->required();
}

Result<void> reach(Context& context, Target& target) {
  if (target.text.empty()) return {};
  STASIS_TRY(target.find());
  if (!target.is_elsewhere()) return {};
  STASIS_TRY_ASSIGN(auto there, job::Elsewhere::open(target));
  const pid_t child = ::fork();
  if (child < 0) return fail(errno_error("cannot start a process", errno));
  if (child == 0) {
    STASIS_TRY(job::enter(there.entry()));
    if (!context.json) {
      context.terminal.note(
          fmt::format("process numbers are those inside of job {}: its own is {} there",
                      target.job->name, target.pid.value));
    }
    return {};
  }
  const auto status = attend(Pid{static_cast<int>(child)});
  ::_exit(status ? *status : exit_status(status.error().code));
}

}  // namespace stasis::cli
