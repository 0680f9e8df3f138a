// What the fields of manifest.json are, for its writer and its reader; docs/image-format.md.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/json_record.h"
#include "image/checksum.h"
#include "image/manifest.h"
#include "image/manifest_format.h"

namespace stasis {

namespace manifest_format {

static_assert(kMaxInteger == kMostExact);

inline constexpr Within kWord{0, 0xffffffff};
inline constexpr Within kPid{1, kMaxPid};

template <class Io>
inline constexpr bool kReads = std::remove_reference_t<Io>::kReads;

inline bool is_hex(std::string_view text) {
  return text.size() == kChecksumDigits && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

inline std::optional<CudaState> image_state_from_name(std::string_view name) {
  const auto state = cuda_state_from_name(name);
  return state == CudaState::kFailed ? std::nullopt : state;
}

inline std::string_view sync_name(SyncPolicy sync) {
  return sync == SyncPolicy::kNone ? "none" : "disk";
}
inline std::optional<SyncPolicy> sync_from_name(std::string_view name) {
  for (const SyncPolicy sync : {SyncPolicy::kDisk, SyncPolicy::kNone})
    if (sync_name(sync) == name) return sync;
  return std::nullopt;
}

// "LEVEL:NAME:HEXADECIMAL": text, because an array of three takes five lines.
inline std::string socket_option_text(const SocketOptionRecord& option) {
  std::string text = fmt::format("{}:{}:", option.level, option.name);
  for (const char c : option.value)
    text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return text;
}
inline std::optional<SocketOptionRecord> socket_option_from_text(std::string_view text) {
  SocketOptionRecord option;
  for (int* number : {&option.level, &option.name}) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
    const auto used = static_cast<std::size_t>(end - text.data());
    if (error != std::errc() || *number < 0 || used == text.size() || text[used] != ':')
      return std::nullopt;
    text.remove_prefix(used + 1);
  }
  if (text.size() % 2 != 0 || text.size() > 2 * kMaxSocketValue) return std::nullopt;
  for (std::size_t at = 0; at < text.size(); at += 2) {
    unsigned byte = 0;
    const char* two = text.data() + at;
    if (std::from_chars(two, two + 2, byte, 16).ptr != two + 2) return std::nullopt;
    option.value += static_cast<char>(byte);
  }
  return option;
}

}  // namespace manifest_format

void fields(auto& io, Described<GpuRecord> auto& gpu) {
  io("uuid", gpu.uuid);
  io("name", gpu.name);
  io("total_memory", gpu.total_memory);
  io("pci_bus_id", gpu.pci_bus_id);
}

void fields(auto& io, Described<GpuMemoryRecord> auto& use) {
  io("gpu_uuid", use.gpu_uuid);
  io("bytes", use.bytes);
}

// Only what is not the default: most threads have nothing to say.
void fields(auto& io, Described<ThreadStateRecord> auto& state) {
  using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only
  const ThreadStateRecord usual;
  io("tid", state.thread, kPid);
  io.optional("cpus", state.cpus);
  io.optional("io_priority", state.io_priority, Within{0, 0xffff});
  io.unless(usual.timer_slack, "timer_slack", state.timer_slack);
  io.unless(usual.memory_policy, "memory_policy", state.memory_policy, Items{0, kMaxPolicy});
  io.optional("personality", state.personality);
  io.optional("machine_check", state.machine_check);
  const std::string& check = state.machine_check;
  io.check(check.empty() || check == "early" || check == "late", "machine_check",
           "is neither early nor late");
  io.optional("slice", state.slice);
  io.optional("least_load", state.least_load, Within{0, usual.most_load});
  io.unless(usual.most_load, "most_load", state.most_load, Within{0, usual.most_load});
}

void fields(auto& io, Described<TimerRecord> auto& timer) {
  io("fd", timer.descriptor);
  io("clock", timer.clock, Within{0, 15});
  io("flags", timer.flags, Within{0, 3});
  io("left", timer.left);
  io("interval", timer.interval);
  io("ticks", timer.ticks);
  io("clock_at_dump", timer.clock_at_dump);
}

void fields(auto& io, Described<FileStateRecord> auto& file) {
  constexpr std::uint64_t kMostBudget = 0xffff;
  constexpr std::size_t kSettingsDigits = 72;  // of struct termios, which has 36 bytes
  io("fd", file.descriptor);
  io.optional("exclusive", file.exclusive);
  io.optional("poll_microseconds", file.poll_microseconds);
  io.optional("poll_budget", file.poll_budget, Within{0, kMostBudget});
  io.optional("poll_prefer", file.poll_prefer);
  io.optional("locked_settings", file.locked_settings, Items{0, kSettingsDigits});
  const std::string_view settings = file.locked_settings;
  io.check(settings.empty() ||
               (settings.size() == kSettingsDigits &&
                settings.find_first_not_of("0123456789abcdef") == std::string_view::npos),
           "locked_settings", "holds what is no terminal's");
  io.optional("signals", file.signals);
  io.optional("owner_thread", file.owner_thread);
  io.optional("value_high", file.value_high);
  io.optional("mode", file.mode, Within{0, 07777});
  io.optional("uid", file.uid);
  io.optional("gid", file.gid);
  io.optional("stopped", file.stopped);
  io.optional("stop_typed", file.stop_typed);
  io.optional("in_speed", file.in_speed);
  io.optional("out_speed", file.out_speed);
}

void fields(auto& io, Described<ListenerRecord> auto& listener) {
  io("fd", listener.descriptor);
  io("backlog", listener.backlog);
}

void fields(auto& io, Described<LockedRecord> auto& locked) {
  io("start", locked.start);
  io("size", locked.size);
}

void fields(auto& io, Described<KernelStateRecord> auto& state) {
  using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only
  constexpr bool kReading = kReads<decltype(io)>;
  io("threads", state.threads, Items{0, kMaxThreads});
  io.optional("core_dump_filter", state.core_dump_filter, kWord);
  // The bits of a word do not fit into a number of JSON.
  std::vector<std::uint64_t> bits;
  for (std::uint64_t bit = 0; bit < kStateBits; ++bit)
    if ((state.own.processor_state >> bit & 1) != 0) bits.push_back(bit);
  io.optional("processor_state", bits, Items{0, kStateBits}, Within{0, kStateBits - 1});
  if constexpr (kReading) {
    for (const std::uint64_t bit : bits)
      state.own.processor_state |= std::uint64_t{1} << bit;
  }
  io.optional("deny_new_code", state.own.deny_new_code);
  io.optional("lock_new", state.own.lock_new, Within{0, 7});
  io.optional("merge_memory", state.own.merge_memory);
  io.optional("advised_huge_pages", state.own.advised_huge_pages);
  io.optional("futex_slots", state.own.futex_slots, Within{0, kMaxFutexSlots});
  io.optional("listeners", state.own.listeners, Items{0, kMaxListeners});
  io.optional("locked", state.own.locked, Items{0, kMaxLocked});
  int nice = state.autogroup_nice + kNiceOffset;
  io.unless(kNiceOffset, "autogroup_nice", nice, Within{0, 2 * kNiceOffset});
  if constexpr (kReading) state.autogroup_nice = nice - kNiceOffset;
  io.optional("audit_session", state.audit_session, kWord);
  io.optional("timers", state.timers, Items{0, kMaxTimers});
  io.optional("files", state.files, Items{0, kMaxFileStates});
}

void fields(auto& io, Described<ProcessRecord> auto& process) {
  using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only
  io("pid", process.pid, kPid);
  io("parent_pid", process.parent, Within{0, kMaxPid});
  io("command", process.command, Items{0, kMaxArguments});
  io("cuda", process.cuda);
  // A list that no reader takes is left out: it is of use, but nothing depends on it.
  io.optional("threads", process.threads, Items{0, kMaxThreads}, kPid);
  io.optional("tcp_ports", process.tcp_ports, Items{0, kMaxPorts}, Within{1, kMaxPorts});
  io.optional("kernel_state", process.kernel_state);
  io.optional_named("cuda_state", process.cuda_state, cuda_state_name, image_state_from_name);
  io.check(process.cuda == process.cuda_state.has_value(), "cuda_state",
           "does not agree with cuda");
  io("gpu_memory", process.gpu_memory, Items{0, kMaxGpus});
}

void fields(auto& io, Described<CriuOptions> auto& options) {
  using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only
  for_each_criu_option([&](const auto& row) {
    auto& value = options.*row.field;
    using T = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_enum_v<T>)
      io.named(row.key, value, choice_name<T>, choice_from_name<T>);
    else if constexpr (std::is_same_v<T, std::vector<std::string>>)
      io(row.key, value, Items{0, kMaxExternal});
    else
      io(row.key, value);
  });
}

