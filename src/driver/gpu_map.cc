#include "driver/gpu_map.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>

#include <fmt/format.h>

namespace stasis {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

// "00000000:65:00.0" without the leading zeros of its domain, so that all spellings compare equal.
std::string short_pci(std::string_view address) {
  std::string out = lower(address);
  if (std::count(out.begin(), out.end(), ':') == 1) out = "0:" + out;
  const std::size_t first = out.find_first_not_of('0');
  out.erase(0, std::min(first, out.find(':')));
  return out;
}

std::string list_gpus(std::span<const Gpu> gpus) {
  std::string out;
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    out += fmt::format("{}{}: {} ({}, {})", i == 0 ? "" : "; ", i, gpus[i].uuid.to_string(),
                       gpus[i].name, gpus[i].pci_bus_id);
  }
  return out.empty() ? "none" : out;
}

const Gpu* by_uuid(std::span<const Gpu> gpus, const GpuUuid& uuid) {
  const auto it =
      std::find_if(gpus.begin(), gpus.end(), [&](const Gpu& g) { return g.uuid == uuid; });
  return it == gpus.end() ? nullptr : &*it;
}

bool same_model(const Gpu& a, const Gpu& b) {
  return a.name == b.name && a.memory_total == b.memory_total;
}

// The map being built: to[i] is where from[i] goes.
class Builder {
 public:
  Builder(std::span<const Gpu> from, std::span<const Gpu> to)
      : from_(from), to_(to), target_(from.size()), taken_(to.size(), false) {}

  bool has_target(std::size_t source) const { return target_[source].has_value(); }
  bool is_taken(std::size_t destination) const { return taken_[destination]; }
  void assign(std::size_t source, std::size_t destination) {
    target_[source] = destination;
    taken_[destination] = true;
  }

  // Gives every source without a destination the first free one that `fits`.
  template <class Fits>
  void fill(Fits fits) {
    for (std::size_t i = 0; i < from_.size(); ++i) {
      for (std::size_t j = 0; !has_target(i) && j < to_.size(); ++j) {
        if (!taken_[j] && fits(from_[i], to_[j])) assign(i, j);
      }
    }
  }

  const Gpu& destination(std::size_t source) const { return to_[*target_[source]]; }

 private:
  std::span<const Gpu> from_;
  std::span<const Gpu> to_;
  std::vector<std::optional<std::size_t>> target_;
  std::vector<bool> taken_;
};

}  // namespace

Result<std::vector<GpuMapEntry>> parse_gpu_map(const std::string& text) {
  std::vector<GpuMapEntry> entries;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    const std::size_t equals = item.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == item.size() ||
        item.find('=', equals + 1) != std::string::npos) {
      return fail(ErrorCode::kDeviceMapInvalid,
                  fmt::format("'{}' is not a GPU map: '{}' has not the form OLD=NEW", text, item),
                  "write OLD=NEW[,OLD=NEW...], each side a UUID, an index or a PCI address");
    }
    entries.push_back({item.substr(0, equals), item.substr(equals + 1)});
    begin = end + 1;
  }
  return entries;
}

std::string gpu_map_text(std::span<const GpuMapEntry> entries) {
  std::string text;
  for (const GpuMapEntry& entry : entries)
    text += fmt::format("{}{}={}", text.empty() ? "" : ",", entry.from, entry.to);
  return text;
}

Result<GpuUuid> find_gpu(std::span<const Gpu> gpus, const std::string& name) {
  const auto unknown = [&](const char* why) {
    return fail(ErrorCode::kDeviceMapInvalid, fmt::format("GPU '{}' {}", name, why),
                "GPUs here: " + list_gpus(gpus));
  };
  std::size_t index = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), index);
  if (error == std::errc() && end == name.data() + name.size()) {
    if (index >= gpus.size()) return unknown("does not exist");
    return gpus[index].uuid;
  }
  const std::string wanted = lower(name);
  std::vector<const Gpu*> found;
  for (const Gpu& gpu : gpus) {
    const std::string uuid = lower(gpu.uuid.to_string());
    const bool uuid_matches = wanted.size() >= 12 && uuid.starts_with(wanted);
    const bool pci_matches =
        name.find(':') != std::string::npos && short_pci(name) == short_pci(gpu.pci_bus_id);
    if (uuid_matches || pci_matches) found.push_back(&gpu);
  }
  if (found.empty()) return unknown("does not exist");
  if (found.size() > 1) return unknown("is ambiguous");
  return found.front()->uuid;
}

Result<std::vector<GpuPair>> complete_gpu_map(std::span<const GpuMapEntry> entries,
                                              std::span<const Gpu> from, std::span<const Gpu> to) {
  if (from.size() != to.size()) {
    return fail(
        ErrorCode::kGpuMismatch,
        fmt::format("the process saw {} GPUs and there are {} here", from.size(), to.size()),
        "the driver demands a one-to-one map of all GPUs it can see; restore on a machine "
        "(or in a container) with the same number of GPUs");
  }
  Builder map(from, to);
  for (const GpuMapEntry& entry : entries) {
    auto old_uuid = find_gpu(from, entry.from);
    if (!old_uuid) return fail(std::move(old_uuid.error()).within("the old side of the GPU map"));
    auto new_uuid = find_gpu(to, entry.to);
    if (!new_uuid) return fail(std::move(new_uuid.error()).within("the new side of the GPU map"));
    const auto source = static_cast<std::size_t>(by_uuid(from, *old_uuid) - from.data());
    const auto destination = static_cast<std::size_t>(by_uuid(to, *new_uuid) - to.data());
    if (map.has_target(source) || map.is_taken(destination)) {
      return fail(
          ErrorCode::kDeviceMapInvalid,
          fmt::format("the GPU map names {} twice", map.has_target(source) ? entry.from : entry.to),
          "name each GPU at most once on each side");
    }
    map.assign(source, destination);
  }
  map.fill([](const Gpu& a, const Gpu& b) { return a.uuid == b.uuid; });
  map.fill(same_model);
  map.fill([](const Gpu& a, const Gpu& b) { return a.memory_total <= b.memory_total; });
  map.fill([](const Gpu&, const Gpu&) { return true; });
  std::vector<GpuPair> pairs;
  for (std::size_t i = 0; i < from.size(); ++i) {
    pairs.push_back({from[i].uuid, map.destination(i).uuid});
  }
  return pairs;
}

}  // namespace stasis
