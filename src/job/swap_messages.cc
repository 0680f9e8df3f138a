#include "job/swap_messages.h"

#include "job/json_message.h"
#include "report/report_record.h"

namespace stasis {

void fields(auto& io, Described<DriverTimeouts> auto& timeouts) {
  io("answer_ms", timeouts.answer);
  io("work_ms", timeouts.work);
}

void fields(auto& io, Described<TreeStatus> auto& status) {
  io("running", status.running);
  io("suspended", status.suspended);
  io("locked", status.locked);
  io("held_before", status.held_before);
  io.optional("fits", status.fits);
}

void fields(auto& io, Described<AttachWay> auto& way) {
  io.optional("watch", way.watch);
  io("graphs_are_safe", way.graphs_are_safe);
}

namespace job {

void fields(auto& io, Described<Entry> auto& entry) {
  io("mounts", entry.mounts);
  path_field(io, "directory", entry.directory);
  path_field(io, "state_dir", entry.state_dir);
}

void fields(auto& io, Described<SideSetup> auto& setup) {
  io("name", setup.name);
  io("root", setup.root);
  io("entry", setup.entry);
  io("timeout_ms", setup.timeout);
  io("path", setup.path);
  io("ignore_obstacles", setup.ignore_obstacles);
  io.optional("attach", setup.attach);
  io("gpu_map", setup.gpu_map);
  io("ring_bytes", setup.ring_bytes);
  io.optional("timeouts", setup.timeouts);
}

void fields(auto& io, Described<Progressed> auto& progressed) {
  io("done", progressed.done);
  io("total", progressed.total);
}

void fields(auto& io, Described<Undone> auto& undone) { io("any", undone.any); }

void fields(auto& io, Described<SideResult> auto& result) {
  io("what", result.what);
  io("notes", result.notes);
  io("simulated", result.simulated);
}

Result<void> send(const Channel& channel, const SideSetup& setup) {
  const bool attaches = setup.attach && setup.attach->library;
  return send_message(
      channel, setup,
      std::span(attaches ? setup.attach->library.get() : nullptr, attaches ? 1 : 0));
}

Result<void> send(const Channel& channel, SideOrder order) { return send_message(channel, order); }

Result<void> send(const Channel& channel, const SideEvent& event, UniqueFd trace) {
  std::vector<UniqueFd> descriptors;
  if (trace.valid()) descriptors.push_back(std::move(trace));
  return send_any_size(channel, event, std::move(descriptors));
}

void send(const Channel& channel, const Progressed& progressed) {
  const std::string text = record_to_text(SideEvent(progressed));
  channel.send_if_it_reads(std::as_bytes(std::span(text)));
}

std::optional<SideSetup> parse_side_setup(Channel::Message& message) {
  auto setup = parse_message<SideSetup>(message);
  if (!setup || !setup->attach) return setup;
  if (message.descriptors.size() != 1) return std::nullopt;
  setup->attach->library = std::make_shared<const UniqueFd>(std::move(message.descriptors.front()));
  return setup;
}

std::optional<SideOrder> parse_side_order(const Channel::Message& message) {
  const auto order = parse_message<SideOrder>(message);
  return order && *order <= SideOrder::kUndo ? order : std::nullopt;
}

std::optional<SideEvent> parse_side_event(Channel::Message& message) {
  return parse_any_size<SideEvent>(message);
}

}  // namespace job
}  // namespace stasis
