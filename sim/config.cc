#include "sim/config.h"

#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace stasis::sim {
namespace {

constexpr std::uint64_t kMinimumCapacity = std::uint64_t{32} << 20;
constexpr std::size_t kMaximumGpus = 64;
constexpr unsigned kFirstPciBus = 0x1A;

std::string_view env(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : std::string_view{};
}

// 1 or 0; what it was if unset.
bool switch_of(const char* name, bool& out, std::string& error) {
  const std::string_view text = env(name);
  if (text.empty()) return true;
  if (text != "0" && text != "1") {
    error = std::string(name) + ": neither 0 nor 1: '" + std::string(text) + "'";
    return false;
  }
  out = text == "1";
  return true;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    auto at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::uint64_t mix(std::uint64_t x) {  // splitmix64's finaliser
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The same machine and index give the same UUID in every process and on every run.
cuda::CUuuid make_uuid(std::string_view machine, std::size_t index) {
  std::uint64_t seed = 0xcbf29ce484222325;
  for (char c : machine)
    seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  const std::uint64_t halves[2] = {mix(seed + 2 * index), mix(seed + 2 * index + 1)};
  cuda::CUuuid uuid;
  std::memcpy(uuid.bytes, halves, sizeof uuid.bytes);
  uuid.bytes[6] = static_cast<char>((uuid.bytes[6] & 0x0f) | 0x40);  // RFC 4122 version 4
  uuid.bytes[8] = static_cast<char>((uuid.bytes[8] & 0x3f) | 0x80);
  return uuid;
}

// CUDA's rule for CUDA_VISIBLE_DEVICES: ordinals or UUIDs; the first that is unknown ends the list.
std::vector<int> parse_visible(const std::vector<GpuSpec>& gpus) {
  std::vector<int> visible;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!text) {
    for (std::size_t i = 0; i < gpus.size(); ++i)
      visible.push_back(static_cast<int>(i));
    return visible;
  }
  for (auto part : split(text, ',')) {
    int found = -1;
    std::uint64_t number = 0;
    if (parse_number(part, number)) {
      if (number < gpus.size()) found = static_cast<int>(number);
    } else if (part.starts_with("GPU-")) {
      for (std::size_t i = 0; i < gpus.size() && found < 0; ++i) {
        if (to_text(gpus[i].uuid).starts_with(part)) found = static_cast<int>(i);
      }
    }
    if (found < 0) break;
    visible.push_back(found);
  }
  return visible;
}

}  // namespace

bool parse_number(std::string_view text, std::uint64_t& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

bool same(const cuda::CUuuid& a, const cuda::CUuuid& b) {
  return std::memcmp(a.bytes, b.bytes, sizeof a.bytes) == 0;
}

std::string to_text(const cuda::CUuuid& uuid) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    auto byte = static_cast<unsigned char>(uuid.bytes[i]);
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string pci_text(unsigned bus) {
  char text[16];
  std::snprintf(text, sizeof text, "0000:%02X:00.0", bus & 0xff);
  return text;
}

bool parse_duration(std::string_view text, std::uint64_t& out_ns) {
  std::uint64_t unit = 0;
  if (text.ends_with("ms")) {
    unit = 1'000'000;
    text.remove_suffix(2);
  } else if (text.ends_with("s")) {
    unit = 1'000'000'000;
    text.remove_suffix(1);
  }
  std::uint64_t number = 0;
  if (!unit || !parse_number(text, number) || number > 86'400'000) return false;
  out_ns = number * unit;
  return true;
}

bool parse_size(std::string_view text, std::uint64_t& out, std::string& error) {
  std::string_view digits = text;
  unsigned shift = 0;
  if (!digits.empty()) {
    switch (digits.back()) {
      case 'K':
        shift = 10;
        break;
      case 'M':
        shift = 20;
        break;
      case 'G':
        shift = 30;
        break;
      case 'T':
        shift = 40;
        break;
      default:
        break;
    }
  }
  if (shift) digits.remove_suffix(1);
  std::uint64_t number = 0;
  if (!parse_number(digits, number) || number > (UINT64_MAX >> shift)) {
    error = "not a size: '" + std::string(text) + "' (a number, then nothing or K, M, G or T)";
    return false;
  }
  out = number << shift;
  return true;
}

bool parse_gpus(std::string_view text, std::string_view machine, std::vector<GpuSpec>& out,
                std::string& error) {
  out.clear();
  if (text == "none") return true;
  for (auto item : split(text, ',')) {
    GpuSpec gpu;
    gpu.name = "Stasis Simulated GPU";
    if (auto colon = item.find(':'); colon != std::string_view::npos) {
      gpu.name = item.substr(0, colon);
      item.remove_prefix(colon + 1);
      if (gpu.name.empty()) {
        error = "STASIS_SIM_GPUS: empty name before ':'";
        return false;
      }
    }
    std::uint64_t count = 1;
    if (auto x = item.find('x'); x != std::string_view::npos) {
      if (!parse_number(item.substr(0, x), count) || count == 0) {
        error = "STASIS_SIM_GPUS: not a count: '" + std::string(item.substr(0, x)) + "'";
        return false;
      }
      item.remove_prefix(x + 1);
    }
    if (!parse_size(item, gpu.capacity, error)) {
      error.insert(0, "STASIS_SIM_GPUS: ");
      return false;
    }
    if (gpu.capacity < kMinimumCapacity) {
      error = "STASIS_SIM_GPUS: a GPU needs at least 32M";
      return false;
    }
    if (count > kMaximumGpus - out.size()) {
      error = "STASIS_SIM_GPUS: more than 64 GPUs";
      return false;
    }
    for (std::uint64_t i = 0; i < count; ++i) {
      gpu.uuid = make_uuid(machine, out.size());
      gpu.pci_bus = kFirstPciBus + static_cast<unsigned>(out.size());
      out.push_back(gpu);
    }
  }
  return true;
}

bool load(Config& out, std::string& error) {
  std::string_view machine = env("STASIS_SIM_MACHINE");
  if (machine.empty()) machine = "0";
  std::string_view gpus = env("STASIS_SIM_GPUS");
  if (gpus.empty()) gpus = "1x8G";
  if (!parse_gpus(gpus, machine, out.gpus, error)) return false;
  out.visible = parse_visible(out.gpus);

  out.dir = env("STASIS_SIM_DIR");
  if (out.dir.empty()) out.dir = "/dev/shm/stasis-sim-" + std::to_string(::geteuid());
  if (out.dir.front() != '/' || out.dir.size() > 180) {
    error = "STASIS_SIM_DIR: not an absolute path of at most 180 characters: '" + out.dir + "'";
    return false;
  }

  out.context_bytes = Config().context_bytes;
  if (auto text = env("STASIS_SIM_CONTEXT"); !text.empty()) {
    if (!parse_size(text, out.context_bytes, error) || out.context_bytes % 4096 != 0) {
      error = error.empty() ? "not whole pages of 4K: '" + std::string(text) + "'" : error;
      error.insert(0, "STASIS_SIM_CONTEXT: ");
      return false;
    }
  }

  out.exports_restored_below = Config().exports_restored_below;
  if (auto text = env("STASIS_SIM_EXPORTS_RESTORED_BELOW"); !text.empty()) {
    if (!parse_size(text, out.exports_restored_below, error)) {
      error.insert(0, "STASIS_SIM_EXPORTS_RESTORED_BELOW: ");
      return false;
    }
  }

  out.switch_ns = Config().switch_ns;
  if (auto text = env("STASIS_SIM_LONG_KERNEL"); !text.empty()) {
    if (!parse_duration(text, out.switch_ns)) {
      error =
          "STASIS_SIM_LONG_KERNEL: not a duration like 500ms or 2s: '" + std::string(text) + "'";
      return false;
    }
  }

  out.driver_version = 580;
  if (auto text = env("STASIS_SIM_DRIVER_VERSION"); !text.empty()) {
    std::uint64_t number = 0;
    if (!parse_number(text.substr(0, text.find('.')), number) || number < 450 || number > 999) {
      error = "STASIS_SIM_DRIVER_VERSION: not a version like 580: '" + std::string(text) + "'";
      return false;
    }
    out.driver_version = static_cast<int>(number);
  }
  out.persistence = true;
  out.mig = false;
  return switch_of("STASIS_SIM_PERSISTENCE", out.persistence, error) &&
         switch_of("STASIS_SIM_MIG", out.mig, error) &&
         switch_of("STASIS_SIM_TAKES_FREED", out.takes_freed, error);
}

int Config::cuda_version() const {
  if (driver_version >= 590) return 13010;
  if (driver_version >= 580) return 13000;
  if (driver_version >= 575) return 12090;
  if (driver_version >= 570) return 12080;
  if (driver_version >= 565) return 12070;
  if (driver_version >= 560) return 12060;
  if (driver_version >= 555) return 12050;
  if (driver_version >= 550) return 12040;
  return 12000;
}

std::string Config::driver_text() const { return std::to_string(driver_version) + ".159.04"; }

}  // namespace stasis::sim
