#include "report/metrics.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <ctime>
#include <functional>
#include <random>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include <fmt/format.h>

namespace stasis {
namespace {

constexpr std::size_t kMostText = std::size_t{1} << 20;

struct Family {
  std::string_view name;
  std::string_view type;
  std::string_view help;
};
constexpr Family kOperations{"stasis_operations_total", "counter",
                             "Operations, by verb and result: ok, or the code of the error."};
constexpr Family kDuration{"stasis_operation_duration_seconds", "histogram",
                           "How long operations that succeeded took."};
constexpr Family kDowntime{"stasis_downtime_seconds", "histogram",
                           "How long programs stood still in an operation."};
constexpr Family kPhases{"stasis_phase_seconds_total", "counter",
                         "Seconds in the phases of operations that succeeded."};
constexpr Family kGpuBytes{"stasis_gpu_bytes_total", "counter",
                           "GPU memory of the programs, before the operation."};
constexpr Family kDirectBytes{"stasis_direct_bytes_total", "counter",
                              "GPU memory that was copied past the driver."};
constexpr Family kImageBytes{"stasis_image_bytes_total", "counter", "Bytes of images."};
constexpr Family kWrittenBytes{"stasis_written_bytes_total", "counter",
                               "Bytes of images that no earlier image had."};
constexpr Family kSuccess{"stasis_last_success_timestamp_seconds", "gauge",
                          "When the last operation that succeeded ended."};
constexpr Family kFailure{"stasis_last_failure_timestamp_seconds", "gauge",
                          "When the last operation that failed ended."};
constexpr std::array kFamilies = {&kOperations, &kDuration,    &kDowntime,   &kPhases,
                                  &kGpuBytes,   &kDirectBytes, &kImageBytes, &kWrittenBytes,
                                  &kSuccess,    &kFailure};
// Seconds.
constexpr std::array kBuckets = {0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0};

std::string escaped(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

// The samples of a file, in its order: "stasis_operations_total{uid="0",...}" and a value.
class Samples {
 public:
  // What is none of ours is left out.
  void read(const std::string& text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      const std::size_t end = line.rfind(' ');
      if (!line.starts_with("stasis_") || end == std::string::npos) continue;
      double value = 0;
      const char* const last = line.data() + line.size();
      const auto parsed = std::from_chars(line.data() + end + 1, last, value);
      if (parsed.ec == std::errc() && parsed.ptr == last) at(line.substr(0, end)) = value;
    }
  }

  double& at(const std::string& name) {
    const auto found = std::find_if(samples_.begin(), samples_.end(),
                                    [&](const auto& sample) { return sample.first == name; });
    return found != samples_.end() ? found->second : samples_.emplace_back(name, 0).second;
  }

  std::string text() const {
    std::string out;
    for (const Family* family : kFamilies) {
      std::string lines;
      for (const auto& [name, value] : samples_)
        if (is_of(*family, name)) lines += fmt::format("{} {}\n", name, value);
      if (lines.empty()) continue;
      out += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n{3}", family->name, family->help,
                         family->type, lines);
    }
    return out;
  }

 private:
  static bool is_of(const Family& family, std::string_view sample) {
    if (!sample.starts_with(family.name)) return false;
    sample.remove_prefix(family.name.size());
    if (family.type == "histogram") {
      for (const std::string_view part : {"_bucket{", "_sum{", "_count{"})
        if (sample.starts_with(part)) return true;
      return false;
    }
    return sample.starts_with("{");
  }

  std::vector<std::pair<std::string, double>> samples_;
};

// The samples of one user and verb.
class OfVerb {
 public:
  OfVerb(Samples& samples, const std::string& verb)
      : samples_(samples),
        labels_(fmt::format("uid=\"{}\",verb=\"{}\"", ::geteuid(), escaped(verb))) {}

  double& value(const Family& family, const std::string& more = {}) {
    return samples_.at(fmt::format("{}{{{}{}}}", family.name, labels_, more));
  }

  void observe(const Family& family, Seconds seconds) {
    const auto bucket = [&](const std::string& limit) -> double& {
      return samples_.at(fmt::format("{}_bucket{{{},le=\"{}\"}}", family.name, labels_, limit));
    };
    for (const double limit : kBuckets)
      bucket(fmt::format("{}", limit)) += seconds.count() <= limit ? 1 : 0;
    bucket("+Inf") += 1;
    samples_.at(fmt::format("{}_sum{{{}}}", family.name, labels_)) += seconds.count();
    samples_.at(fmt::format("{}_count{{{}}}", family.name, labels_)) += 1;
  }

