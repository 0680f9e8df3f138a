#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <list>
#include <memory>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/printable.h"
#include "cli/group.h"
#include "cli/help.h"
#include "cli/run_job.h"
#include "cli/ticker.h"
#include "cli/verbs.h"
#include "image/image_reader.h"
#include "job/choose_image.h"
#include "job/registry.h"
#include "operations/image_report.h"
#include "proc/next_numbers.h"
#include "proc/procfs.h"

namespace stasis::cli {
namespace {

struct RestoreArguments {
  std::chrono::milliseconds limit{0};
  RestoreOptions restore;
  GroupOptions group;
  std::optional<std::string> device_map;
  bool detach = false;
  std::vector<std::string> inherit;  // "fd[3]:pipe:[1234]"
  std::optional<std::string> cgroups;
  std::vector<std::string> addresses;  // "10.0.0.5=10.0.0.9"
};

// "fd[N]:KEY", as CRIU's own --inherit-fd writes it.
Result<std::pair<int, std::string>> parse_inherit(const std::string& text) {
  int number = -1;
  const std::size_t close = text.find("]:");
  if (text.starts_with("fd[") && close != std::string::npos && close + 2 < text.size()) {
    const auto [end, error] = std::from_chars(text.data() + 3, text.data() + close, number);
    if (error == std::errc() && end == text.data() + close && number >= 0) {
      return std::pair{number, text.substr(close + 2)};
    }
  }
  return fail(ErrorCode::kUsage, fmt::format("'{}' is no descriptor to inherit", text),
              "write fd[NUMBER]:KEY, e.g. --inherit-fd 'fd[1]:pipe:[12345]'");
}

// Those of CRIU's own options that mean something at a restore, by CRIU's names. What the dump was
// told holds without them.
void add_criu_restore_options(CLI::App& command, RestoreArguments& options) {
  constexpr const char* kGroup = "Options for CRIU";
  RestoreOptions& restore = options.restore;
  command
      .add_option(
          "--external", restore.external,
          "where a resource from outside is now, e.g. mnt[data]:/data; may be repeated [where "
          "it was]")
      ->allow_extra_args(false)
      ->type_name("RESOURCE")
      ->group(kGroup);
  command.add_flag("--tcp-close", restore.tcp_close, "close its open TCP connections")
      ->group(kGroup);
  command.add_flag("--ext-unix-sk", restore.ext_unix_sk, "cut its unix sockets to other processes")
      ->group(kGroup);
  command
      .add_option("--manage-cgroups", options.cgroups,
                  "what becomes of its cgroups, by CRIU's words [as at the dump]")
      ->check(one_of(choice_names<CgroupMode>()))
      ->group(kGroup);
}

// The numbers that the image needs; none if it cannot be read, which the restore says.
std::set<int> numbers_of(const std::string& images_dir) {
  const auto image = ImageReader::open(images_dir);
  return image ? image->manifest().numbers() : std::set<int>{};
}

Result<void> see_own_processes() {
  if (::mount("none", "/", nullptr, MS_REC | MS_SLAVE, nullptr) == 0 &&
      ::mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) == 0)
    return {};
  return fail(errno_error("cannot mount /proc in a PID namespace of its own", errno));
}

bool runs(Pid pid) {
  const proc::ProcFs procfs;
  return procfs.process(pid) && !procfs.has_ended(pid);
}

// Of the processes that use CUDA, one that has ended since it was restored, other than the root at
// its own end with 0. Where the root runs, that is told alone: it may have ended as it was to, and
// have another in its place.
Result<void> check_still_there(Context& context, const RestoreReport& report) {
  for (const ProcessReport& one : report.processes) {
    if (!one.cuda || runs(one.pid)) continue;
    if (runs(report.root)) {
      context.note(fmt::format("process {} ({}) has ended since it was restored", one.pid.value,
                               printable(one.comm)));
      continue;
    }
    if (one.pid == report.root) {
      siginfo_t how{};
      const auto root = static_cast<id_t>(report.root.value);
      if (::waitid(P_PID, root, &how, WEXITED | WNOHANG | WNOWAIT) == 0 &&
          how.si_code == CLD_EXITED && how.si_status == 0)
        continue;
    }
    return fail(ErrorCode::kProcessGone,
                fmt::format("process {} ({}) was restored, and has ended since", one.pid.value,
                            printable(one.comm)),
                "see what it wrote last: what it had open may not be there any more (a terminal, a "
                "connection, its parent); the image is intact");
  }
  return {};
}

// It is found again by the name that it had at the dump. False: it has none now.
bool give_name(Context& context, const RestoreReport& report) {
  if (report.job_name.empty()) return false;
  auto entered = job::Registration::enter(
      {report.job_name, {report.root}, Pid{}, report.root, {}, {}, report.command, {}});
  if (entered) {
    entered->leave();
    return true;
  }
  context.note(fmt::format("it does not get its name {} back: {}", report.job_name,
                           entered.error().to_string()));
  return false;
}

Result<int> restore_here(Context& context, RestoreArguments& options);

// A job has a /dev/shm, a PID namespace and a supervisor of its own, which `stasis run` makes.
Result<int> restore_job(Context& context, const CLI::App& command, const RestoreArguments& options,
                        const job::SavedJob& saved) {
  const std::string& dir = options.restore.images_dir;
  // The command is the image's, and runs as this user.
  STASIS_TRY(check_owner(saved.image));
  if (const auto& group = saved.image.manifest().group) {
    return fail(
        ErrorCode::kUsage,
        fmt::format("{} is of part {} of {} of a job of several nodes", dir, group->name,
                    group->parts),
        fmt::format("start `{}` on each of them, with --group and the like as before", saved.line));
  }
  const std::set<std::string> known{"device-map", "json",  "verbose", "quiet",
                                    "log-json",   "trace", "metrics", "ring"};
  std::vector<std::string> words;
  std::vector<const CLI::Option*> given = command.get_options();
  for (const CLI::Option* option : command.get_parent()->get_options())
    given.push_back(option);
  for (const CLI::Option* option : given) {
    const std::string& name = option->get_single_name();
    // What a file says of `run` that one reads itself.
    if (option->count() == 0 || name == "images-dir" || context.configured.contains(name) ||
        option->get_group().empty())
      continue;
    if (known.contains(name)) {
      words.push_back("--" + name);
      if (option->get_items_expected_min() > 0) words.push_back(option->results().back());
      continue;
    }
    return fail(ErrorCode::kUsage,
                fmt::format("--{} cannot be used with the directory of a job, {}", name, dir),
                fmt::format("leave it out, or start `{}`, with --every and the like as before: "
                            "the job goes on there",
                            saved.line));
  }
  context.note(fmt::format(
      "the job goes on as by `{}`: give that line --every and the like for more", saved.line));
  return fail(become_run_of(context, dir, saved, words));
}

// Our own number cannot be changed. Where the image needs it, a child restores in a PID namespace
// of its own, as the first process there, and this one stays for its end. A command that is to
// return before that cannot do so, and is told that the number is taken.
Result<int> run_restore(Context& context, const CLI::App& command, RestoreArguments& options) {
  if (const auto saved = job::saved_job(options.restore.images_dir))
    return restore_job(context, command, options, *saved);
  find_image(context, options.restore.images_dir);
  const auto numbers = numbers_of(options.restore.images_dir);
  proc::keep_free(numbers);  // before the first helper
  const int own = ::getpid();
  if (options.detach || !numbers.contains(own)) return restore_here(context, options);
  // Not fork() after unshare(), which would give this process's later children that namespace too.
  const long child = ::syscall(SYS_clone, CLONE_NEWPID | CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0);
  if (child < 0) return restore_here(context, options);
  if (child > 0) {
    context.trace.clear();  // the child's
    context.metrics_dir = {};
    return attend(Pid{static_cast<int>(child)});
  }
  STASIS_TRY(see_own_processes());
  proc::keep_free(numbers);  // they begin anew here
  context.terminal.note(
      fmt::format("the image needs process number {}, which is stasis's own: restored in a PID "
                  "namespace that ends with the root",
                  own));
  return restore_here(context, options);
}

// How long the other parts may take to come.
std::chrono::milliseconds time_to_come(const RestoreArguments& options) {
  return options.limit.count() > 0 ? options.limit : GroupPartOptions().timeout;
}

// Fills options.restore in. It refers to the copies of descriptors in `inherited`, a list because
// their addresses stay.
Result<void> complete(RestoreArguments& options, std::list<UniqueFd>& inherited) {
  if (options.cgroups) options.restore.cgroups = choice_from_name<CgroupMode>(*options.cgroups);
  if (options.device_map) {
    STASIS_TRY_ASSIGN(auto map, parse_gpu_map(*options.device_map));
    options.restore.gpu_map = std::move(map);
  }
  for (const std::string& text : options.addresses) {
    STASIS_TRY_ASSIGN(auto pair, parse_address_pair(text));
    options.restore.addresses.push_back(std::move(pair));
  }
  for (const std::string& text : options.inherit) {
    STASIS_TRY_ASSIGN(auto parsed, parse_inherit(text));
    UniqueFd copy(::fcntl(parsed.first, F_DUPFD_CLOEXEC, 3));
    if (!copy.valid()) {
      return fail(ErrorCode::kUsage, fmt::format("descriptor {} is not open", parsed.first),
                  "open it for stasis, e.g. by a redirection of the shell");
    }
    inherited.push_back(std::move(copy));
    options.restore.inherit.push_back({std::move(parsed.second), &inherited.back()});
  }
  options.restore.caller_ends = options.detach;
  options.restore.in_background = options.detach;
  return {};
}

// `target`: how it is called in other commands.
void show(Context& context, const RestoreReport& report, const std::string& target) {
  if (context.json) {
    context.print(to_json(report));
    return;
  }
  context.terminal.out(fmt::format("restored {} from {} ({}) in {}; {}", subject_text(report),
                                   report.images_dir, format_bytes(report.image_bytes),
                                   format_seconds(report.total), state_text(report, target)));
  context.terminal.debug(phases_text(report));
}

Result<int> restore_here(Context& context, RestoreArguments& options) {
  if (options.detach && ::getpid() == 1) {
    return fail(ErrorCode::kUsage,
                "this stasis is process 1 of its PID namespace, which ends when it does, and the "
                "job with it",
                "leave out --detach");
  }
  std::list<UniqueFd> inherited;
  STASIS_TRY(complete(options, inherited));
  context.interrupt.set_time_limit(options.limit);
  STASIS_TRY(options.group.open());
  auto loaded = context.load_driver(Context::Movers::kOne);
  if (!loaded)
    return fail(options.group.refuse(Operation::kRestore, time_to_come(options), context.interrupt,
                                     std::move(loaded.error())));
  auto driver = std::move(*loaded);
  STASIS_TRY_ASSIGN(auto part, options.group.join_image(options.restore, time_to_come(options),
                                                        context.interrupt));
  options.restore.part = part.get();
  std::optional<Ticker> ticker;
  ticker.emplace(context.terminal, context.interrupt);
  STASIS_TRY_ASSIGN(auto report, restore(context.environment(*driver), options.restore));
  ticker.reset();
  // The job has its tool, whatever has become of the others.
  if (auto heard = leave_group(part.get(), subject_text(report) + " is restored"); !heard)
    context.note(heard.error().to_string() + "; " + heard.error().remedy);
  context.figures = figures_of(report);
  if (options.detach) {
    STASIS_TRY(check_still_there(context, report));
  }
  const bool named = give_name(context, report);
  // From when it is said that the job runs on.
  if (!options.detach) pass_signals_on_to(report.root);
  show(context, report, named ? report.job_name : std::to_string(report.root.value));
  if (options.detach) return 0;
  (void)context.terminal.report_lost_output();  // it may be long until the job ends
  // A process that has initialised the driver is a CUDA process itself, which `ps` would list and a
  // suspend of the shell above it would checkpoint: none may stay.
  driver.reset();
  context.session.drop_movers();
  context.end_measures("restore", nullptr);
  context.end_trace("restore");  // now: the next program knows nothing of it
  attend_afresh(report.root);
  return attend(report.root);
}

}  // namespace

