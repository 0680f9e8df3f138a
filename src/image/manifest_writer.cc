#include <algorithm>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "image/checksum.h"
#include "image/manifest.h"
#include "image/manifest_fields.h"
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

}  // namespace

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
  Manifest written = manifest;
  const std::size_t room =
      std::min(kCommand, kCommands / std::max<std::size_t>(written.processes.size(), 1));
  for (ProcessRecord& process : written.processes)
    process.command = shortened(process.command, room);
  return close_manifest_text(
      JsonWriter<Json>::json_of(written).dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace stasis
