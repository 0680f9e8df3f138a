#include <map>
#include <memory>

#include <fmt/format.h>

#include "cli/verbs.h"

namespace stasis::cli {
namespace {

struct Options {
  Pid pid;
  DumpOptions dump;
  bool leave_running = false;
  bool leave_suspended = false;
  std::string sync = "disk";
  std::string cgroups = "ignore";
  std::string network_lock = "nftables";
};

// CRIU's own options, by CRIU's names.
void add_criu_options(CLI::App& command, Options& options) {
  CriuOptions& criu = options.dump.criu;
  constexpr const char* kGroup = "Options for CRIU";
  command.add_flag("--shell-job", criu.shell_job, "the job hangs on a terminal (set by itself)")
      ->group(kGroup);
  command.add_flag("--tcp-established", criu.tcp_established, "keep open TCP connections")
      ->group(kGroup);
  command.add_flag("--tcp-close", criu.tcp_close, "close open TCP connections at the restore")
      ->group(kGroup);
  command
      .add_option("--network-lock", options.network_lock,
                  "how packets of open TCP connections are held back: iptables, nftables or skip "
                  "[nftables]")
      ->check(CLI::IsMember({"iptables", "nftables", "skip"}))
      ->group(kGroup);
  command.add_flag("--file-locks", criu.file_locks, "the job holds file locks")->group(kGroup);
  command
      .add_flag("--link-remap,!--no-link-remap", criu.link_remap,
                "save files that are open and deleted, but linked elsewhere [on]")
      ->group(kGroup);
  command
      .add_option("--ghost-limit", criu.ghost_limit,
                  "largest deleted file, still open, to be saved; with K, M or G [256M]")
      ->transform(CLI::AsSizeValue(false))
      ->group(kGroup);
  command.add_flag("--ext-unix-sk", criu.ext_unix_sk, "allow unix sockets to other processes")
      ->group(kGroup);
  command.add_option("--external", criu.external, "a resource from outside, e.g. mnt[/data]:data")
      ->group(kGroup);
  command
      .add_option("--manage-cgroups", options.cgroups,
                  "ignore, none, props, soft, full or strict [ignore]")
      ->check(CLI::IsMember({"ignore", "none", "props", "soft", "full", "strict"}))
      ->group(kGroup);
}

Result<int> run(Context& context, Options& options) {
  if (options.leave_running) options.dump.after = AfterDump::kRunning;
  if (options.leave_suspended) options.dump.after = AfterDump::kSuspended;
  options.dump.sync = options.sync == "disk" ? SyncPolicy::kDisk : SyncPolicy::kNone;
  options.dump.criu.cgroups = cgroup_mode_from_name(options.cgroups).value_or(CgroupMode::kIgnore);
  options.dump.criu.network_lock =
      network_lock_from_name(options.network_lock).value_or(NetworkLock::kNftables);
  auto driver = context.load_driver();
  if (!driver) return fail(std::move(driver.error()));
  auto report = dump(context.environment(**driver), options.pid, options.dump);
  if (!report) return fail(std::move(report.error()));
  if (context.json) {
    nlohmann::json out = to_json(*report);
    out["images_dir"] = report->images_dir;
    out["image_bytes"] = report->image_bytes;
    context.print(out);
    return 0;
  }
  context.terminal.out(fmt::format("dumped {} to {} ({}) in {}", subject_text(*report),
                                   report->images_dir, format_bytes(report->image_bytes),
                                   format_seconds(report->total)));
  context.terminal.out(options.dump.after == AfterDump::kKill
                           ? "it has ended, and its GPU memory is free"
                           : state_text(*report));
  context.terminal.debug("driver path: " + phases_text(*report));
  return 0;
}

}  // namespace

Verb add_dump(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "dump", "suspend a process tree, save it to disk and end it (or let it go on)");
  add_pid(*command, options->pid);
  command
      ->add_option("-D,--images-dir", options->dump.images_dir,
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
      ->check(CLI::IsMember({"disk", "none"}));
  command->add_flag("-f,--force", options->dump.overwrite, "replace an existing image");
  add_timeout(*command, options->dump.timeout);
  add_criu_path(*command, options->dump.criu_path);
  add_criu_options(*command, *options);
  return {command, [options](Context& context) { return run(context, *options); }};
}

}  // namespace stasis::cli
