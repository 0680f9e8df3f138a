#include <cstdint>
#include <limits>
#include <memory>

#include <fmt/format.h>

#include "cli/group.h"
#include "cli/help.h"
#include "cli/target.h"
#include "cli/ticker.h"
#include "cli/verbs.h"
#include "job/shared_memory.h"

namespace stasis::cli {
namespace {

struct DumpArguments {
  Target target;
  DumpOptions dump;
  AttachFirst attach;
  GroupOptions group;
  bool leave_running = false;
  bool leave_suspended = false;
  std::string sync = "disk";
  std::string compress = "none";
};

// CRIU takes 32 bits of bytes.
std::uint32_t parse_ghost_limit(const std::string& text) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  const auto bytes = number_with_unit(text, CLI::AsSizeValue(false));
  if (!bytes || *bytes > kMost) {
    throw CLI::ValidationError(
        "--ghost-limit",
        fmt::format("'{}' is no size that CRIU takes; take a whole number with K, M or G, e.g. "
                    "512M, {} bytes at most (4095M)",
                    text, kMost));
  }
  return static_cast<std::uint32_t>(*bytes);
}

// An option of CRIU's, which has its value in `value`.
CLI::Option* add_criu_option(CLI::App& command, const char* flag, const char* help, bool& value) {
  // `value` is the default still.
  const std::string names = value ? fmt::format("{},!{}", flag, negated(flag)) : flag;
  return command.add_flag(names, value, help);
}
CLI::Option* add_criu_option(CLI::App& command, const char* flag, const char* help,
                             std::uint32_t& value) {
  return command
      .add_option_function<std::string>(
          flag, [&value](const std::string& text) { value = parse_ghost_limit(text); }, help)
      ->type_name("SIZE");
}
CLI::Option* add_criu_option(CLI::App& command, const char* flag, const char* help,
                             std::vector<std::string>& value) {
  return command.add_option(flag, value, help)->allow_extra_args(false)->type_name("RESOURCE");
}
template <class Choice>
CLI::Option* add_criu_option(CLI::App& command, const char* flag, const char* help, Choice& value) {
  return command
      .add_option_function<std::string>(
          flag,
          [&value](const std::string& text) {
            value = choice_from_name<Choice>(text).value_or(value);
          },
          help)
      ->check(one_of(choice_names<Choice>()));
}

// CRIU's own options, by CRIU's names.
void add_criu_dump_options(CLI::App& command, CriuOptions& criu) {
#define STASIS_CRIU_OPTION(field, type, initial, number, member, flag, help) \
  add_criu_option(command, flag, help, criu.field)->group("Options for CRIU");
#include "image/criu_options.inc"
}

// Finds the target; if there is none, looks whether DIR and PID have changed places.
Result<void> find_target(DumpArguments& options) {
  auto found = options.target.find();
  if (found || found.error().code != ErrorCode::kNoSuchProcess) return found;
  Target other;
  other.text = options.dump.images_dir;
  const bool is_name = job::check_job_name(other.text).has_value();
  if (is_name && other.find()) {
    found.error().remedy =
        fmt::format("write `stasis dump {} {}`: the process or job comes before the directory",
                    other.text, options.target.text);
  }
  return found;
}

Result<int> run_dump(Context& context, DumpArguments& options) {
  if (options.dump.ignore_obstacles) options.dump.ignore_undumpable = true;
  if (options.leave_running) options.dump.after = AfterDump::kRunning;
  if (options.leave_suspended) options.dump.after = AfterDump::kSuspended;
  options.dump.sync = options.sync == "disk" ? SyncPolicy::kDisk : SyncPolicy::kNone;
  options.dump.compression =
      compression_from_name(options.compress).value_or(ContentCompression::kNone);
  STASIS_TRY_ASSIGN(options.dump.attach, options.attach.open(options.dump.path));
  STASIS_TRY(options.group.open());
  const auto refused = [&](Error why) {
    return fail(options.group.refuse(Operation::kDump, options.dump.timeout, context.interrupt,
                                     std::move(why)));
  };
  if (auto found = find_target(options); !found) return refused(std::move(found.error()));
  options.dump.job_name =
      options.target.job ? options.target.job->name : job::name_of_job(options.target.pid);
  if (auto reached = reach(context, options.target); !reached)
    return refused(std::move(reached.error()));
  if (options.target.is_elsewhere() && options.target.pid == options.target.job->root) {
    // As `stasis run` would have made it, so that its standard streams are known.
    options.dump.job = {options.target.job->command, options.target.job->streams};
    options.dump.on_complete = [](const UniqueFd& criu_dir) -> Result<void> {
      STASIS_TRY(job::save_shared_memory(job::kSharedMemory, criu_dir));
      return {};
    };
  }
  auto driver = context.load_driver(options.dump.wants_spare_mover() ? Context::Movers::kDigests
                                                                     : Context::Movers::kOne);
  if (!driver) return refused(std::move(driver.error()));
  const Ticker ticker(context.terminal, context.interrupt);
  STASIS_TRY_ASSIGN(auto part,
                    options.group.join(Operation::kDump, options.dump.timeout, context.interrupt));
  options.dump.part = part.get();
  STASIS_TRY_ASSIGN(auto report,
                    dump(context.environment(**driver), options.target.pid, options.dump));
  STASIS_TRY(leave_group(part.get(), fmt::format("the image {} is complete", report.images_dir)));
  context.figures = figures_of(report);
  if (context.json) {
    context.print(to_json(report));
    return 0;
  }
  context.terminal.out(fmt::format("dumped {} to {} ({}) in {}{}", subject_text(report),
                                   report.images_dir, size_text(report),
                                   format_seconds(report.total), downtime_text(report)));
  context.terminal.out(options.dump.after == AfterDump::kKill
                           ? "it has ended, and its GPU memory is free"
                           : state_text(report, options.target.text));
  context.terminal.debug(phases_text(report));
  if (report.dropped_zero_bytes > 0) {
    context.terminal.debug(fmt::format("{} of zeros that the driver had saved are left out",
                                       format_bytes(report.dropped_zero_bytes)));
  }
  return 0;
}

// Of the GPU memory that the mover copies.
void add_content_options(CLI::App& command, const std::shared_ptr<DumpArguments>& options) {
  command
      .add_option("--compress", options->compress,
                  "how the GPU memory of programs started by `stasis run` is written [none]")
      ->check(one_of({"none", "lz4", "zstd"}));
  // Given a number to count in, CLI11 sets it to 0 at once: the option would never be unset.
  command.add_flag_function(
      "--direct-io,!--no-direct-io",
      [options](std::int64_t count) { options->dump.direct_io = count > 0; },
      "write that memory past the page cache, where the file system can [where the job "
      "ends and its image is synced]");
  command
      .add_option("--base", options->dump.base,
                  "an earlier image of the same job, on the same file system: what is in it of "
                  "the GPU memory of programs started by `stasis run` is not written again")
      ->type_name("DIR");
}

void add_host_memory_options(CLI::App& command, const std::shared_ptr<DumpArguments>& options) {
  command
      .add_option_function<std::string>(
          "--host-memory",
          [options](const std::string& way) {
            options->dump.host_memory = way == "criu"       ? HostMemoryWay::kCriu
                                        : way == "parallel" ? HostMemoryWay::kParallel
                                                            : HostMemoryWay::kAutomatic;
          },
          "what copies large host memory: the tool (parallel) or CRIU [auto]")
      ->check(one_of({"auto", "criu", "parallel"}));
  command
      .add_option_function<std::string>(
          "--pre-copy",
          [options](const std::string& when) {
            options->dump.precopy = when == "on"    ? Precopy::kAlways
                                    : when == "off" ? Precopy::kNever
                                                    : Precopy::kAutomatic;
          },
          "with --leave-running: copy large host memory, and before a job's first save GPU memory, "
          "while the job runs, and only what has changed since while it stands still [auto]")
      ->check(one_of({"auto", "on", "off"}));
}

}  // namespace

