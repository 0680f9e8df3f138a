#include "job/swap_messages.h"

#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "job/json_message.h"

namespace stasis::job {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr std::array<std::pair<SideOrder, std::string_view>, 5> kOrders{{
    {SideOrder::kProbe, "look"},
    {SideOrder::kSuspend, "suspend"},
    {SideOrder::kSuspendBeside, "suspend-beside"},
    {SideOrder::kResume, "resume"},
    {SideOrder::kUndo, "undo"},
}};

// A path need not be UTF-8.
json path_to_json(const std::string& path) {
  return std::vector<unsigned char>(path.begin(), path.end());
}
std::string path_from_json(const json& bytes) {
  const auto path = bytes.get<std::vector<unsigned char>>();
  return {path.begin(), path.end()};
}

std::optional<SideSetup> setup_of(const json& object) {
  SideSetup setup;
  setup.name = object.at("name").get<std::string>();
  setup.root = Pid{object.at("root").get<int>()};
  setup.entry = {object.at("mounts").get<std::string>(), path_from_json(object.at("directory")),
                 path_from_json(object.at("state_dir"))};
  setup.timeout = milliseconds(object.at("timeout_ms").get<std::int64_t>());
  setup.path = static_cast<MemoryPath>(object.at("path").get<int>());
  setup.ignore_obstacles = object.at("ignore_obstacles").get<bool>();
  setup.gpu_map = object.at("gpu_map").get<std::string>();
  setup.ring_bytes = object.at("ring_bytes").get<std::uint64_t>();
  if (object.contains("answer_ms")) {
    setup.timeouts = {milliseconds(object.at("answer_ms").get<std::int64_t>()),
                      milliseconds(object.at("work_ms").get<std::int64_t>())};
  }
  return setup;
}

json to_json(const SideResult& result) {
  json out = std::visit(Cases{[](const TreeStatus& status) {
                                return json{{"running", status.running},
                                            {"suspended", status.suspended},
                                            {"locked", status.locked},
                                            {"held_before", status.held_before},
                                            {"fits", status.fits ? json(*status.fits) : json()}};
                              },
                              [](const Moved& moved) {
                                return json{{"report", moved.report},
                                            {"subject", moved.subject},
                                            {"seconds", moved.seconds}};
                              },
                              [](const Undone& undone) {
                                return json{{"undone", undone.any}};
                              },
                              [](const Error& error) {
                                return json{{"error", error_to_json(error)}};
                              }},
                        result.what);
  out["notes"] = result.notes;
  out["simulated"] = result.simulated;
  return out;
}

std::optional<SideEvent> side_event_of(const json& object) {
  if (object.contains("at_rest")) return Quiesced{};
  SideResult result;
  result.notes = object.value("notes", std::vector<std::string>());
  result.simulated = object.value("simulated", std::string());
  if (object.contains("error")) {
    result.what = error_from_json(object["error"]);
  } else if (object.contains("report")) {
    result.what = Moved{object["report"], object.at("subject").get<std::string>(),
                        object.at("seconds").get<double>()};
  } else if (object.contains("undone")) {
    result.what = Undone{object["undone"].get<bool>()};
  } else {
    TreeStatus status;
    status.running = object.at("running").get<std::size_t>();
    status.suspended = object.at("suspended").get<std::size_t>();
    status.locked = object.at("locked").get<std::size_t>();
    status.held_before = object.at("held_before").get<bool>();
    if (object.at("fits").is_boolean()) status.fits = object["fits"].get<bool>();
    result.what = status;
  }
  return result;
}

}  // namespace

Result<void> send(const Channel& channel, const SideSetup& setup) {
  json out = {{"name", setup.name},
              {"root", setup.root.value},
              {"mounts", setup.entry.mounts},
              {"directory", path_to_json(setup.entry.directory)},
              {"state_dir", path_to_json(setup.entry.state_dir)},
              {"timeout_ms", setup.timeout.count()},
              {"path", static_cast<int>(setup.path)},
              {"ignore_obstacles", setup.ignore_obstacles},
              {"gpu_map", setup.gpu_map},
              {"ring_bytes", setup.ring_bytes}};
  if (setup.timeouts) {
    out["answer_ms"] = setup.timeouts->answer.count();
    out["work_ms"] = setup.timeouts->work.count();
  }
  return send_json(channel, out);
}

Result<void> send(const Channel& channel, SideOrder order) {
  for (const auto& [one, word] : kOrders)
    if (one == order) return send_json(channel, {{"do", word}});
  return fail(ErrorCode::kInternal, "an order for a side of a swap that has no name");
}

Result<void> send(const Channel& channel, const SideEvent& event, const UniqueFd& trace) {
  if (std::holds_alternative<Quiesced>(event)) return send_json(channel, {{"at_rest", true}});
  return send_json(channel, bounded(to_json(std::get<SideResult>(event))),
                   std::span(&trace, trace.valid() ? 1 : 0));
}

std::optional<SideSetup> parse_side_setup(const Channel::Message& message) {
  return parse_json<SideSetup>(message, setup_of);
}

std::optional<SideOrder> parse_side_order(const Channel::Message& message) {
  return parse_json<SideOrder>(message, [](const json& object) -> std::optional<SideOrder> {
    const auto word = object.at("do").get<std::string>();
    for (const auto& [order, name] : kOrders)
      if (name == word) return order;
    return std::nullopt;
  });
}

std::optional<SideEvent> parse_side_event(const Channel::Message& message) {
  return parse_json<SideEvent>(message, side_event_of);
}

}  // namespace stasis::job
