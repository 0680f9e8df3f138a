#include <algorithm>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/json_text.h"
#include "image/checksum.h"
#include "image/directory.h"
#include "image/manifest.h"
#include "image/manifest_fields.h"
#include "image/manifest_format.h"

namespace stasis {
namespace {

using Json = nlohmann::json;
using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only

tl::unexpected<Error> wrong(std::string what) {
  return corrupt_image("manifest.json: " + std::move(what));
}

bool valid_time(std::string_view text) {
  constexpr std::string_view kForm = "dddd-dd-ddTdd:dd:ddZ";
  return text.size() == kForm.size() &&
         std::equal(text.begin(), text.end(), kForm.begin(), [](char c, char form) {
           return form == 'd' ? c >= '0' && c <= '9' : c == form;
         });
}

// A process that is its own ancestor; every parent is one of `processes`, or 0.
std::optional<int> own_ancestor(const std::unordered_map<int, const ProcessRecord*>& processes) {
  std::unordered_set<int> sound;
  for (const auto& [pid, process] : processes) {
    std::unordered_set<int> path;
    for (const ProcessRecord* at = process; !sound.contains(at->pid.value);) {
      if (!path.insert(at->pid.value).second) return at->pid.value;
      if (at->parent.value == 0) break;
      at = processes.at(at->parent.value);
    }
    sound.merge(path);
  }
  return std::nullopt;
}

// The following say what is wrong; nothing if all is well.

std::string check_processes(const Manifest& manifest) {
  std::set<std::string_view> gpus;
  for (const GpuRecord& gpu : manifest.gpus) {
    if (!gpus.insert(gpu.uuid).second) return fmt::format("GPU {} stands twice", gpu.uuid);
  }
  std::unordered_map<int, const ProcessRecord*> processes;
  for (const ProcessRecord& process : manifest.processes) {
    if (!processes.emplace(process.pid.value, &process).second) {
      return fmt::format("process {} stands twice", process.pid.value);
    }
  }
  std::unordered_set<int> threads;
  for (const ProcessRecord& process : manifest.processes) {
    for (const Tid thread : process.threads) {
      if (processes.contains(thread.value) || !threads.insert(thread.value).second) {
        return fmt::format("the number of thread {} stands twice", thread.value);
      }
    }
    std::set<Tid> with_state;
    for (const ThreadStateRecord& thread :
         process.kernel_state.value_or(KernelStateRecord()).threads) {
      if (!with_state.insert(thread.thread).second)
        return fmt::format("the state of thread {} stands twice", thread.thread.value);
    }
  }
  const auto root = processes.find(manifest.root.value);
  if (root == processes.end()) return "root_pid is none of the processes";
  if (root->second->parent.value != 0) return "the root has a parent in the image";
  for (const ProcessRecord& process : manifest.processes) {
    if (process.parent == process.pid) {
      return fmt::format("process {} is its own parent", process.pid.value);
    }
    if (process.parent.value != 0 && !processes.contains(process.parent.value)) {
      return fmt::format("the parent of process {} is none of the processes", process.pid.value);
    }
    for (const GpuMemoryRecord& use : process.gpu_memory) {
      if (!gpus.contains(use.gpu_uuid)) {
        return fmt::format("process {} uses a GPU that is not listed", process.pid.value);
      }
    }
  }
  if (const auto pid = own_ancestor(processes))
    return fmt::format("process {} is its own ancestor", *pid);
  return {};
}

std::string check_sizes(const Manifest& manifest) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    if (i > 0 && manifest.files[i].path <= manifest.files[i - 1].path) {
      return fmt::format("files[{}] is out of order or stands twice", i);
    }
    total += manifest.files[i].size;  // each below 2^53, and checked as it grows: no overflow
    if (total > kMaxInteger) return "the files are larger than can be";
  }
  for (const auto& content : {manifest.content, manifest.host_content}) {
    // 65 numbers below 2^53 at most: no overflow either.
    if (content) total += content->total_bytes();
    if (total > kMaxInteger) return "the files are larger than can be";
  }
  if (total != manifest.total_bytes) {
    return fmt::format("total_bytes is {}, the files have {}", manifest.total_bytes, total);
  }
  return {};
}