Verb add_dump(CLI::App& app) {
  auto options = std::make_shared<DumpArguments>();
  CLI::App* command = app.add_subcommand(
      "dump", "suspend a process tree, save it to disk and end it (or let it go on)");
  add_target(*command, options->target);
  command
      ->add_option("DIR,-D,--images-dir", options->dump.images_dir,
                   "directory for the image; must not exist")
      ->required()
      ->type_name("DIR");
  auto* running =
      command->add_flag("--leave-running", options->leave_running, "let it go on afterwards");
  command->add_flag("--leave-suspended", options->leave_suspended, "leave it suspended")
      ->excludes(running);
  command
      ->add_option("--sync", options->sync,
                   "disk: end nothing before the image would survive a loss of power; none: as "
                   "fast as memory takes it [disk]")
      ->check(one_of({"disk", "none"}));
  add_content_options(*command, options);
  command->add_flag("-f,--force", options->dump.overwrite, "replace an existing image");
  command->add_flag("--ignore-obstacles", options->dump.ignore_obstacles,
                    "go on although the driver may refuse or lose the program's memory, and CRIU "
                    "what it is known not to dump (`stasis doctor PID`)");
  // The half of it that is about CRIU, as older versions called it.
  command->add_flag("--ignore-undumpable", options->dump.ignore_undumpable)->group("");
  add_timeout(*command, options->dump.timeout);
  add_path(*command, options->dump.path);
  add_attach_first(*command, options->attach);
  // Which takes seconds, in which the others would wait.
  options->group.add_to(*command)->excludes(command->get_option("--attach"));
  add_host_memory_options(*command, options);
  add_criu_path(*command, options->dump.criu_path);
  add_criu_dump_options(*command, options->dump.criu);
  return {command, [options](Context& context) { return run_dump(context, *options); }};
}

}  // namespace stasis::cli