// With microsecond precision; what is too much is cut.
inline std::uint64_t microseconds_of(double seconds) {
  const double rounded = std::round(seconds * 1e6);
  if (!(rounded > 0)) return 0;
  return rounded < static_cast<double>(manifest_format::kMaxInteger)
             ? static_cast<std::uint64_t>(rounded)
             : manifest_format::kMaxInteger;
}

void fields(auto& io, Described<PhaseRecord> auto& phase) {
  constexpr double kPerSecond = 1e6;
  io("name", phase.name);
  std::uint64_t microseconds = microseconds_of(phase.seconds);
  io("microseconds", microseconds);
  std::optional<std::uint64_t> begins;
  if (phase.begins) begins = microseconds_of(*phase.begins);
  io.optional("begins_microseconds", begins);
  if constexpr (manifest_format::kReads<decltype(io)>) {
    phase.seconds = static_cast<double>(microseconds) / kPerSecond;
    if (begins) phase.begins = static_cast<double>(*begins) / kPerSecond;
  }
}

void fields(auto& io, Described<JobRecord> auto& job) {
  io("command", job.command, Items{0, manifest_format::kMaxArguments});
  io("streams", job.streams, Items{0, manifest_format::kMaxStreams});
}

void fields(auto& io, Described<MulticastRecord> auto& membership) {
  io("interface", membership.interface);
  io("group", membership.group);
  io("include", membership.include);
  io("sources", membership.sources, Items{0, manifest_format::kMaxMulticastSources});
}

