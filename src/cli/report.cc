#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <memory>
#include <system_error>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "base/scope_guard.h"
#include "cli/verbs.h"
#include "image/directory.h"
#include "job/registry.h"
#include "operations/image_logs.h"
#include "operations/image_report.h"
#include "report/page.h"

namespace stasis::cli {
namespace {

struct ReportArguments {
  InspectOptions inspect;
  std::optional<std::string> device_map;
  std::string output;
  bool overwrite = false;
};

Result<std::string> random_letters() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return fail(errno_error("cannot get random bytes", errno));
  return fmt::format("{:02x}", fmt::join(bytes, ""));
}

std::string now_text() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return utc_text(now);
}

// Where the page is to go, once that is known to be possible: nothing is worse than to read a
// terabyte first and be refused then. Nothing is written in an image, where the page would be taken
// for damage.
Result<DirectoryEntry> probe_output(const ReportArguments& arguments) {
  auto entry = split_path(arguments.output);
  if (!entry) {
    Error& error = entry.error();
    if (error.code == ErrorCode::kUsage) error.message = arguments.output + " is no file's name";
    if (error.remedy.empty() || error.code == ErrorCode::kUsage)
      error.remedy = "name a file in a directory that exists, or - for standard output";
    return entry;
  }
  std::error_code none;
  const auto image = std::filesystem::canonical(arguments.inspect.images_dir, none).string();
  if (!none && (entry->parent_path + "/").starts_with(image + "/")) {
    return fail(ErrorCode::kUsage,
                fmt::format("{} is in the image, which would no longer be whole", entry->path()),
                "name a file elsewhere");
  }
  struct stat info = {};
  if (::fstatat(entry->parent.get(), entry->name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0)
    return entry;
  if (!S_ISREG(info.st_mode)) {
    return fail(ErrorCode::kUsage, fmt::format("{} is there, and no regular file", entry->path()),
                "name another file, or - for standard output");
  }
  if (!arguments.overwrite) {
    return fail(ErrorCode::kUsage, fmt::format("{} is there already", entry->path()),
                "name another file, or replace it with --force");
  }
  return entry;
}

// All of the page under its name, for its owner alone, or nothing at all.
Result<void> write_page(const DirectoryEntry& output, const std::string& page,
                        const std::string& letters, bool overwrite) {
  const int parent = output.parent.get();
  const std::string temporary = fmt::format(".stasis-report-{}", letters);
  const std::string path = output.path();
  auto file = open_file(parent, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
  if (!file) {
    return fail({file.error().code, fmt::format("cannot write {}: {}", path, file.error().message),
                 "name a file in a directory that may be written"});
  }
  ScopeGuard remove([&] { (void)::unlinkat(parent, temporary.c_str(), 0); });
  STASIS_TRY(write_all(file->get(), page.data(), page.size(), path));
  // Some file systems say only now that they are full.
  if (::fsync(file->get()) != 0) return fail(errno_error("cannot write " + path, errno));
  STASIS_TRY(file->close(path));
  if (overwrite) {
    if (::renameat(parent, temporary.c_str(), parent, output.name.c_str()) != 0)
      return fail(errno_error("cannot write " + path, errno));
    remove.dismiss();
    return {};
  }
  // Over nothing, also on file systems that have no RENAME_NOREPLACE (NFS).
  if (::linkat(parent, temporary.c_str(), parent, output.name.c_str(), 0) == 0) return {};
  if (errno != EPERM && errno != EOPNOTSUPP && errno != EMLINK)
    return fail(errno_error("cannot write " + path, errno));
  // No hard links (FAT).
  if (::renameat2(parent, temporary.c_str(), parent, output.name.c_str(), RENAME_NOREPLACE) != 0)
    return fail(errno_error("cannot write " + path, errno));
  remove.dismiss();
  return {};
}

// A job in namespaces of its own leaves the process numbers here free: its name says that it runs.
bool is_running_job(const Manifest& manifest) {
  if (!is_for_a_job(manifest) || !manifest.job || manifest.job_name.empty()) return false;
  const auto job = job::find_job(manifest.job_name);
  return job && job->command == manifest.job->command;
}

// Why an image cannot be restored here. A job that runs on, as after a `--leave-running` dump, has
// its process numbers, its ports and its memory, which come last: the page is no less for them.
class Obstruction {
 public:
  explicit Obstruction(const ImageReport& report) {
    for (const RestoreCheck& check : report.checks)
      if (check.error && check.error->code == ErrorCode::kPidInUse) numbers_ = &check;
    runs_on_ = numbers_ != nullptr || is_running_job(report.manifest);
    const RestoreCheck* of_job = numbers_;
    for (const RestoreCheck& check : report.checks) {
      if (!check.error) continue;
      if (!is_of_running_job(*check.error, check.id)) {
        reason_ = &check;
        return;
      }
      if (of_job == nullptr) of_job = &check;
    }
    reason_ = of_job;
    is_of_job_ = true;
  }

  // Null: nothing is in the way.
  const RestoreCheck* reason() const { return reason_; }
  bool is_only_the_job() const { return reason_ != nullptr && is_of_job_; }
  // Inspect's exit status, or 0.
  int status() const {
    return reason_ == nullptr || is_of_job_ ? 0 : exit_status(reason_->error->code);
  }

 private:
  bool is_of_running_job(const Error& error, std::string_view id) const {
    if (error.code == ErrorCode::kPidInUse) return true;
    return runs_on_ &&
           (error.code == ErrorCode::kOutOfGpuMemory || error.code == ErrorCode::kOutOfHostMemory ||
            (error.code == ErrorCode::kBusy && id == "tcp-ports"));
  }

  const RestoreCheck* numbers_ = nullptr;
  bool runs_on_ = false;
  const RestoreCheck* reason_ = nullptr;
  bool is_of_job_ = false;
};

Result<std::string> make_page(const ReportArguments& arguments, const ImageReport& image,
                              const std::string& letters) {
  report::Subject subject{image, arguments.inspect.verify, {}, {}, now_text(), letters};
  auto logs = find_image_logs({arguments.inspect.images_dir});
  if (!logs) {
    subject.no_logs = std::move(logs.error());
  } else {
    for (ImageLog& log : *logs) {
      auto content = read_image_log(log);
      subject.logs.push_back({std::move(log), std::move(content)});
    }
  }
  return report::render_page(subject);
}

Result<int> run_report(Context& context, ReportArguments& arguments) {
  find_image(context, arguments.inspect.images_dir);
  const bool to_output = arguments.output == "-";
  if (to_output && context.json) {
    return fail(ErrorCode::kUsage, "--json and --output - exclude each other",
                "name a file for the page");
  }
  // Instead of being ended by `ulimit -f`, with half a page left behind.
  std::signal(SIGXFSZ, SIG_IGN);
  std::optional<DirectoryEntry> output;
  if (!to_output) {
    STASIS_TRY_ASSIGN(auto looked, probe_output(arguments));
    output = std::move(looked);
  }
  STASIS_TRY_ASSIGN(auto image, inspect_image(context, arguments.inspect, arguments.device_map));
  STASIS_TRY_ASSIGN(const auto letters, random_letters());
  STASIS_TRY_ASSIGN(const auto page, make_page(arguments, image, letters));
  const Obstruction obstruction(image);
  if (to_output) {
    context.terminal.out_block(page);
    return obstruction.status();
  }
  STASIS_TRY(write_page(*output, page, letters, arguments.overwrite));
  std::size_t in_the_way = 0;
  for (const RestoreCheck& check : image.checks)
    in_the_way += check.error ? 1 : 0;
  if (context.json) {
    context.print({{"ok", true},
                   {"report", output->path()},
                   {"images_dir", image.path},
                   {"restorable", in_the_way == 0},
                   {"needs_stasis_run", is_for_a_job(image.manifest)},
                   {"exit_status", obstruction.status()}});
    return obstruction.status();
  }
  context.terminal.out(fmt::format("wrote {} ({})", output->path(), format_bytes(page.size())));
  if (const RestoreCheck* reason = obstruction.reason(); reason != nullptr) {
    const Error& error = *reason->error;
    context.terminal.out(
        fmt::format("the image cannot be restored here{}: {} ({}){}",
                    obstruction.is_only_the_job() ? " as long as the job runs" : "",
                    error.to_string(), error_code_name(error.code),
                    in_the_way > 1 ? fmt::format("; {} more in the page", in_the_way - 1) : ""));
  }
  return obstruction.status();
}

}  // namespace

Verb add_report(CLI::App& app) {
  auto arguments = std::make_shared<ReportArguments>();
  CLI::App* command = app.add_subcommand(
      "report",
      "write what inspect says of an image as one HTML page; the exit status is inspect's, or 0 if "
      "only the job itself, which still runs, is in the way. A damaged image gets a page that says "
      "so, one without a "
      "manifest that can be read gets none");
  command->add_option("DIR,-D,--images-dir", arguments->inspect.images_dir, kImageHelp)
      ->required()
      ->type_name("DIR");
  command
      ->add_option("-o,--output", arguments->output,
                   "the page, which only its owner may read; - for standard output")
      ->required()
      ->type_name("FILE");
  command->add_flag("-f,--force", arguments->overwrite, "replace an existing file");
  add_verify_flag(*command, arguments->inspect.verify);
  add_device_map(*command, arguments->device_map);
  add_criu_path(*command, arguments->inspect.criu_path);
  return {command, [arguments](Context& context) { return run_report(context, *arguments); }, false,
          true, true};
}

}  // namespace stasis::cli