Verb add_restore(CLI::App& app) {
  auto options = std::make_shared<RestoreArguments>();
  CLI::App* command =
      app.add_subcommand("restore", "bring a saved process tree back, exactly where it was");
  command
      ->add_option("DIR,-D,--images-dir", options->restore.images_dir,
                   "directory of the image, or of a job's images: the job goes on from the newest")
      ->required()
      ->type_name("DIR");
  add_device_map(*command, options->device_map);
  command
      ->add_option_function<std::string>(
          "--verify",
          [options](const std::string& when) { options->restore.verify_first = when == "first"; },
          "when GPU memory and pages are compared with their checksums; first: before anything is "
          "made; late: as they are read, and where they prove wrong, the restored processes are "
          "ended [late]")
      ->check(one_of({"first", "late"}));
  command->add_flag("--leave-suspended", options->restore.leave_suspended,
                    "leave its GPU state in memory; `stasis resume` brings it back");
  command->add_flag("--detach", options->detach,
                    "return when it runs; without it, stay until it ends, with its exit status");
  command
      ->add_option("--inherit-fd", options->inherit,
                   "give it a descriptor of ours in place of one it had; CRIU's option; may be "
                   "repeated")
      ->allow_extra_args(false)
      ->type_name("fd[N]:KEY");
  command
      ->add_option(
          "--map-address", options->addresses,
          "give its sockets the address NEW where they had OLD, of IPv4 or of IPv6; may be "
          "repeated")
      ->allow_extra_args(false)
      ->type_name("OLD=NEW");
  options->group.add_to(*command);
  add_criu_restore_options(*command, *options);
  add_time_limit(*command, options->limit,
                 "it is given up, unless its GPU memory is on the way back");
  add_criu_path(*command, options->restore.criu_path);
  return {command, [options, command](Context& context) {
            return run_restore(context, *command, *options);
          }};
}

}  // namespace stasis::cli