void fields(auto& io, Described<SocketRecord> auto& socket) {
  using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only
  io("pid", socket.pid, kPid);
  io("descriptor", socket.descriptor);
  io("domain", socket.domain);
  io("type", socket.type);
  io("protocol", socket.protocol);
  std::vector<std::string> options;
  for (const SocketOptionRecord& option : socket.options)
    options.push_back(socket_option_text(option));
  io("options", options, Items{0, kMaxSocketOptions});
  if constexpr (kReads<decltype(io)>) {
    for (const std::string& text : options) {
      const auto option = socket_option_from_text(text);
      io.check(option.has_value(), "options", "holds what is no option");
      if (option) socket.options.push_back(*option);
    }
  }
  io("memberships", socket.memberships, Items{0, kMaxMemberships});
  io.optional("mode", socket.mode, Within{0, 07777});
  io.optional("uid", socket.uid);
  io.optional("gid", socket.gid);
  io.optional("peer_groups", socket.peer_groups);
}

void fields(auto& io, Described<SocketsRecord> auto& sockets) {
  using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only
  io("addresses", sockets.addresses, Items{0, kMaxAddresses});
  io("connection_addresses", sockets.connection_addresses, Items{0, kMaxAddresses});
  io("sockets", sockets.sockets, Items{0, kMaxSockets});
  io("lost", sockets.lost, Items{0, kMaxLost});
}

void fields(auto& io, Described<FileRecord> auto& file) {
  io("path", file.path);
  io("size", file.size);
  io("checksum", file.checksum);
  io.check(manifest_format::valid_file_path(file.path), "path", "is no path inside the image");
  io.check(manifest_format::is_hex(file.checksum), "checksum", "is no checksum");
}

