#include "operations/image_report.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include <fmt/format.h>

#include "base/units.h"
#include "image/manifest_format.h"

namespace stasis {

namespace {

using Words = std::vector<std::string>;

template <class T>
bool is_default(const CriuOption<T>& row, const CriuOptions& criu) {
  return criu.*row.field == CriuOptions().*row.field;
}

// As `stasis dump` would be given it; nothing of a default.
void add_words(Words& out, const CriuOption<bool>& row, const CriuOptions& criu) {
  if (!is_default(row, criu)) out.push_back(criu.*row.field ? row.flag : negated(row.flag));
}
void add_words(Words& out, const CriuOption<std::uint32_t>& row, const CriuOptions& criu) {
  if (!is_default(row, criu)) out.push_back(fmt::format("{} {}", row.flag, criu.*row.field));
}
void add_words(Words& out, const CriuOption<std::string>& row, const CriuOptions& criu) {
  if (!(criu.*row.field).empty()) out.push_back(fmt::format("{} {}", row.flag, criu.*row.field));
}
void add_words(Words& out, const CriuOption<Words>& row, const CriuOptions& criu) {
  for (const std::string& one : criu.*row.field)
    out.push_back(fmt::format("{} {}", row.flag, one));
}
void add_words(Words& out, const CriuOption<CgroupMode>& row, const CriuOptions& criu) {
  if (!is_default(row, criu))
    out.push_back(fmt::format("{} {}", row.flag, choice_name(criu.*row.field)));
}
// Also the default: a restore of such connections wants the same program there.
void add_words(Words& out, const CriuOption<NetworkLock>& row, const CriuOptions& criu) {
  if (criu.tcp_established)
    out.push_back(fmt::format("{} {}", row.flag, choice_name(criu.*row.field)));
}

}  // namespace

std::vector<std::string> options_used(const CriuOptions& criu) {
  Words out;
  for_each_criu_option([&](const auto& row) { add_words(out, row, criu); });
  return out;
}

std::uint64_t gpu_bytes(const ProcessRecord& process) {
  std::uint64_t sum = 0;
  for (const GpuMemoryRecord& use : process.gpu_memory)
    sum += use.bytes;
  return sum;
}

std::vector<TreeLine> tree_lines(const Manifest& manifest, std::size_t most) {
  std::multimap<int, const ProcessRecord*> children;
  for (const ProcessRecord& process : manifest.processes)
    children.emplace(process.parent.value, &process);
  std::vector<TreeLine> waiting;  // the next one at the end
  for (auto process = manifest.processes.rbegin(); process != manifest.processes.rend(); ++process)
    if (process->pid != manifest.root) waiting.push_back({&*process, 0, true});
  for (const ProcessRecord& process : manifest.processes)
    if (process.pid == manifest.root) waiting.push_back({&process, 0, true});
  std::set<int> seen;
  std::vector<TreeLine> out;
  while (!waiting.empty() && out.size() < most) {
    const TreeLine line = waiting.back();
    waiting.pop_back();
    if (!seen.insert(line.process->pid.value).second) continue;
    out.push_back(line);
    const auto [begin, end] = children.equal_range(line.process->pid.value);
    bool last = true;
    for (auto child = end; child != begin; last = false) {
      --child;
      waiting.push_back({child->second, line.depth + 1, last});
    }
  }
  return out;
}

std::optional<ContentReport> report_content(const ImageReader& image, ContentKind kind) {
  if (!image.has_content(kind)) return std::nullopt;
  const auto content = image.open_content({false, kind});
  if (!content) return std::nullopt;
  ContentReport out;
  out.kind = kind;
  const ContentRecord& record =
      kind == ContentKind::kGpu ? *image.manifest().content : *image.manifest().host_content;
  const std::vector<ContentUse> uses = content_use(content->index(), record.reused_files);
  for (std::size_t i = 0; i < uses.size(); ++i)
    out.processes.push_back({content->streams()[i].pid, uses[i]});
  out.all = sum(uses);
  out.chunk_bytes = content->chunk_bytes();
  const std::uint64_t data = record.total_bytes() - record.index_size;
  out.unused_bytes = data - std::min(data, out.all.room_bytes);
  return out;
}

std::string content_text(const ContentUse& use, ContentKind kind) {
  std::string out =
      fmt::format("{} of {} memory in {}", format_bytes(use.bytes),
                  kind == ContentKind::kGpu ? "GPU" : "host", format_bytes(use.stored_bytes));
  if (use.bytes > 0) {
    out += fmt::format(" ({:.0f} %)", 100 * static_cast<double>(use.stored_bytes) /
                                          static_cast<double>(use.bytes));
  }
  if (use.zero_bytes > 0) out += fmt::format(", {} are zeros", format_bytes(use.zero_bytes));
  if (use.duplicate_bytes > 0)
    out += fmt::format(", {} are repetitions, stored once", format_bytes(use.duplicate_bytes));
  if (use.reused_bytes > 0)
    out += fmt::format(", {} are deduplicated against an earlier image",
                       format_bytes(use.reused_bytes));
  return out;
}

std::string content_text(const ContentReport& content) {
  std::string out = content_text(content.all, content.kind);
  if (content.unused_bytes > 0) {
    out += fmt::format("; besides, its data files have {} of no use any more",
                       format_bytes(content.unused_bytes));
  }
  return out;
}

std::string shell_word(const std::string& word) {
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 ||
           std::string_view("/._-+,:@%=").find(static_cast<char>(c)) != std::string_view::npos;
  });
  if (plain) return word;
  std::string out = "'";
  for (const char c : word)
    out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

bool is_chosen(const std::string& job_name) {
  constexpr std::string_view kMadeUp = "job-";
  return !job_name.empty() &&
         (!job_name.starts_with(kMadeUp) ||
          job_name.find_first_not_of("0123456789", kMadeUp.size()) != std::string::npos);
}

std::string line_of_job(const Manifest& manifest, const std::string& image) {
  std::string line = "stasis run --images-dir " + shell_word(image.substr(0, image.rfind('/')));
  if (is_chosen(manifest.job_name)) line += " --name " + shell_word(manifest.job_name);
  line += " --";
  if (manifest.job)
    for (const std::string& word : manifest.job->command)
      line += " " + shell_word(word);
  return line;
}

bool is_for_a_job(const Manifest& manifest) {
  return std::any_of(manifest.files.begin(), manifest.files.end(), [](const FileRecord& file) {
    return file.path == manifest_format::kSharedMemoryIndex;
  });
}

bool restorable(const ImageReport& report) {
  return std::none_of(report.checks.begin(), report.checks.end(),
                      [](const RestoreCheck& check) { return check.error.has_value(); });
}

}  // namespace stasis
