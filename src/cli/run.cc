// Starts a program with the agent loaded, so that its GPU memory can be moved by the direct path;
// with --images-dir, as a job that is looked after.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "cli/help.h"
#include "cli/run_job.h"
#include "cli/verbs.h"
#include "job/exec_failure.h"
#include "job/io_uring.h"
#include "job/registry.h"
#include "operations/agent_library.h"

namespace stasis::cli {

namespace {

constexpr const char* kRefusals = "--refusal-fd";
constexpr const char* kGoOnOnly = "--go-on-only";

// As execvp() finds it; empty if it does not.
std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* variable = std::getenv("PATH");
  std::string_view rest = variable ? variable : "/bin:/usr/bin";
  for (;;) {
    const auto colon = rest.find(':');
    const std::string directory(rest.substr(0, colon));
    std::string path = (directory.empty() ? "." : directory) + "/" + name;
    if (::access(path.c_str(), X_OK) == 0) return path;
    if (colon == std::string_view::npos) return {};
    rest.remove_prefix(colon + 1);
  }
}

// In front of what is loaded already: the agent passes on what is not its own.
std::string with_agent(const std::string& library) {
  const char* others = std::getenv("LD_PRELOAD");
  if (!others || !*others) return library;
  std::string list = others;
  // By the whole name: another's may begin with it.
  for (std::string_view rest = list; !rest.empty();) {
    const auto end = std::min(rest.find_first_of(" :"), rest.size());
    if (rest.substr(0, end) == library) return list;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return library + ":" + list;
}

// Why the loader will ignore LD_PRELOAD for the program, or nothing.
std::string why_without_agent(const std::string& name) {
  const std::string path = find_program(name);
  struct stat status {};
  if (path.empty() || ::stat(path.c_str(), &status) != 0) return {};
  if ((status.st_mode & S_ISUID) && status.st_uid != ::getuid()) return path + " is setuid";
  if ((status.st_mode & S_ISGID) && status.st_gid != ::getgid()) return path + " is setgid";
  if (::getuid() != 0 && ::getxattr(path.c_str(), "security.capability", nullptr, 0) > 0)
    return path + " has file capabilities";
  return {};
}

// By which other verbs find the program that takes the place of this process.
Result<std::optional<job::Registration>> enter_name(const job::RunOptions& options) {
  if (options.name.empty()) return std::optional<job::Registration>();
  const Pid self{static_cast<int>(::getpid())};
  STASIS_TRY_ASSIGN(
      auto entered,
      job::Registration::enter({options.name, {self}, Pid{}, self, {}, {}, options.command, {}}));
  return std::optional<job::Registration>(std::move(entered));
}

// Replaces this process; comes back with why not if that cannot be.
job::Outcome become(const Context& context, std::vector<std::string>& words) {
  const Inherited& inherited = context.inherited;
  std::vector<char*> argv;
  for (std::string& word : words)
    argv.push_back(word.data());
  argv.push_back(nullptr);
  if (inherited.ignored_children) ::signal(SIGCHLD, SIG_IGN);
  for (std::size_t fd = 0; fd < inherited.closed.size(); ++fd)
    if (inherited.closed.at(fd)) ::close(static_cast<int>(fd));
  ::execvp(argv[0], argv.data());
  const int why = errno;
  return {job::exit_status_of_exec_failure(why), job::exec_failure(words.front(), why), {}};
}

// torchrun's own store opens one, which the user does not know when a dump is refused for it.
void keep_torchrun_from_io_uring(const Context& context, job::RunOptions& options) {
  if (options.io_uring != job::IoUring::kAutomatic || !job::is_torchrun(options.command)) return;
  if (job::can_do_without_io_uring_freely()) {
    options.io_uring = job::IoUring::kKeptOut;
    return;
  }
  context.terminal.note(
      "torchrun opens an io_uring, which CRIU cannot dump: where this is to be dumped, as root, "
      "start it with --no-io-uring");
}

// NCCL takes NVLink multicast where there is NVSwitch, and a rank that has it can be neither
// suspended nor saved. Who wants it says so by the same variable.
void keep_nccl_from_multicast() { ::setenv("NCCL_NVLS_ENABLE", "0", 0); }

// Without images.
Result<job::Outcome> start_only(const Context& context, job::RunOptions& options,
                                const std::string& preload) {
  STASIS_TRY_ASSIGN(const auto named, enter_name(options));
  ::setenv("LD_PRELOAD", preload.c_str(), 1);
  keep_torchrun_from_io_uring(context, options);
  if (options.io_uring == job::IoUring::kKeptOut) {
    if (const int failed = job::do_without_io_uring())
      return fail(job::cannot_do_without_io_uring(failed));
  }
  return become(context, options.command);
}

// `why` of what comes back: the command could not be started.
Result<job::Outcome> run_program(Context& context, RunArguments& arguments) {
  std::vector<std::string>& words = arguments.job.command;
  words = std::move(context.command);
  if (words.empty())
    return fail(ErrorCode::kUsage, "COMMAND is required", "see `stasis run --help`");
  STASIS_TRY_ASSIGN(auto library, find_agent_library());
  // The linker takes blanks and colons for separators.
  if (library.find_first_of(" :") != std::string::npos) {
    return fail(
        ErrorCode::kUsage,
        fmt::format("the path {} has a blank or a colon, which LD_PRELOAD cannot hold", library),
        "let STASIS_PRELOAD name a link to it without");
  }
  if (const auto why = why_without_agent(words.front()); !why.empty()) {
    context.terminal.note(
        why + (arguments.job.io_uring == job::IoUring::kKeptOut && !job::keeps_ways_to_privileges()
                   ? ", and gains nothing by that: without CAP_SYS_ADMIN --no-io-uring has it give "
                     "up gaining privileges"
                   : ", so the loader leaves the agent out of it: its GPU memory goes by the "
                     "driver"));
  }
  const std::string preload = with_agent(library);
  keep_nccl_from_multicast();
  if (arguments.job.images_dir.empty()) {
    return start_only(context, arguments.job, preload);
  }
  context.terminal.log_with("job", arguments.job.name);
  STASIS_TRY_ASSIGN(auto outcome, run_job(context, arguments, preload));
  if (outcome.cannot_save && !arguments.best_effort) {
    Error why = std::move(*outcome.cannot_save).within("the job could not be saved here");
    why.remedy += fmt::format("{}--best-effort runs the program all the same, and saves nothing",
                              why.remedy.empty() ? "" : "; ");
    return fail(std::move(why));
  }
  if (outcome.cannot_save) {
    context.terminal.note(
        "the program is started without --images-dir, and nothing will be saved: " +
        outcome.cannot_save->message + "; what to do: " + outcome.cannot_save->remedy);
    return start_only(context, arguments.job, preload);
  }
  return outcome;
}

Result<int> start_program(Context& context, RunArguments& arguments) {
  arguments.job.on_begin = [&context] { context.refusals.reset(); };
  STASIS_TRY_ASSIGN(const auto outcome, run_program(context, arguments));
  if (outcome.why) tell_error(context, *outcome.why, outcome.status);
  return outcome.status;
}

}  // namespace

Error become_run_of(const Context& context, const std::string& images_dir,
                    const job::SavedJob& saved, const std::vector<std::string>& options) {
  std::error_code unknown;
  const std::string own = std::filesystem::read_symlink("/proc/self/exe", unknown);
  std::vector<std::string> words{own, "run", kGoOnOnly, "--images-dir", images_dir};
  words.insert(words.end(), options.begin(), options.end());
  if (!saved.name.empty()) words.insert(words.end(), {"--name", saved.name});
  words.emplace_back("--");
  words.insert(words.end(), saved.command.begin(), saved.command.end());
  auto outcome = become(context, words);
  return outcome.why ? std::move(*outcome.why) : Error{ErrorCode::kInternal, "no exec", {}};
}

std::vector<std::string> take_command(const CLI::App& app, std::vector<std::string>& words) {
  // As CLI11 has it, which takes "-5" for a word.
  const auto is_option = [](const std::string& word) {
    return word.size() > 1 && word[0] == '-' && (word[1] < '0' || word[1] > '9');
  };
  const auto verb = std::find_if_not(words.begin(), words.end(), is_option);
  if (verb == words.end() || *verb != "run") return {};
  const CLI::App* run = app.get_subcommand(*verb);
  // Does the word after this one belong to it? Of "-qD" that is for its last letter to say.
  const auto wants_value = [run](const std::string& word) {
    const auto takes = [run](const std::string& name) {
      const CLI::Option* option = run->get_option_no_throw(name);
      return option != nullptr && option->get_items_expected_min() > 0;
    };
    if (word[1] == '-') return word.find('=') == std::string::npos && takes(word);
    for (std::size_t letter = 1; letter < word.size(); ++letter)
      if (takes({'-', word[letter]})) return letter + 1 == word.size();
    return false;
  };
  auto begin = std::next(verb);
  while (begin != words.end() && is_option(*begin) && *begin != "--")
    begin += wants_value(*begin) && std::next(begin) != words.end() ? 2 : 1;
  if (begin != words.end() && *begin == "--") ++begin;
  if (begin == words.end()) return {};
  std::vector<std::string> command(std::make_move_iterator(begin),
                                   std::make_move_iterator(words.end()));
  words.erase(begin, words.end());
  words.emplace_back("COMMAND");
  return command;
}

Result<UniqueFd> take_refusals(const std::vector<std::string>& words) {
  const std::string with_value = std::string(kRefusals) + "=";
  const auto option = std::find_if(words.begin(), words.end(), [&](const std::string& word) {
    return word == kRefusals || word.starts_with(with_value);
  });
  const bool is_one = option != words.end() && *option != kRefusals;
  if (option == words.end() || (!is_one && option + 1 == words.end())) return UniqueFd();
  const std::string text = is_one ? option->substr(with_value.size()) : option[1];
  int number = -1;
  (void)std::from_chars(text.data(), text.data() + text.size(), number);
  if (number < 0) return UniqueFd();
  if (::fcntl(number, F_SETFD, FD_CLOEXEC) != 0)
    return fail(errno_error(fmt::format("descriptor {} is not open", number), errno));
  return UniqueFd(number);
}

Verb add_run(CLI::App& app) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* command = app.add_subcommand(
      "run",
      "start a program so that its GPU memory can be moved at the speed of the bus; with "
      "--images-dir, save it, end it when it has to make room, and go on from there");
  command
      ->add_option("COMMAND", arguments->job.command,
                   "the program and its arguments; put -- before it")
      ->required();
  add_job_options(*command, *arguments);
  command->positionals_at_end();
  command->prefix_command(false);
  // Not for people: become_run_of(), take_refusals().
  command->add_flag(kGoOnOnly, arguments->job.goes_on_only)->group("");
  command->add_option_function<int>(kRefusals, [](int) {})
      ->check(whole_number(0, 1 << 20))
      ->group("");
  return {command, [arguments](Context& context) { return start_program(context, *arguments); },
          false};
}

}  // namespace stasis::cli
