#include "checkpoint/suspend_record.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <ctime>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/fd.h"
#include "base/json_record.h"
#include "checkpoint/journal.h"
#include "driver/gpu_use_fields.h"

namespace stasis {

void fields(auto& io, Described<Gpu> auto& gpu) {
  io.named("uuid", gpu.uuid, &GpuUuid::to_string, GpuUuid::parse);
  io("name", gpu.name);
  io("pci_bus_id", gpu.pci_bus_id);
  io("memory_total", gpu.memory_total);
}

void fields(auto& io, Described<SuspendedMemory> auto& memory) {
  io("uses", memory.uses);
  io("gpus", memory.gpus);
  io.optional("image", memory.image);
  io.optional("since", memory.since);  // older records have none
  io.optional("with_pid", memory.with.pid);
  io.optional("with_start_ticks", memory.with.start_ticks);
}

namespace {

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
  return record_from_text<SuspendedMemory>(*text);
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
  SuspendedMemory now = memory;
  now.since = std::time(nullptr);
  const std::string text = record_to_text(now);
  // Losing it loses a check, never a job; half of it must not be taken for the whole.
  STASIS_TRY(fault(FaultPoint::kRememberWrite));
  STASIS_TRY_ASSIGN(auto fd,
                    open_file(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600));
  auto written = write_all(fd.get(), text.data(), text.size(), path);
  if (!written) (void)::unlink(path.c_str());
  fault_only(FaultPoint::kRememberWritten);
  return written;
}

void remember_suspended(const ProcessTree& tree) {
  forget_the_dead();
  for (const TreeMember& member : tree.members()) {
    SuspendedMemory memory{tree.gpu_use_of(member.process.pid()), {}};
    if (!member.initial || memory.uses.empty()) continue;
    if (tree.cuda_count() > 1) memory.with = tree.members().front().process.info().id();
    (void)remember_suspended(member.process, memory);
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
