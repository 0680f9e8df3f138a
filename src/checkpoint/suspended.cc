#include "checkpoint/suspended.h"

#include <fcntl.h>
#include <unistd.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/fd.h"
#include "checkpoint/journal.h"

namespace stasis {
namespace {

using nlohmann::json;

// The start time is in the name, so that a later process with the same number finds nothing.
std::optional<std::string> path_of(const Process& process) {
  auto directory = journal_directory();
  if (!directory) return std::nullopt;
  return fmt::format("{}/{}-{}.suspended", *directory, process.pid().value,
                     process.info().start_ticks);
}

}  // namespace

void remember_suspended(const Group& group) {
  for (const GroupMember& member : group.members()) {
    const auto use = group.gpu_use().find(member.process.pid());
    if (!member.initial || use == group.gpu_use().end()) continue;
    const auto path = path_of(member.process);
    if (!path) return;
    json uses = json::array();
    for (const GpuUse& part : use->second) {
      uses.push_back({{"gpu", part.gpu.to_string()}, {"bytes", part.bytes}});
    }
    const std::string text = uses.dump();
    auto fd = open_file(AT_FDCWD, *path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600);
    if (fd) (void)write_all(fd->get(), text.data(), text.size(), *path);
  }
}

std::optional<std::vector<GpuUse>> recall_suspended(const Process& process) {
  const auto path = path_of(process);
  if (!path) return std::nullopt;
  auto text = read_file(AT_FDCWD, *path, 1 << 20);
  if (!text) return std::nullopt;
  const json uses = json::parse(*text, nullptr, false);
  if (!uses.is_array()) return std::nullopt;
  std::vector<GpuUse> out;
  try {
    for (const json& item : uses) {
      const auto uuid = GpuUuid::parse(item.at("gpu").get<std::string>());
      if (!uuid) return std::nullopt;
      out.push_back({*uuid, item.at("bytes").get<std::uint64_t>()});
    }
  } catch (const json::exception&) {
    return std::nullopt;
  }
  return out;
}

void forget_suspended(const Process& process) {
  if (const auto path = path_of(process)) (void)::unlink(path->c_str());
}

}  // namespace stasis
