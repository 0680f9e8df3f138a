// SPDX-License-Identifier: GPL-2.0-or-later
#include "gpu_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "base/fd.h"
#include "base/json_text.h"
#include "driver/gpu_use_fields.h"

namespace stasis::plugin {
namespace {

constexpr const char* kFile = "cuda-plugin.json";
constexpr int kVersion = 1;
constexpr std::size_t kLimit = 4 << 20;
constexpr std::size_t kMostValues = 1 << 19;
constexpr std::size_t kDeepest = 8;
constexpr int kMaxPort = 65535;

constexpr const char* kCopyAgain =
    "copy the image again, or remove the file: then the restore is tried without it";

tl::unexpected<Error> corrupt(const std::string& what) {
  return fail(ErrorCode::kImageCorrupt, fmt::format("{} of the image is damaged: {}", kFile, what),
              kCopyAgain);
}

// Only what tells whether the rest can be read.
struct Version {
  int number = 0;
};
void fields(auto& io, Described<Version> auto& version) { io("version", version.number); }

// A process whose CUDA state has failed is not dumped.
std::optional<CudaState> saved_state_from_name(std::string_view name) {
  const auto state = cuda_state_from_name(name);
  return state == CudaState::kFailed ? std::nullopt : state;
}

// As this file has it.
struct GpuHere : Gpu {
  GpuHere() = default;
  explicit GpuHere(Gpu gpu) : Gpu(std::move(gpu)) {}
};
void fields(auto& io, Described<GpuHere> auto& gpu) {
  io.named("uuid", gpu.uuid, &GpuUuid::to_string, GpuUuid::parse);
  io("name", gpu.name);
  io("pci_bus_id", gpu.pci_bus_id);
  io("memory_bytes", gpu.memory_total);
}

}  // namespace

void fields(auto& io, Described<ProcessRecord> auto& process) {
  io("pid", process.ns_pid);
  io.named("state", process.initial, cuda_state_name, saved_state_from_name);
  io("gpu_memory", process.uses);
}

void fields(auto& io, Described<GpuRecord> auto& record) {
  int version = kVersion;
  io("version", version);
  io("simulated", record.simulated);
  io("driver_version", record.driver_version);
  std::vector<GpuHere> gpus(record.gpus.begin(), record.gpus.end());
  io("gpus", gpus);
  if constexpr (std::remove_reference_t<decltype(io)>::kReads)
    record.gpus.assign(gpus.begin(), gpus.end());
  io("processes", record.processes);
  io.optional("tcp_ports", record.tcp_ports, Items{0, kMaxPort}, Within{1, kMaxPort});
}

std::string to_text(const GpuRecord& record) {
  return record_to_json(record).dump(1, ' ', false, nlohmann::json::error_handler_t::replace) +
         "\n";
}

Result<GpuRecord> parse_record(const std::string& text) {
  const auto json = parse_json(text, {kMostValues, kDeepest});
  JsonReader::Problem problem;
  const auto version = JsonReader::read<Version>(json, problem);
  if (problem.what.empty() && version.number != kVersion) {
    return fail(ErrorCode::kImageVersion,
                fmt::format("{} of the image is of version {}, and this plugin knows {}", kFile,
                            version.number, kVersion),
                "restore it with the version of Stasis that made it, or a newer one");
  }
  auto record = JsonReader::read<GpuRecord>(json, problem);
  if (!problem.what.empty()) return corrupt(problem.what);
  return record;
}

Result<void> write_record(int directory, const GpuRecord& record) {
  STASIS_TRY_ASSIGN(
      auto fd,
      open_file(directory, kFile, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK, 0600));
  const std::string text = to_text(record);
  auto done = write_all(fd.get(), text.data(), text.size(), kFile);
  if (done) done = fd.close(kFile);
  return done;
}

Result<std::optional<std::string>> read_image_file(int directory, const std::string& name,
                                                   std::size_t limit) {
  struct stat info {};
  if (::fstatat(directory, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT) {
    return std::optional<std::string>();
  }
  auto fd = open_checked(directory, name, O_RDONLY | O_NOFOLLOW, is_regular_file);
  if (!fd && fd.error().code == ErrorCode::kNotSupported)
    return fail(ErrorCode::kImageCorrupt, name + " of the image is no regular file", kCopyAgain);
  if (!fd) return fail(std::move(fd.error()));
  STASIS_TRY_ASSIGN(auto text, read_file(*fd, name, limit));
  return std::optional<std::string>(std::move(text));
}

Result<std::optional<GpuRecord>> read_record(int directory) {
  STASIS_TRY_ASSIGN(auto text, read_image_file(directory, kFile, kLimit));
  if (!text) return std::optional<GpuRecord>();
  STASIS_TRY_ASSIGN(auto record, parse_record(*text));
  return std::optional<GpuRecord>(std::move(record));
}

}  // namespace stasis::plugin
