// SPDX-License-Identifier: GPL-2.0-or-later
#include "gpu_record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/fd.h"

namespace stasis::plugin {
namespace {

using nlohmann::json;

constexpr const char* kFile = "cuda-plugin.json";
constexpr int kVersion = 1;
constexpr std::size_t kLimit = 4 << 20;

constexpr const char* kCopyAgain =
    "copy the image again, or remove the file: then the restore is tried without it";

tl::unexpected<Error> corrupt(const std::string& what) {
  return fail(ErrorCode::kImageCorrupt, fmt::format("{} of the image is damaged: {}", kFile, what),
              kCopyAgain);
}

}  // namespace

std::string to_text(const GpuRecord& record) {
  json gpus = json::array();
  for (const Gpu& gpu : record.gpus) {
    gpus.push_back({{"uuid", gpu.uuid.to_string()},
                    {"name", gpu.name},
                    {"pci_bus_id", gpu.pci_bus_id},
                    {"memory_bytes", gpu.memory_total}});
  }
  json processes = json::array();
  for (const ProcessRecord& process : record.processes) {
    json uses = json::array();
    for (const GpuUse& use : process.uses)
      uses.push_back({{"gpu", use.gpu.to_string()}, {"bytes", use.bytes}});
    processes.push_back({{"pid", process.ns_pid},
                         {"state", std::string(cuda_state_name(process.initial))},
                         {"gpu_memory", uses}});
  }
  return json{{"version", kVersion},
              {"simulated", record.simulated},
              {"driver_version", record.driver_version},
              {"gpus", gpus},
              {"processes", processes}}
             .dump(1, ' ', false, json::error_handler_t::replace) +
         "\n";
}

Result<GpuRecord> parse_record(const std::string& text) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) return corrupt("it is no JSON object");
  try {
    GpuRecord record;
    if (const int version = object.at("version").get<int>(); version != kVersion) {
      return fail(ErrorCode::kImageVersion,
                  fmt::format("{} of the image is of version {}, and this plugin knows {}", kFile,
                              version, kVersion),
                  "restore it with the version of Stasis that made it, or a newer one");
    }
    record.simulated = object.at("simulated").get<bool>();
    record.driver_version = object.at("driver_version").get<std::string>();
    for (const json& item : object.at("gpus")) {
      const auto uuid = GpuUuid::parse(item.at("uuid").get<std::string>());
      if (!uuid) return corrupt("a GPU without a UUID");
      record.gpus.push_back({*uuid, item.at("name").get<std::string>(),
                             item.at("pci_bus_id").get<std::string>(),
                             item.at("memory_bytes").get<std::uint64_t>(), 0});
    }
    for (const json& item : object.at("processes")) {
      ProcessRecord process;
      process.ns_pid = item.at("pid").get<int>();
      const auto state = cuda_state_from_name(item.at("state").get<std::string>());
      if (!state) return corrupt("a process in no known state");
      process.initial = *state;
      for (const json& use : item.at("gpu_memory")) {
        const auto uuid = GpuUuid::parse(use.at("gpu").get<std::string>());
        if (!uuid) return corrupt("memory on a GPU without a UUID");
        process.uses.push_back({*uuid, use.at("bytes").get<std::uint64_t>()});
      }
      record.processes.push_back(std::move(process));
    }
    return record;
  } catch (const json::exception& error) {
    return corrupt(error.what());
  }
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
  // O_NONBLOCK: to open a pipe without a writer would wait for ever.
  STASIS_TRY_ASSIGN(auto fd, open_file(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  if (::fstat(fd.get(), &info) != 0) return fail(errno_error("cannot look at " + name, errno));
  if (!S_ISREG(info.st_mode)) {
    return fail(ErrorCode::kImageCorrupt, name + " of the image is no regular file", kCopyAgain);
  }
  STASIS_TRY_ASSIGN(auto text, read_file(fd, name, limit));
  return std::optional<std::string>(std::move(text));
}

Result<std::optional<GpuRecord>> read_record(int directory) {
  STASIS_TRY_ASSIGN(auto text, read_image_file(directory, kFile, kLimit));
  if (!text) return std::optional<GpuRecord>();
  STASIS_TRY_ASSIGN(auto record, parse_record(*text));
  return std::optional<GpuRecord>(std::move(record));
}

}  // namespace stasis::plugin