void fields(auto& io, Described<ContentRecord> auto& content) {
  io("index_size", content.index_size);
  io("index_xxh3", content.index_checksum);
  io.check(manifest_format::is_hex(content.index_checksum), "index_xxh3", "is no checksum");
  io("data_sizes", content.data_sizes, Items{0, manifest_format::kMaxDataFiles});
  io.optional("taken_files", content.reused_files, Within{0, content.data_sizes.size()});
}

void fields(auto& io, Described<GroupRecord> auto& group) {
  io("id", group.id, Items{1, manifest_format::kMaxGroupName});
  io("parts", group.parts, Within{1, manifest_format::kMaxParts});
  io("name", group.name, Items{1, manifest_format::kMaxGroupName});
  io("links", group.links, Items{0, manifest_format::kMaxSockets});
  io("closing_links", group.closing_links, Items{0, manifest_format::kMaxSockets});
  io("links_may_lead_out", group.links_may_lead_out);
}

// How the files are checked: no choice so far.
struct ChecksumKind {
  std::string algorithm = std::string(kChecksumAlgorithm);
  std::uint64_t block_size = kChecksumBlock;
};
void fields(auto& io, Described<ChecksumKind> auto& kind) {
  io("algorithm", kind.algorithm);
  io.check(kind.algorithm == kChecksumAlgorithm, "algorithm", "is none that is known");
  io("block_size", kind.block_size, Within{kChecksumBlock, kChecksumBlock});
}

void fields(auto& io, Described<Manifest> auto& manifest) {
  using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only
  int format = kImageFormat;        // which its reader has looked at before
  io("format", format);
  std::vector<std::string> required;
  if (manifest.content) required.emplace_back(kNeedsContent);
  if (manifest.host_content) required.emplace_back(kNeedsHostContent);
  const auto has_links = [](const Manifest& of) {
    return of.group && (!of.group->links.empty() || !of.group->closing_links.empty());
  };
  if (has_links(manifest)) required.emplace_back(kNeedsGroup);
  io("requires", required, Items{0, kMaxRequires});
  io("stasis_version", manifest.stasis_version);
  io("created", manifest.created);
  io("hostname", manifest.hostname);
  io("kernel_release", manifest.kernel_release);
  io("criu_version", manifest.criu_version);
  io("driver_version", manifest.driver_version);
  io("cuda_version", manifest.cuda_version);
  io("simulated", manifest.simulated);
  io("gpus", manifest.gpus, Items{0, kMaxGpus});
  io("root_pid", manifest.root, kPid);
  io("processes", manifest.processes, Items{1, kMaxProcesses});
  io("criu_options", manifest.criu_options);
  io.named("sync", manifest.sync, sync_name, sync_from_name);
  io("phases", manifest.phases, Items{0, kMaxPhases});
  io.optional("beside", manifest.beside, Items{0, kMaxPhases});
  io.optional("job", manifest.job);
  io.optional("job_name", manifest.job_name);
  io.optional("socket_state", manifest.sockets);
  io.optional("group", manifest.group);
  ChecksumKind checksum;
  io("checksum", checksum);
  io("files", manifest.files, Items{1, kMaxFiles});
  io.optional("gpu_content", manifest.content);
  io.optional("host_content", manifest.host_content);
  const auto agrees = [&](std::string_view feature, bool is_there, const char* message) {
    const bool asked = std::find(required.begin(), required.end(), feature) != required.end();
    io.check(is_there == asked, "requires", message);
  };
  agrees(kNeedsContent, manifest.content.has_value(),
         "and gpu_content do not agree about gpu-content");
  agrees(kNeedsHostContent, manifest.host_content.has_value(),
         "and host_content do not agree about host-memory");
  agrees(kNeedsGroup, has_links(manifest), "and group do not agree about group-links");
  io("total_bytes", manifest.total_bytes);
}

}  // namespace stasis
