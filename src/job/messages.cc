#include "job/messages.h"

#include <utility>

#include "job/json_message.h"

namespace stasis::job {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

json to_json(const WorkOrder& order) {
  json out = {{"op", name_of(order)}, {"root", order.root.value}};
  if (const auto* restore = std::get_if<RestoreOrder>(&order.what))
    out["images_dir"] = restore->images_dir;
  if (const auto* save = std::get_if<SaveOrder>(&order.what)) {
    out["images_dir"] = save->images_dir;
    out["command"] = save->command;
    out["end"] = save->end;
    out["limit_ms"] = save->limit.count();
    if (save->base) out["base"] = *save->base;
  }
  return out;
}

std::optional<WorkOrder> work_order_of(const json& request) {
  WorkOrder order;
  order.root = Pid{request.at("root").get<int>()};
  const auto op = request.at("op").get<std::string>();
  if (op == "recover") return order;
  const auto images_dir = request.at("images_dir").get<std::string>();
  if (op == "restore") {
    order.what = RestoreOrder{images_dir};
    return order;
  }
  if (op != "dump") return std::nullopt;
  SaveOrder save;
  save.images_dir = images_dir;
  save.command = request.at("command").get<std::vector<std::string>>();
  save.end = request.at("end").get<bool>();
  save.limit = milliseconds(request.at("limit_ms").get<std::int64_t>());
  if (request.contains("base")) save.base = request["base"].get<std::string>();
  order.what = std::move(save);
  return order;
}

json to_json(const WorkResult& result) {
  json out = std::visit(Cases{[](const Recovered&) { return json::object(); },
                              [](const Restored& restored) {
                                return json{{"root", restored.root.value},
                                            {"seconds", restored.seconds},
                                            {"terminal", restored.terminal}};
                              },
                              [](const Saved& saved) {
                                json done = {{"size", saved.size}, {"seconds", saved.seconds}};
                                if (saved.downtime) done["standstill"] = *saved.downtime;
                                return done;
                              },
                              [](const WasSuspended&) {
                                return json{{"suspended", true}};
                              },
                              [](const Error& error) {
                                return json{{"error", error_to_json(error)}};
                              },
                              [](const WorkerDied& died) {
                                return json{{"died", died.how}};
                              }},
                        result.what);
  out["notes"] = result.notes;
  return out;
}

WorkResult work_result_of(const json& object) {
  WorkResult result;
  result.notes = object.value("notes", std::vector<std::string>());
  if (object.contains("died")) {
    result.what = WorkerDied{object["died"].get<std::string>()};
  } else if (object.contains("error")) {
    result.what = error_from_json(object["error"]);
  } else if (object.contains("suspended")) {
    result.what = WasSuspended{};
  } else if (object.contains("root")) {
    result.what = Restored{Pid{object["root"].get<int>()}, object.value("seconds", 0.0),
                           object.value("terminal", 0U)};
  } else if (object.contains("size")) {
    Saved saved{object["size"].get<std::string>(), object.value("seconds", 0.0), {}};
    if (object.contains("standstill")) saved.downtime = object["standstill"].get<double>();
    result.what = std::move(saved);
  }
  return result;
}

json to_json(const InitOrder& order) {
  return std::visit(
      Cases{[](const StartJob&) {
              return json{{"do", "start"}};
            },
            [](const WorkOrder& work) {
              return json{{"do", "work"}, {"request", to_json(work)}};
            },
            [](const SendSignal& signal) {
              return json{{"do", "signal"}, {"number", signal.number}, {"group", signal.group}};
            },
            [](const Resize& size) {
              return json{{"do", "size"}, {"rows", size.rows}, {"columns", size.columns}};
            },
            [](const StopWorker&) {
              return json{{"do", "stop"}};
            },
            [](const KillWorker&) {
              return json{{"do", "kill"}};
            }},
      order);
}

std::optional<InitOrder> order_of(const json& object) {
  const auto what = object.at("do").get<std::string>();
  if (what == "start") return StartJob{};
  if (what == "work") return work_order_of(object.at("request"));
  if (what == "signal")
    return SendSignal{object.at("number").get<int>(), object.at("group").get<bool>()};
  if (what == "size") return Resize{object.at("rows").get<int>(), object.at("columns").get<int>()};
  if (what == "stop") return StopWorker{};
  if (what == "kill") return KillWorker{};
  return std::nullopt;
}

json to_json(const InitEvent& event) {
  return std::visit(
      Cases{[](const Ready&) {
              return json{{"event", "ready"}};
            },
            [](const Failed& failed) {
              return json{{"event", "failed"}, {"error", error_to_json(failed.error)}};
            },
            [](const Started& started) {
              return json{{"event", "started"},
                          {"root", started.root.value},
                          {"terminal", started.terminal}};
            },
            [](const NotStarted& not_started) {
              return json{{"event", "not-started"}, {"errno", not_started.error_number}};
            },
            [](const WorkResult& result) {
              return json{{"event", "worked"}, {"result", bounded(to_json(result))}};
            },
            [](const Ended& ended) {
              return json{{"event", "ended"}, {"status", ended.status}};
            }},
      event);
}

std::optional<InitEvent> event_of(const json& object) {
  const auto what = object.at("event").get<std::string>();
  if (what == "ready") return Ready{};
  if (what == "failed") return Failed{error_from_json(object.at("error"))};
  if (what == "started")
    return Started{Pid{object.at("root").get<int>()}, object.at("terminal").get<TerminalStreams>()};
  if (what == "not-started") return NotStarted{object.at("errno").get<int>()};
  if (what == "worked") return work_result_of(object.at("result"));
  if (what == "ended") return Ended{object.at("status").get<int>()};
  return std::nullopt;
}

}  // namespace

std::string name_of(const WorkOrder& order) {
  return std::visit(
      Cases{[](const RecoverOrder&) { return "recover"; },
            [](const RestoreOrder&) { return "restore"; }, [](const SaveOrder&) { return "dump"; }},
      order.what);
}

Result<void> send(const Channel& channel, const InitOrder& order,
                  std::span<const UniqueFd> descriptors) {
  return send_json(channel, to_json(order), descriptors);
}

Result<void> send(const Channel& channel, const InitEvent& event) {
  return send_json(channel, to_json(event));
}

std::optional<InitOrder> parse_order(const Channel::Message& message) {
  return parse_json<InitOrder>(message, order_of);
}

std::optional<InitEvent> parse_event(const Channel::Message& message) {
  return parse_json<InitEvent>(message, event_of);
}

}  // namespace stasis::job
