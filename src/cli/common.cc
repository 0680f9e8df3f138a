#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "base/listing.h"
#include "cli/help.h"
#include "cli/verbs.h"
#include "job/images.h"

namespace stasis::cli {

namespace {

// As an option takes it: "10s", "500ms".
std::string duration_text(std::chrono::milliseconds time) {
  return time.count() % 1000 == 0 ? fmt::format("{}s", time.count() / 1000)
                                  : fmt::format("{}ms", time.count());
}

}  // namespace

Result<std::unique_ptr<Driver>> Context::load_driver(Movers movers) {
  auto driver = session.load_driver(movers);
  if (driver && (*driver)->info().simulated && !json) {
    terminal.note("this is the simulated GPU (" + (*driver)->info().library + ")");
  }
  return driver;
}

void Context::note(const std::string& text) {
  terminal.note(text);
  notes.push_back(text);
}

void Context::print(nlohmann::json object) const {
  object["notes"] = notes;
  object["schema_version"] = kSchemaVersion;
  terminal.out_block(json_text(object));
}

std::optional<std::uint64_t> number_with_unit(std::string text,
                                              const CLI::AsNumberWithUnit& units) {
  const auto digit = [&](std::size_t at) {
    return at < text.size() && text[at] >= '0' && text[at] <= '9';
  };
  if (!digit(0)) return std::nullopt;
  while (text[0] == '0' && digit(1))
    text.erase(0, 1);
  std::uint64_t value = 0;
  try {
    if (units(text).empty() && CLI::detail::lexical_cast(text, value)) return value;
  } catch (const CLI::ValidationError&) {
    // Its words are about types and factors; the callers say what they take.
  }
  return std::nullopt;
}

std::optional<std::chrono::milliseconds> duration_of(const std::string& text,
                                                     const std::string& unit_if_none) {
  // Some drivers take 32 bits of milliseconds.
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  const std::map<std::string, std::uint64_t> units = {
      {"ms", 1}, {"s", 1000}, {"m", 60'000}, {"h", 3'600'000}};
  const bool has_unit = text.empty() || text.back() < '0' || text.back() > '9';
  const auto value =
      number_with_unit(has_unit ? text : text + unit_if_none,
                       CLI::AsNumberWithUnit(units, CLI::AsNumberWithUnit::CASE_SENSITIVE));
  if (!value || *value > kMost) return std::nullopt;
  return std::chrono::milliseconds(*value);
}

CLI::Option* add_duration(CLI::App& command, const std::string& name,
                          const std::string& unit_if_none,
                          std::function<void(std::chrono::milliseconds)> take,
                          const std::string& description) {
  const std::string option = name.substr(name.rfind(',') + 1);
  const auto read = [option, unit_if_none, take = std::move(take)](const std::string& text) {
    const auto value = duration_of(text, unit_if_none);
    if (!value) {
      throw CLI::ValidationError(
          option, fmt::format("'{}' is no duration; take a whole number with ms, s, m or h, e.g. "
                              "90s, 10m or 2h, 49 days at most",
                              text));
    }
    take(*value);
  };
  return command.add_option_function<std::string>(name, read, description)->type_name("TIME");
}

void add_timeout(CLI::App& command, std::chrono::milliseconds& timeout) {
  add_duration(
      command, "-t,--timeout", "ms",
      [&timeout](std::chrono::milliseconds value) { timeout = value; },
      fmt::format("how long to wait for GPU work in flight, e.g. 10s, or milliseconds; 0 "
                  "waits for ever [{}]",
                  duration_text(timeout)));
}

void add_path(CLI::App& command, MemoryPath& path) {
  command
      .add_option_function<std::string>(
          "--path",
          [&path](const std::string& name) {
            path = name == "direct" ? MemoryPath::kDirect : MemoryPath::kDriver;
          },
          "how GPU memory is moved: driver leaves the agents (`stasis run`) alone; with direct, "
          "what they cannot give away is an error [direct where it can be, else driver]")
      ->check(one_of({"driver", "direct"}));
}

namespace {

std::optional<std::uint64_t> ring_of(const std::string& text) {
  const auto bytes = number_with_unit(text, CLI::AsSizeValue(false));
  return bytes && *bytes >= direct::kLeastRing && *bytes <= direct::kMostRing ? bytes
                                                                              : std::nullopt;
}

}  // namespace

Result<std::uint64_t> ring_of_environment() {
  const char* given = std::getenv("STASIS_RING");
  if (given == nullptr || *given == '\0') return direct::MoverOptions().ring_bytes;
  if (const auto ring = ring_of(given)) return *ring;
  return fail(ErrorCode::kUsage, fmt::format("STASIS_RING={} is no ring to copy through", given),
              "take 2M to 2G, or unset it");
}

CLI::Option* add_ring(CLI::App& command, std::uint64_t& bytes) {
  return command
      .add_option_function<std::string>(
          "--ring",
          [&bytes](const std::string& value) {
            const auto ring = ring_of(value);
            if (!ring) {
              throw CLI::ValidationError(
                  "--ring", fmt::format("'{}' is no ring to copy through; take 2M to 2G", value));
            }
            bytes = *ring;
          },
          "pinned host memory that the direct path copies through at most, for each GPU; with K, M "
          "or G, 2M to 2G; a resume or a restore takes up to two GPUs' or 32M [STASIS_RING, 64M]")
      ->type_name("SIZE");
}

void add_driver_timeout(CLI::App& command, std::optional<DriverTimeouts>& timeouts) {
  add_duration(
      command, "--driver-timeout", "ms",
      [&timeouts](std::chrono::milliseconds value) {
        if (value.count() == 0) return timeouts.reset();
        timeouts = {value, value};
      },
      "the silence after which a call of the driver is given up, e.g. 10s, or milliseconds; 0 to "
      "wait for ever; a checkpoint, a restore or a copy by the direct path is silent while it "
      "shows no sign of work [10s, for those 60s]");
}

void add_time_limit(CLI::App& command, std::chrono::milliseconds& limit, const std::string& after) {
  add_duration(
      command, "-t,--timeout", "ms", [&limit](std::chrono::milliseconds value) { limit = value; },
      fmt::format("the time, e.g. 10m, or milliseconds, after which {} [{}]", after,
                  limit.count() > 0 ? duration_text(limit) : "no limit"));
}

void add_device_map(CLI::App& command, std::optional<std::string>& text) {
  command
      .add_option("-d,--device-map", text,
                  "which GPU takes the place of which: UUID, index or PCI address on each side; "
                  "GPUs not named stay where they are if they can")
      ->type_name("OLD=NEW,...");
}

void add_criu_path(CLI::App& command, std::optional<std::string>& path) {
  command
      .add_option("--criu", path, "the criu program to use [STASIS_CRIU, PATH, /opt/stasis/criu]")
      ->type_name("FILE");
}

void find_image(Context& context, std::string& images_dir) {
  std::string image = job::image_in(images_dir);
  if (image == images_dir) return;
  images_dir = std::move(image);
  context.note(fmt::format("the newest image of that job: {}", images_dir));
}

void add_verify_flag(CLI::App& command, bool& verify) {
  command.add_flag("--verify", verify,
                   "also compare GPU memory and pages with their checksums, as `stasis verify` "
                   "does; all else in the image is compared anyway");
}

std::string phases_text(const Report& report) {
  const char* path = path_name(report);
  std::string out = path != nullptr ? fmt::format("{} path: ", path) : std::string();
  bool first = true;
  for (const PhaseRecord& phase : report.phases) {
    out += fmt::format("{}{} {}", std::exchange(first, false) ? "" : ", ", phase.name,
                       format_seconds(Seconds(phase.seconds)));
  }
  return out;
}

std::string downtime_text(const Report& report) {
  return report.downtime ? fmt::format(", standing still for {}", format_seconds(*report.downtime))
                         : std::string();
}

void tell_error(const Context& context, const Error& error, int status) {
  nlohmann::json out = to_json(error);
  out["error"]["exit_status"] = status;
  if (context.refusals.valid()) {
    const std::string text = json_text(out);
    if (write_all(context.refusals.get(), text.data(), text.size(), "the pipe for refusals"))
      return;
  }
  if (context.json) context.print(std::move(out));
  if (!context.json || context.terminal.lost_output() || context.terminal.logs())
    context.terminal.error(error);
}

std::string state_text(const Report& report, const std::string& target) {
  const auto words = [&](CudaState state) -> std::string {
    switch (state) {
      case CudaState::kRunning:
        return "runs on";
      case CudaState::kLocked:
        return fmt::format("is locked; `stasis resume {}` lets it run", target);
      case CudaState::kCheckpointed:
        return fmt::format("is suspended; `stasis resume {}` brings it back", target);
      case CudaState::kFailed:
        return "has failed";
    }
    return {};
  };
  std::set<CudaState> states;
  std::vector<std::string> each;
  std::vector<std::string> silent;
  for (const ProcessReport& process : report.processes) {
    if (!process.cuda) continue;
    if (process.state) {
      states.insert(*process.state);
      each.push_back(
          fmt::format("process {} is {}", process.pid.value, cuda_state_name(*process.state)));
    } else {
      silent.push_back(fmt::format("process {} has ended or does not answer", process.pid.value));
    }
  }
  // Of a tree a process may end at any time.
  if (states.size() == 1) each = {"it " + words(*states.begin())};
  each.insert(each.end(), silent.begin(), silent.end());
  return listed(each, ", ", each.size());
}

}  // namespace stasis::cli
