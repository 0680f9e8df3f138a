#include "job/messages.h"

#include "job/json_message.h"

namespace stasis::job {

void fields(auto& io, Described<RestoreOrder> auto& order) {
  path_field(io, "images_dir", order.images_dir);
  io("images_folder", order.images_folder);
}

void fields(auto& io, Described<SaveOrder> auto& order) {
  path_field(io, "images_dir", order.images_dir);
  io("command", order.command);
  io("end", order.end);
  io("limit_ms", order.limit);
  path_field(io, "base", order.base);
  io("images_folder", order.images_folder);
}

void fields(auto& io, Described<WorkOrder> auto& order) {
  io("what", order.what);
  io("root", order.root);
}

void fields(auto& io, Described<Restored> auto& restored) {
  io("root", restored.root);
  io("seconds", restored.seconds);
  io("terminal", restored.terminal);
}

void fields(auto& io, Described<Saved> auto& saved) {
  io("size", saved.size);
  io("seconds", saved.seconds);
  io.optional("downtime", saved.downtime);
}

void fields(auto& io, Described<WorkerDied> auto& died) { io("how", died.how); }

void fields(auto& io, Described<WorkResult> auto& result) {
  io("what", result.what);
  io("notes", result.notes);
}

void fields(auto& io, Described<SendSignal> auto& signal) {
  io("number", signal.number);
  io("group", signal.group);
}

void fields(auto& io, Described<Resize> auto& size) {
  io("rows", size.rows);
  io("columns", size.columns);
}

void fields(auto& io, Described<Failed> auto& failed) { io("error", failed.error); }

void fields(auto& io, Described<Started> auto& started) {
  io("root", started.root);
  io("terminal", started.terminal);
}

void fields(auto& io, Described<NotStarted> auto& not_started) {
  io("errno", not_started.error_number);
}

void fields(auto& io, Described<Ended> auto& ended) { io("status", ended.status); }

std::string name_of(const WorkOrder& order) {
  return std::visit(
      Cases{[](const RecoverOrder&) { return "recover"; },
            [](const RestoreOrder&) { return "restore"; }, [](const SaveOrder&) { return "dump"; },
            [](const MeetOrder&) { return "start"; }},
      order.what);
}

Result<void> send(const Channel& channel, const InitOrder& order,
                  std::span<const UniqueFd> descriptors) {
  return send_message(channel, order, descriptors);
}

Result<void> send(const Channel& channel, const InitEvent& event) {
  const auto* result = std::get_if<WorkResult>(&event);
  return result != nullptr ? send_message(channel, InitEvent(bounded(*result)))
                           : send_message(channel, event);
}

std::optional<InitOrder> parse_order(const Channel::Message& message) {
  return parse_message<InitOrder>(message);
}

std::optional<InitEvent> parse_event(const Channel::Message& message) {
  return parse_message<InitEvent>(message);
}

}  // namespace stasis::job