// What the fields must have to do with each other.
std::string check_relations(const Manifest& manifest) {
  if (!valid_time(manifest.created)) return "created is no time in UTC";
  std::string problem = check_processes(manifest);
  return problem.empty() ? check_sizes(manifest) : problem;
}

Result<Json> parse_object(std::string_view text) {
  const JsonLimits limits{kMaxValues, kMaxDepth};
  if (auto problem = json_problem(text, limits); !problem.empty()) return wrong(std::move(problem));
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return wrong("it is no JSON object");
  return Result<Json>(tl::in_place, std::move(json));
}

Result<void> check_trailer(std::string_view text) {
  if (text.size() > kMaxText) {
    return wrong(fmt::format("it has {} bytes, more than {}", text.size(), kMaxText));
  }
  if (text.size() < kTrailerSize) return wrong("it is cut short");
  const std::string_view body = text.substr(0, text.size() - kTrailerSize);
  const std::string_view trailer = text.substr(body.size());
  const std::string_view digits = trailer.substr(kTrailerHead.size(), kChecksumDigits);
  if (!trailer.starts_with(kTrailerHead) || !trailer.ends_with(kTrailerTail) || !is_hex(digits)) {
    return wrong("it does not end with its checksum; it is cut short or was edited");
  }
  if (const std::string actual = xxh3_hex(body); actual != digits) {
    return wrong(fmt::format("its checksum is {}, expected {}", actual, digits));
  }
  return {};
}

// The two fields that every format has: which readers may go on.
struct Version {
  std::uint64_t format = 0;
  std::vector<std::string> required;
};
void fields(auto& io, Described<Version> auto& version) {
  io("format", version.format, Within{1, kMaxInteger});
  io("requires", version.required, Items{0, kMaxRequires});
}

Result<void> check_version(const Json& json) {
  JsonReader::Problem problem{{}, kMaxString};
  const auto version = JsonReader::read<Version>(json, problem);
  if (!problem.what.empty()) return wrong(std::move(problem.what));
  if (version.format > static_cast<std::uint64_t>(kImageFormat)) {
    return fail(ErrorCode::kImageVersion,
                fmt::format("the image has format {}, this program reads up to {}", version.format,
                            kImageFormat),
                "restore it with the Stasis that wrote it, or a newer one");
  }
  for (const std::string& feature : version.required) {
    if (feature == kNeedsContent || feature == kNeedsHostContent || feature == kNeedsGroup)
      continue;
    return fail(
        ErrorCode::kImageVersion,
        fmt::format("the image needs the feature \"{}\", which this program lacks", feature),
        "restore it with the Stasis that wrote it, or a newer one");
  }
  return {};
}

}  // namespace

std::size_t Manifest::file_count() const {
  std::size_t count = files.size();
  for (const auto* part : {&content, &host_content})
    if (*part) count += (*part)->data_sizes.size() + 1;  // and the index
  return count;
}

std::set<int> Manifest::numbers() const {
  std::set<int> all;
  for (const ProcessRecord& process : processes) {
    all.insert(process.pid.value);
    for (const Tid thread : process.threads)
      all.insert(thread.value);
  }
  return all;
}

Result<Manifest> parse_manifest(std::string_view text) {
  STASIS_TRY(check_trailer(text));
  STASIS_TRY_ASSIGN(auto json, parse_object(text));
  STASIS_TRY(check_version(json));
  JsonReader::Problem problem{{}, kMaxString};
  auto manifest = JsonReader::read<Manifest>(json, problem);
  if (problem.what.empty()) problem.what = check_relations(manifest);
  if (!problem.what.empty()) return wrong(std::move(problem.what));
  return manifest;
}

}  // namespace stasis
