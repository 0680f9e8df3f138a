#include "checkpoint/suspend_record.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <ctime>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/fault_point.h"
#include "base/fd.h"
#include "checkpoint/journal.h"

namespace stasis {
namespace {

using nlohmann::json;

// The start time is in the name, so that a later process with the same number finds nothing.
std::string path_in(const std::string& directory, const ProcessId& process,
                    const std::string& mark) {
  return fmt::format("{}/{}-{}{}.suspended", directory, process.pid.value, process.start_ticks,
                     mark);
}

Result<std::string> path_of(const Process& process) {
  STASIS_TRY_ASSIGN(const auto directory, journal_directory());
  return path_in(directory, process.info().id(), pid_namespace_mark());
}

std::optional<SuspendedMemory> read_suspended(const std::string& path) {
  auto text = read_file(AT_FDCWD, path, 1 << 20);
  if (!text) return std::nullopt;
  const json object = json::parse(*text, nullptr, false);
  if (!object.is_object()) return std::nullopt;
  SuspendedMemory memory;
  try {
    for (const json& item : object.at("uses")) {
      const auto uuid = GpuUuid::parse(item.at("gpu").get<std::string>());
      if (!uuid) return std::nullopt;
      memory.uses.push_back({*uuid, item.at("bytes").get<std::uint64_t>()});
    }
    for (const json& item : object.at("gpus")) {
      const auto uuid = GpuUuid::parse(item.at("uuid").get<std::string>());
      if (!uuid) return std::nullopt;
      memory.gpus.push_back({*uuid, item.at("name").get<std::string>(),
                             item.at("pci_bus_id").get<std::string>(),
                             item.at("memory_total").get<std::uint64_t>(), 0});
    }
    memory.image = object.value("image", std::string());
    memory.since = object.value("since", std::int64_t{0});  // older ones have none
  } catch (const json::exception&) {
    return std::nullopt;
  }
  return memory;
}

}  // namespace

void forget_the_dead() {
  const auto directory = journal_directory();
  if (!directory) return;
  const std::string end_of_name = pid_namespace_mark() + ".suspended";
  const DirectoryStream dir = list_open(*directory);
  while (const dirent* item = dir ? ::readdir(dir.get()) : nullptr) {
    ProcessId process;
    const char* const end = item->d_name + std::strlen(item->d_name);
    const auto number = std::from_chars(item->d_name, end, process.pid.value);
    if (number.ec != std::errc{} || *number.ptr != '-') continue;
    const auto time = std::from_chars(number.ptr + 1, end, process.start_ticks);
    if (time.ec != std::errc{} || time.ptr != end_of_name) continue;
    const auto info = proc::ProcFs().process(process.pid);
    const bool gone = info ? info->id() != process || info->has_ended()
                           : info.error().code == ErrorCode::kNoSuchProcess ||
                                 info.error().code == ErrorCode::kThreadId;
    if (gone) (void)::unlinkat(::dirfd(dir.get()), item->d_name, 0);
  }
}

Result<void> remember_suspended(const Process& process, const SuspendedMemory& memory) {
  STASIS_TRY_ASSIGN(auto path, path_of(process));
  json uses = json::array();
  for (const GpuUse& part : memory.uses) {
    uses.push_back({{"gpu", part.gpu.to_string()}, {"bytes", part.bytes}});
  }
  json gpus = json::array();
  for (const Gpu& gpu : memory.gpus) {
    gpus.push_back({{"uuid", gpu.uuid.to_string()},
                    {"name", gpu.name},
                    {"pci_bus_id", gpu.pci_bus_id},
                    {"memory_total", gpu.memory_total}});
  }
  const std::string text = json{{"uses", uses},
                                {"gpus", gpus},
                                {"image", memory.image},
                                {"since", std::int64_t{std::time(nullptr)}}}
                               .dump(-1, ' ', false, json::error_handler_t::replace);
  // Losing it loses a check, never a job; half of it must not be taken for the whole.
  STASIS_TRY(fault(FaultPoint::kRememberWrite));
  STASIS_TRY_ASSIGN(auto fd,
                    open_file(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600));
  auto written = write_all(fd.get(), text.data(), text.size(), path);
  if (!written) (void)::unlink(path.c_str());
  fault_only(FaultPoint::kRememberWritten);
  return written;
}

void remember_suspended(const Group& group) {
  forget_the_dead();
  for (const GroupMember& member : group.members()) {
    const auto use = group.gpu_use().find(member.process.pid());
    if (!member.initial || use == group.gpu_use().end()) continue;
    (void)remember_suspended(member.process, {use->second, {}});
  }
}

std::optional<SuspendedMemory> recall_suspended(const Process& process) {
  const auto path = path_of(process);
  return path ? read_suspended(*path) : std::nullopt;
}

std::optional<SuspendedMemory> recall_suspended_in(const std::string& directory,
                                                   const ProcessId& process,
                                                   const std::string& mark) {
  return read_suspended(path_in(directory, process, mark));
}

void forget_suspended(const Process& process) {
  fault_only(FaultPoint::kForget);
  if (const auto path = path_of(process)) (void)::unlink(path->c_str());
}

}  // namespace stasis
