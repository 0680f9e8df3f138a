#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "image/checksum.h"
#include "image/manifest.h"
#include "image/manifest_format.h"

namespace stasis {
namespace {

// Keeps the fields in the order in which a person wants to read them.
using Json = nlohmann::ordered_json;
using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only

// A program may have megabytes of arguments ("train.py shards/*.tar"), and no image may fail for
// what is only for people. So many bytes are kept of all commands of an image; JSON's escapes make
// six of one at worst, and the whole text may have 64 MiB.
constexpr std::size_t kCommands = 4U << 20;
constexpr std::size_t kCommand = 16384;      // of one process
constexpr std::size_t kArgument = 4096;      // of one argument
constexpr std::size_t kAroundArgument = 16;  // quotes, indentation and line feed
constexpr const char* kCut = "\u2026";
static_assert(kCommand / kAroundArgument < kMaxArguments);
static_assert(kCommands / kMaxProcesses >= 2 * kAroundArgument);

// Not within a character.
std::string beginning(const std::string& argument, std::size_t most) {
  if (argument.size() <= most) return argument;
  while (most > 0 && (static_cast<unsigned char>(argument[most]) & 0xc0) == 0x80)
    --most;
  return argument.substr(0, most) + kCut;
}

// As many of the first arguments as there is room for.
std::vector<std::string> shortened(const std::vector<std::string>& command, std::size_t room) {
  std::vector<std::string> kept;
  for (const std::string& argument : command) {
    if (room < kAroundArgument) {
      kept.emplace_back(kCut);
      break;
    }
    kept.push_back(beginning(argument, std::min(room - kAroundArgument, kArgument)));
    room -= std::min(room, kAroundArgument + kept.back().size());
  }
  return kept;
}

// Only what is not the default: most threads have nothing to say.
Json to_json(const ThreadStateRecord& state) {
  const ThreadStateRecord usual;
  Json json = {{"tid", state.thread.value}};
  if (state.cpus != usual.cpus) json["cpus"] = state.cpus;
  if (state.io_priority != usual.io_priority) json["io_priority"] = state.io_priority;
  if (state.timer_slack != usual.timer_slack)
    json["timer_slack"] = std::min(state.timer_slack, kMaxInteger);
  if (state.memory_policy != usual.memory_policy && state.memory_policy.size() <= kMaxPolicy)
    json["memory_policy"] = state.memory_policy;
  if (state.personality != usual.personality) json["personality"] = state.personality;
  if (state.machine_check != usual.machine_check) json["machine_check"] = state.machine_check;
  if (state.slice != usual.slice) json["slice"] = std::min(state.slice, kMaxInteger);
  return json;
}

Json to_json(const KernelStateRecord& state) {
  Json json = {{"threads", Json::array()}};
  if (state.core_dump_filter) json["core_dump_filter"] = *state.core_dump_filter;
  for (const ThreadStateRecord& thread : state.threads)
    json["threads"].push_back(to_json(thread));
  const OwnStateRecord usual;
  const OwnStateRecord& own = state.own;
  // The bits of a word do not fit into a number of JSON.
  if (own.processor_state != usual.processor_state) {
    json["processor_state"] = Json::array();
    for (int bit = 0; bit < 64; ++bit)
      if ((own.processor_state >> bit & 1) != 0) json["processor_state"].push_back(bit);
  }
  if (own.deny_new_code != usual.deny_new_code) json["deny_new_code"] = own.deny_new_code;
  if (own.lock_new != usual.lock_new) json["lock_new"] = own.lock_new;
  if (own.merge_memory) json["merge_memory"] = true;
  if (state.autogroup_nice != 0) json["autogroup_nice"] = state.autogroup_nice + kNiceOffset;
  const auto limited = [](std::uint64_t value) { return std::min(value, kMaxInteger); };
  for (const TimerRecord& timer : state.timers) {
    json["timers"].push_back({{"fd", timer.descriptor},
                              {"clock", timer.clock},
                              {"flags", timer.flags},
                              {"left", limited(timer.left)},
                              {"interval", limited(timer.interval)},
                              {"ticks", limited(timer.ticks)},
                              {"clock_at_dump", limited(timer.clock_at_dump)}});
  }
  return json;
}

Json to_json(const ProcessRecord& process, std::size_t room_for_command) {
  Json json = {{"pid", process.pid.value},
               {"parent_pid", process.parent.value},
               {"command", shortened(process.command, room_for_command)},
               {"cuda", process.cuda}};
  // A list that no reader takes is left out: it is of use, but nothing depends on it.
  if (!process.threads.empty() && process.threads.size() <= kMaxThreads) {
    json["threads"] = Json::array();
    for (const Tid thread : process.threads)
      json["threads"].push_back(thread.value);
  }
  if (!process.tcp_ports.empty()) json["tcp_ports"] = process.tcp_ports;
  if (process.kernel_state) json["kernel_state"] = to_json(*process.kernel_state);
  if (process.cuda_state) json["cuda_state"] = image_cuda_state_name(*process.cuda_state);
  json["gpu_memory"] = Json::array();
  for (const GpuMemoryRecord& use : process.gpu_memory) {
    json["gpu_memory"].push_back({{"gpu_uuid", use.gpu_uuid}, {"bytes", use.bytes}});
  }
  return json;
}

template <class T>
Json option_json(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return choice_name(value);
  } else {
    return value;
  }
}

Json to_json(const CriuOptions& options) {
  Json json;
  for_each_criu_option([&](const auto& row) { json[row.key] = option_json(options.*row.field); });
  return json;
}

std::string hexadecimal(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  out.reserve(2 * bytes.size());
  for (const char c : bytes) {
    out += kDigits[static_cast<unsigned char>(c) >> 4];
    out += kDigits[static_cast<unsigned char>(c) & 0xf];
  }
  return out;
}

Json to_json(const SocketsRecord& record) {
  Json json = {{"addresses", record.addresses},
               {"connection_addresses", record.connection_addresses},
               {"sockets", Json::array()},
               {"lost", record.lost}};
  for (const SocketRecord& socket : record.sockets) {
    Json one = {{"pid", socket.pid.value},
                {"descriptor", socket.descriptor},
                {"domain", socket.domain},
                {"type", socket.type},
                {"protocol", socket.protocol}};
    one["options"] = Json::array();
    // Text, because an array of three takes five lines.
    for (const SocketOptionRecord& option : socket.options) {
      one["options"].push_back(std::to_string(option.level) + ":" + std::to_string(option.name) +
                               ":" + hexadecimal(option.value));
    }
    one["memberships"] = Json::array();
    for (const MulticastRecord& membership : socket.memberships) {
      one["memberships"].push_back({{"interface", membership.interface},
                                    {"group", membership.group},
                                    {"include", membership.include},
                                    {"sources", membership.sources}});
    }
    json["sockets"].push_back(std::move(one));
  }
  return json;
}

std::uint64_t microseconds(double seconds) {
  if (!(seconds > 0)) return 0;
  const double value = std::round(seconds * 1e6);
  return value < static_cast<double>(kMaxInteger) ? static_cast<std::uint64_t>(value) : kMaxInteger;
}

Json to_json(const ContentRecord& content) {
  Json json = {{"index_size", content.index_size},
               {"index_xxh3", content.index_checksum},
               {"data_sizes", content.data_sizes}};
  if (content.reused_files > 0) json["taken_files"] = content.reused_files;
  return json;
}

}  // namespace