 private:
  Samples& samples_;
  std::string labels_;
};

// Another user who may read the directory can hold its lock.
Result<void> lock_for_a_second(const UniqueFd& directory) {
  constexpr std::chrono::milliseconds kPause{10};
  const auto deadline = Clock::now() + std::chrono::seconds(1);
  while (::flock(directory.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR)
      return fail(errno_error("cannot lock the directory of the metrics", errno));
    if (Clock::now() >= deadline)
      return fail(ErrorCode::kBusy, "the directory of the metrics is locked by another program",
                  "see which (`lslocks`)");
    std::this_thread::sleep_for(kPause);
  }
  return {};
}

Result<std::string> read_own(const UniqueFd& directory, const std::string& name) {
  auto file = open_file(directory.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
  if (!file && ::faccessat(directory.get(), name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) != 0 &&
      errno == ENOENT)
    return std::string();
  if (!file) return fail(std::move(file.error()));
  struct stat info {};
  if (::fstat(file->get(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != ::geteuid())
    return fail(ErrorCode::kNotPermitted, name + " there is not a file of ours",
                "remove it, or name another directory");
  return read_file(*file, name, kMostText);
}

Result<void> replace(const UniqueFd& directory, const std::string& name, const std::string& text) {
  std::string next = "." + name + ".new";  // the collector reads "*.prom"
  // Where others may write, what has that name may be one that is not ours to remove.
  if (::unlinkat(directory.get(), next.c_str(), 0) != 0 && errno != ENOENT)
    next += fmt::format("-{:08x}", std::random_device()());
  STASIS_TRY_ASSIGN(
      auto file, open_file(directory.get(), next, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0644));
  auto done = write_all(file.get(), text.data(), text.size(), next);
  if (done) done = file.close(next);
  if (done && ::renameat(directory.get(), next.c_str(), directory.get(), name.c_str()) != 0)
    done = fail(errno_error("cannot rename " + next, errno));
  if (!done) (void)::unlinkat(directory.get(), next.c_str(), 0);
  return done;
}

Result<void> change(const UniqueFd& directory, const std::function<void(Samples&)>& add) {
  const uid_t user = ::geteuid();
  const std::string name = user == 0 ? "stasis.prom" : fmt::format("stasis-{}.prom", user);
  // One lock for each, so that the descriptor's owner may add from several threads.
  STASIS_TRY_ASSIGN(const auto locked, open_file(directory.get(), ".", O_RDONLY | O_DIRECTORY));
  STASIS_TRY(lock_for_a_second(locked));
  STASIS_TRY_ASSIGN(const auto text, read_own(directory, name));
  Samples samples;
  samples.read(text);
  add(samples);
  return replace(directory, name, samples.text());
}

double now() { return static_cast<double>(std::time(nullptr)); }

}  // namespace

OperationFigures figures_of(const Report& report) {
  OperationFigures out{report.total, report.downtime, report.phases};
  for (const ProcessReport& process : report.processes)
    out.gpu_bytes += process.gpu_bytes;
  out.direct_bytes = report.direct_bytes;
  return out;
}

OperationFigures figures_of(const DumpReport& report) {
  OperationFigures out = figures_of(static_cast<const Report&>(report));
  out.image_bytes = report.image_bytes;
  out.written_bytes = report.written_bytes;
  return out;
}

OperationFigures figures_of(const RestoreReport& report) {
  OperationFigures out = figures_of(static_cast<const Report&>(report));
  out.image_bytes = report.image_bytes;
  return out;
}

Result<UniqueFd> open_metrics(const std::string& directory) {
  auto out = open_file(AT_FDCWD, directory, O_RDONLY | O_DIRECTORY);
  if (out) return out;
  return fail(ErrorCode::kUsage, "no metrics: " + out.error().message,
              "make the directory, or name the one of node_exporter's textfile collector");
}

Result<void> add_metrics(const UniqueFd& directory, const std::string& verb,
                         const std::optional<OperationFigures>& figures) {
  return change(directory, [&](Samples& samples) {
    OfVerb of(samples, verb);
    of.value(kOperations, ",result=\"ok\"") += 1;
    of.value(kSuccess) = now();
    if (!figures) return;
    of.observe(kDuration, figures->total);
    if (figures->downtime) of.observe(kDowntime, *figures->downtime);
    for (const PhaseRecord& phase : figures->phases)
      of.value(kPhases, fmt::format(",phase=\"{}\"", escaped(phase.name))) += phase.seconds;
    const auto count = [&](const Family& family, std::uint64_t bytes) {
      if (bytes > 0) of.value(family) += static_cast<double>(bytes);
    };
    count(kGpuBytes, figures->gpu_bytes);
    count(kDirectBytes, figures->direct_bytes);
    count(kImageBytes, figures->image_bytes);
    count(kWrittenBytes, figures->written_bytes);
  });
}

Result<void> add_metrics(const UniqueFd& directory, const std::string& verb, const Error& error) {
  return change(directory, [&](Samples& samples) {
    OfVerb of(samples, verb);
    of.value(kOperations, fmt::format(",result=\"{}\"", escaped(error_code_name(error.code)))) += 1;
    of.value(kFailure) = now();
  });
}

}  // namespace stasis
