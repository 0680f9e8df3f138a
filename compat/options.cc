#include "options.h"

#include <getopt.h>

#include <charconv>
#include <cstdint>
#include <limits>
#include <string_view>

namespace stasis::compat {
namespace {

constexpr const char* kUnknownOption =
    "Invalid option(s) or option(s) not supported by this CUDA Driver";

// What getopt_long returns for the long options that have no letter.
enum LongOnly { kGetStateOption = 256, kGetRestoreTidOption, kActionOption, kToggleOption };

// The options as they were given; the last value of a repeated one counts.
struct Given {
  bool help = false;
  std::vector<Operation> operations;
  std::optional<std::string> pid;
  std::optional<std::string> action;
  std::optional<std::string> timeout;
  std::optional<std::string> device_map;
  std::vector<std::string> job;

  void add(Operation operation) {
    for (Operation seen : operations) {
      if (seen == operation) return;
    }
    operations.push_back(operation);
  }
};

tl::unexpected<Error> refuse(std::string reason) {
  return fail(ErrorCode::kUsage, std::move(reason));
}

// A number written in decimal digits and nothing else. Nothing if it is none; the largest T if it
// is larger than that.
template <class T>
std::optional<T> decimal(std::string_view text) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string_view::npos) {
    return std::nullopt;
  }
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() ? value : std::numeric_limits<T>::max();
}

struct Known {
  std::vector<option> longs;
  std::string shorts;
};

Known known_options(const Features& features) {
  std::vector<option> longs = {
      {"get-state", no_argument, nullptr, kGetStateOption},
      {"get-restore-tid", no_argument, nullptr, kGetRestoreTidOption},
      {"action", required_argument, nullptr, kActionOption},
      {"toggle", no_argument, nullptr, kToggleOption},
      {"pid", required_argument, nullptr, 'p'},
      {"timeout", required_argument, nullptr, 't'},
      {"help", no_argument, nullptr, 'h'},
  };
  std::string shorts = "p:t:h";
  if (features.device_map) {
    longs.push_back({"device-map", required_argument, nullptr, 'd'});
    shorts += "d:";
  }
  if (features.jobs) {
    longs.push_back({"launch-job", required_argument, nullptr, 'j'});
    shorts += "j:";
  }
  longs.push_back({nullptr, 0, nullptr, 0});
  return {std::move(longs), std::move(shorts)};
}

Result<Given> scan(int argc, char** argv, const Features& features) {
  const auto [longs, shorts] = known_options(features);
  Given given;
  optind = 0;  // GNU's way to start afresh
  // NOLINTNEXTLINE(concurrency-mt-unsafe)
  for (int got = 0; (got = getopt_long(argc, argv, shorts.c_str(), longs.data(), nullptr)) != -1;) {
    switch (got) {
      case kGetStateOption:
        given.add(Operation::kGetState);
        break;
      case kGetRestoreTidOption:
        given.add(Operation::kGetRestoreTid);
        break;
      case kActionOption:
        given.add(Operation::kAction);
        given.action = optarg;
        break;
      case kToggleOption:
        given.add(Operation::kToggle);
        break;
      case 'p':
        given.pid = optarg;
        break;
      case 't':
        given.timeout = optarg;
        break;
      case 'd':
        given.device_map = optarg;
        break;
      case 'j':
        // Everything from here on belongs to the program.
        given.add(Operation::kLaunchJob);
        given.job.emplace_back(optarg);
        given.job.insert(given.job.end(), argv + optind, argv + argc);
        return given;
      case 'h':
        given.help = true;
        return given;
      default:
        return refuse(kUnknownOption);
    }
  }
  return given;
}

Result<Action> parse_action(const std::string& name) {
  for (Action action : {Action::kLock, Action::kCheckpoint, Action::kRestore, Action::kUnlock}) {
    if (name == action_name(action)) return action;
  }
  return refuse("Invalid process state");
}

// "OLD=NEW,OLD=NEW,...", UUIDs on both sides. Whether it is complete and one to one is the driver's
// to say.
Result<std::vector<GpuPair>> parse_device_map(std::string_view text) {
  std::vector<GpuPair> pairs;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view item = text.substr(begin, end - begin);
    const std::size_t equals = std::min(item.find('='), item.size());
    const auto from = GpuUuid::parse(item.substr(0, equals));
    const auto to = GpuUuid::parse(item.substr(std::min(equals + 1, item.size())));
    if (!from || !to) return refuse("Invalid device remap");
    pairs.push_back({*from, *to});
    begin = end + 1;
  }
  return pairs;
}

Result<void> check_pid(const Given& given, Options& options) {
  if (!given.pid) return refuse("Missing pid to perform operation on");
  options.pid_text = *given.pid;
  const auto number = decimal<std::int64_t>(*given.pid);
  if (!number) return refuse("pid must be a non-negative integer");
  if (*number <= std::numeric_limits<int>::max()) options.pid = Pid{static_cast<int>(*number)};
  return {};
}

Result<void> check_details(const Given& given, Options& options) {
  if (given.action && options.operation == Operation::kAction) {
    STASIS_TRY_ASSIGN(auto action, parse_action(*given.action));
    options.action = action;
  }
  const bool is_action = options.operation == Operation::kAction;
  if (given.timeout && !(is_action && options.action == Action::kLock)) {
    return refuse("Timeout is only valid for --action lock operation");
  }
  if (given.device_map && !(is_action && options.action == Action::kRestore)) {
    return refuse("Device remap only allowed for restore action");
  }
  if (given.timeout) {
    // NVIDIA's utility takes "x" for 0, which is to wait for ever.
    const auto timeout = decimal<std::uint64_t>(*given.timeout);
    if (!timeout) return refuse("timeout must be a non-negative integer");
    if (*timeout > std::numeric_limits<std::uint32_t>::max()) {
      return refuse("timeout must not be larger than 4294967295 milliseconds");
    }
    options.timeout = std::chrono::milliseconds(*timeout);
  }
  if (given.device_map) {
    STASIS_TRY_ASSIGN(auto pairs, parse_device_map(*given.device_map));
    options.gpus = std::move(pairs);
  }
  return {};
}

}  // namespace

Result<Options> parse_options(int argc, char** argv, const Features& features) {
  STASIS_TRY_ASSIGN(auto given, scan(argc, argv, features));
  Options options;
  if (given.help) return options;
  if (given.operations.empty()) return refuse("No operation selected");
  if (given.operations.size() > 1) return refuse("Too many operations selected");
  options.operation = given.operations.front();
  if (options.operation == Operation::kLaunchJob) {
    options.job = std::move(given.job);
    return options;
  }
  STASIS_TRY(check_pid(given, options));
  STASIS_TRY(check_details(given, options));
  return options;
}

}  // namespace stasis::compat