std::string_view image_cuda_state_name(ImageCudaState state) {
  switch (state) {
    case ImageCudaState::kRunning:
      return "running";
    case ImageCudaState::kLocked:
      return "locked";
    case ImageCudaState::kCheckpointed:
      return "checkpointed";
  }
  return "unknown";
}

std::uint64_t ContentRecord::total_bytes() const {
  std::uint64_t sum = index_size;
  for (const std::uint64_t size : data_sizes)
    sum += size;
  return sum;
}

std::uint64_t ContentRecord::reused_bytes() const {
  std::uint64_t sum = 0;
  for (std::size_t i = data_sizes.size() - reused_files; i < data_sizes.size(); ++i)
    sum += data_sizes[i];
  return sum;
}

std::string close_manifest_text(std::string_view object_text) {
  std::string text(object_text);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' '))
    text.pop_back();
  if (!text.empty() && text.back() == '}') text.pop_back();
  while (!text.empty() && (text.back() == '\n' || text.back() == ' '))
    text.pop_back();
  text += text.ends_with('{') ? "\n" : ",\n";
  const std::string checksum = xxh3_hex(text);
  return text.append(kTrailerHead).append(checksum).append(kTrailerTail);
}

std::string serialize_manifest(const Manifest& manifest) {
  Json json;
  json["format"] = kImageFormat;
  json["requires"] = Json::array();
  if (manifest.content) json["requires"].push_back(kNeedsContent);
  if (manifest.host_content) json["requires"].push_back(kNeedsHostContent);
  json["stasis_version"] = manifest.stasis_version;
  json["created"] = manifest.created;
  json["hostname"] = manifest.hostname;
  json["kernel_release"] = manifest.kernel_release;
  json["criu_version"] = manifest.criu_version;
  json["driver_version"] = manifest.driver_version;
  json["cuda_version"] = manifest.cuda_version;
  json["simulated"] = manifest.simulated;
  json["gpus"] = Json::array();
  for (const GpuRecord& gpu : manifest.gpus) {
    json["gpus"].push_back({{"uuid", gpu.uuid},
                            {"name", gpu.name},
                            {"total_memory", gpu.total_memory},
                            {"pci_bus_id", gpu.pci_bus_id}});
  }
  json["root_pid"] = manifest.root.value;
  json["processes"] = Json::array();
  const std::size_t room_for_command =
      std::min(kCommand, kCommands / std::max<std::size_t>(manifest.processes.size(), 1));
  for (const ProcessRecord& process : manifest.processes) {
    json["processes"].push_back(to_json(process, room_for_command));
  }
  json["criu_options"] = to_json(manifest.criu_options);
  json["sync"] = manifest.sync == SyncPolicy::kNone ? "none" : "disk";
  json["phases"] = Json::array();
  for (const PhaseRecord& phase : manifest.phases) {
    json["phases"].push_back({{"name", phase.name}, {"microseconds", microseconds(phase.seconds)}});
  }
  if (manifest.job) {
    json["job"] = {{"command", manifest.job->command}, {"streams", manifest.job->streams}};
  }
  if (manifest.sockets) json["socket_state"] = to_json(*manifest.sockets);
  json["checksum"] = {{"algorithm", kChecksumAlgorithm}, {"block_size", kChecksumBlock}};
  json["files"] = Json::array();
  for (const FileRecord& file : manifest.files) {
    json["files"].push_back(
        {{"path", file.path}, {"size", file.size}, {"checksum", file.checksum}});
  }
  if (manifest.content) json["gpu_content"] = to_json(*manifest.content);
  if (manifest.host_content) json["host_content"] = to_json(*manifest.host_content);
  json["total_bytes"] = manifest.total_bytes;
  return close_manifest_text(json.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace stasis
