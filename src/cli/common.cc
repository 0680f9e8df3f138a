#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "cli/verbs.h"
#include "job/images.h"

namespace stasis::cli {

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
  if (!notes.empty()) object["notes"] = notes;
  terminal.out_block(json_text(object));
}

namespace {

using std::chrono::milliseconds;

// "90", "90s", "10m", "2h", "500ms". Not more than the 32 bits of milliseconds that some drivers
// take, with which times of days are no times to wait.
milliseconds parse_duration(const std::string& option, const std::string& text,
                            milliseconds unit_if_none) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint32_t>::max();
  std::uint64_t factor = 0;
  if (unit.empty()) factor = static_cast<std::uint64_t>(unit_if_none.count());
  if (unit == "ms") factor = 1;
  if (unit == "s") factor = 1000;
  if (unit == "m") factor = 60'000;
  if (unit == "h") factor = 3'600'000;
  if (error != std::errc() || factor == 0 || value > kMost / factor) {
    throw CLI::ValidationError(
        option,
        fmt::format("'{}' is no duration; write e.g. 90s, 10m or 2h, 49 days at most", text));
  }
  return milliseconds(value * factor);
}

}  // namespace

CLI::Option* add_duration(CLI::App& command, const std::string& name, milliseconds unit_if_none,
                          std::function<void(milliseconds)> take, const std::string& description) {
  const std::string option = name.substr(name.rfind(',') + 1);
  return command
      .add_option_function<std::string>(
          name,
          [option, unit_if_none, take = std::move(take)](const std::string& text) {
            take(parse_duration(option, text, unit_if_none));
          },
          description)
      ->type_name("TIME");
}

void add_timeout(CLI::App& command, std::chrono::milliseconds& timeout) {
  add_duration(
      command, "-t,--timeout", std::chrono::milliseconds(1),
      [&timeout](std::chrono::milliseconds value) { timeout = value; },
      fmt::format("how long to wait for GPU work in flight, e.g. 10s, or milliseconds; 0 "
                  "waits for ever [{}]",
                  timeout.count()));
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
      ->type_name("PATH")
      ->check(CLI::IsMember({"driver", "direct"}));
}

namespace {

Result<std::uint64_t> ring_of(std::string text) {
  std::uint64_t bytes = 0;
  try {
    // The library's own words are about types and factors.
    if (CLI::AsSizeValue(false)(text).empty() && CLI::detail::lexical_cast(text, bytes) &&
        bytes >= direct::kLeastRing && bytes <= direct::kMostRing)
      return bytes;
  } catch (const CLI::ValidationError&) {
  }
  return fail(ErrorCode::kUsage, "");
}

}  // namespace

Result<std::uint64_t> ring_of_environment() {
  const char* given = std::getenv("STASIS_RING");
  if (given == nullptr || *given == '\0') return direct::MoverOptions().ring_bytes;
  auto ring = ring_of(given);
  if (ring) return ring;
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
          "pinned host memory that the direct path copies through, for each GPU; with K, M or G, "
          "2M to 2G; a resume or a restore takes it for two GPUs, and 32M at least [STASIS_RING, "
          "64M]")
      ->type_name("SIZE");
}

void add_driver_timeout(CLI::App& command, std::optional<DriverTimeouts>& timeouts) {
  add_duration(
      command, "--driver-timeout", std::chrono::milliseconds(1),
      [&timeouts](std::chrono::milliseconds value) {
        if (value.count() == 0) return timeouts.reset();
        timeouts = {value, value};
      },
      "the silence after which a call of the driver is given up, e.g. 10s, or milliseconds; 0 to "
      "wait for ever; a checkpoint, a restore or a copy by the direct path is silent while it "
      "shows no sign of work [10000, for those 60000]");
}

void add_time_limit(CLI::App& command, std::chrono::milliseconds& limit, const std::string& after) {
  add_duration(
      command, "-t,--timeout", std::chrono::milliseconds(1),
      [&limit](std::chrono::milliseconds value) { limit = value; },
      fmt::format("the time, e.g. 10m, or milliseconds, after which {} [{}]", after,
                  limit.count() > 0 ? std::to_string(limit.count()) : "no limit"));
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
  const auto newest = job::newest_image(images_dir);
  if (!newest) return;
  images_dir = *newest;
  context.note(fmt::format("the newest image of that job: {}", images_dir));
}

void add_verify_flag(CLI::App& command, bool& verify) {
  command.add_flag("--verify", verify, "read every byte and compare checksums");
}

std::string phases_text(const Report& report) {
  std::string out = fmt::format("{} path: ", path_name(report));
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

std::string state_text(const Report& report) {
  const auto words = [&](CudaState state) -> std::string {
    const int root = report.root.value;
    switch (state) {
      case CudaState::kRunning:
        return "runs on";
      case CudaState::kLocked:
        return fmt::format("is locked; `stasis resume {}` lets it run", root);
      case CudaState::kCheckpointed:
        return fmt::format("is suspended; `stasis resume {}` brings it back", root);
      case CudaState::kFailed:
        return "has failed";
    }
    return {};
  };
  std::vector<std::optional<CudaState>> states;
  std::string each;
  for (const ProcessReport& process : report.processes) {
    if (!process.cuda) continue;
    states.push_back(process.state);
    each += fmt::format("{}process {} {}", each.empty() ? "" : ", ", process.pid.value,
                        process.state ? fmt::format("is {}", cuda_state_name(*process.state))
                                      : "has ended or does not answer");
  }
  const bool same = std::all_of(states.begin(), states.end(),
                                [&](const auto& state) { return state == states.front(); });
  return same && !states.empty() && states.front() ? "it " + words(*states.front()) : each;
}

}  // namespace stasis::cli
