#include "checkpoint/swap_record.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <fmt/format.h>

#include "base/json_record.h"
#include "checkpoint/journal.h"
#include "checkpoint/state_file.h"
#include "proc/process_id.h"

namespace stasis {

void fields(auto& io, Described<SwapParty> auto& party) {
  io("name", party.name);
  io("pid", party.root.pid);
  io("start_ticks", party.root.start_ticks);
}

void fields(auto& io, Described<SwapRecord> auto& record) {
  io("owner", record.owner.pid);
  io.optional("owner_start_ticks", record.owner.start_ticks);
  io("out", record.out);
  io("in", record.in);
  io("gpu_map", record.gpu_map);
}

namespace {

constexpr std::string_view kSwapBegin = "swap-";
constexpr std::string_view kSwapEnd = ".json";

std::string swap_path(const std::string& directory, const SwapRecord& record) {
  return fmt::format("{}/{}{}-{}{}{}", directory, kSwapBegin, record.out.root.pid.value,
                     record.in.root.pid.value, pid_namespace_mark(), kSwapEnd);
}

Result<UniqueFd> take_swap(const std::string& path, const SwapRecord& record) {
  STASIS_TRY_ASSIGN(auto lock, lock_state_file(path));
  if (lock) return std::move(*lock);
  return fail(
      ErrorCode::kBusy,
      fmt::format("another `stasis swap` of {} and {}, or the recovery of one, is under way",
                  record.out.name, record.in.name),
      "wait for it to end, or interrupt it");
}

}  // namespace

bool is_our_swap(std::string_view name) {
  const std::string end = pid_namespace_mark() + std::string(kSwapEnd);
  if (!name.starts_with(kSwapBegin) || !name.ends_with(end)) return false;
  name.remove_prefix(kSwapBegin.size());
  name.remove_suffix(end.size());
  return !name.empty() && name.find_first_not_of("0123456789-") == std::string_view::npos;
}

Result<SwapJournal> SwapJournal::begin(SwapRecord record) {
  STASIS_TRY_ASSIGN(auto directory, journal_directory());
  const std::string path = swap_path(directory, record);
  STASIS_TRY_ASSIGN(auto lock, take_swap(path, record));
  record.owner = own_id();
  SwapJournal journal(std::move(lock), path, std::move(record));
  if (auto done = write_state_file(path, record_to_text(journal.record_)); !done) {
    journal.finish();
    return fail(std::move(done.error()));
  }
  return journal;
}

Result<std::optional<SwapJournal>> SwapJournal::adopt(const SwapRecord& record) {
  STASIS_TRY_ASSIGN(auto directory, journal_directory());
  const std::string path = swap_path(directory, record);
  STASIS_TRY_ASSIGN(auto lock, take_swap(path, record));
  const auto text = read_file(AT_FDCWD, path);
  auto left = text ? record_from_text<SwapRecord>(*text) : std::nullopt;
  SwapJournal journal(std::move(lock), path, left ? std::move(*left) : record);
  if (left) return std::optional<SwapJournal>(std::move(journal));
  journal.finish();
  return std::optional<SwapJournal>();
}

void SwapJournal::finish() {
  remove_state_file(path_);
  lock_.reset();
}

Result<std::vector<SwapEntry>> read_swaps() {
  STASIS_TRY_ASSIGN(auto directory, journal_directory());
  const DirectoryStream dir = list_open(directory);
  if (!dir) return fail(errno_error("cannot list " + directory, errno));
  std::vector<SwapEntry> entries;
  while (const dirent* item = ::readdir(dir.get())) {
    const std::string name = item->d_name;
    if (!is_our_swap(name)) continue;
    STASIS_TRY_ASSIGN(auto file, read_state_file(directory + "/" + name));
    auto record = file ? record_from_text<SwapRecord>(file->text) : std::nullopt;
    if (record) entries.push_back({std::move(*record), file->under_way});
  }
  return entries;
}

void forget_swaps_of(const ProcessId& root) {
  const auto entries = read_swaps();
  if (!entries) return;
  const auto is_meant = [&](const SwapParty& party) { return party.root == root; };
  for (const SwapEntry& entry : *entries) {
    // The swap's own parts come by here too.
    if (entry.under_way || (!is_meant(entry.record.out) && !is_meant(entry.record.in))) continue;
    if (auto left = SwapJournal::adopt(entry.record); left && *left) (*left)->finish();
  }
}

}  // namespace stasis
