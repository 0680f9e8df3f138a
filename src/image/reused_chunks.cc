#include "image/reused_chunks.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "image/content_format.h"
#include "image/parallel.h"

namespace stasis {
namespace {

// A file of which less than this part is reused is not kept for it: copying that takes less time
// than was saved. What changes in each image but for a little would otherwise keep twice its size.
constexpr std::uint64_t kWorthKeeping = 32;

std::string name_of_the_time(std::size_t file) { return fmt::format("base-{:02}", file); }

Result<void> read_at(const UniqueFd& file, const std::string& path, std::uint64_t at,
                     std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t got =
        TEMP_FAILURE_RETRY(::pread(file.get(), into.data(), into.size(), static_cast<off_t>(at)));
    if (got < 0) return fail(errno_error(fmt::format("cannot read {} at {}", path, at), errno));
    if (got == 0) {
      return fail(ErrorCode::kImageCorrupt, fmt::format("{} ends after {} bytes", path, at),
                  "save it without this image as the base");
    }
    at += static_cast<std::uint64_t>(got);
    into = into.subspan(static_cast<std::size_t>(got));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<ReusedChunks>> ReusedChunks::create(std::shared_ptr<const ContentBase> base,
                                                           const UniqueFd& folder) {
  std::unique_ptr<ReusedChunks> reused(new ReusedChunks(std::move(base), folder));
  for (std::size_t i = 0; i < reused->links_.size(); ++i) {
    if (!reused->base_->gives(i)) continue;
    Link& link = reused->links_[i];
    link.name = name_of_the_time(i);
    auto file = reused->base_->link(i, folder, link.name);
    if (!file) {
      for (std::size_t made = 0; made <= i; ++made)
        reused->unlink(made);
      return fail(std::move(file.error()));
    }
    link.file = std::move(*file);
  }
  return reused;
}

void ReusedChunks::unlink(std::size_t file) {
  Link& link = links_[file];
  if (!link.name.empty()) ::unlinkat(folder_->get(), link.name.c_str(), 0);
  link.name.clear();
  link.file.reset();
}

std::optional<ReusedChunks::Found> ReusedChunks::find(const BlockDigest& digest) {
  const auto number = base_->find(digest);
  if (!number) return std::nullopt;
  const ContentChunk& chunk = base_->index().chunks[*number];
  if (!base_->gives(chunk.file)) return Found{*number};
  return Found{*number, true, !used_[*number].exchange(true, std::memory_order_relaxed),
               chunk.stored};
}

bool ReusedChunks::gives(const BlockDigest& digest) const {
  const auto number = base_->find(digest);
  return number && base_->gives(base_->index().chunks[*number].file);
}

Result<void> ReusedChunks::move_chunks(std::size_t file, const std::vector<std::uint32_t>& chunks,
                                       ContentLanes& lanes, SyncPolicy sync) {
  STASIS_TRY_ASSIGN(auto lane, lanes.take(LaneKind::kMoved));
  const auto copy = [&]() -> Result<void> {
    ContentBatch batch(*lane, ContentEncoding::kRaw, sync, base_->index().chunk_bytes);
    std::vector<std::byte> bytes;
    for (const std::uint32_t number : chunks) {
      ContentChunk chunk = base_->index().chunks[number];
      bytes.resize(chunk.stored);
      STASIS_TRY(read_at(links_[file].file,
                         base_->path() + "/" + content_data_path(base_->kind(), file),
                         chunk.position, bytes));
      STASIS_TRY_ASSIGN(const auto place, batch.add(bytes));
      // The next one is read to where this one is.
      STASIS_TRY(batch.flush());
      chunk.position = place.position;
      chunk.file = lane->number;
      const std::lock_guard lock(moving_);
      moved_.emplace(number, chunk);
    }
    return {};
  };
  auto done = copy();
  lanes.give_back(*lane);
  return done;
}

Result<void> ReusedChunks::settle(ContentLanes& lanes, SyncPolicy sync, Progress& progress,
                                  const Interrupt& interrupt) {
  const ContentIndex& index = base_->index();
  std::vector<std::vector<std::uint32_t>> chunks(links_.size());
  std::vector<std::uint64_t> bytes(links_.size());
  for (std::uint32_t number = 0; number < used_.size(); ++number) {
    if (!used_[number]) continue;
    const ContentChunk& chunk = index.chunks[number];
    chunks[chunk.file].push_back(number);
    bytes[chunk.file] += content_format::page_aligned(chunk.stored);
  }
  std::vector<std::size_t> sparse;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    if (chunks[i].empty() || bytes[i] > index.file_sizes[i] / kWorthKeeping) continue;
    sparse.push_back(i);
    total += bytes[i];
  }
  auto moved = run_parallel(sparse.size(), total, "move content", progress, interrupt,
                            [&](std::size_t i) -> Result<std::uint64_t> {
                              STASIS_TRY(move_chunks(sparse[i], chunks[sparse[i]], lanes, sync));
                              return bytes[sparse[i]];
                            });
  if (!moved) return moved;
  for (const std::size_t file : sparse)
    unlink(file);
  std::size_t next = lanes.count();
  for (std::size_t i = 0; i < links_.size(); ++i) {
    Link& link = links_[i];
    if (chunks[i].empty()) unlink(i);
    if (link.name.empty()) continue;
    const std::string path = content_data_path(base_->kind(), next);
    const std::string name = path.substr(path.find('/') + 1);
    if (::renameat(folder_->get(), link.name.c_str(), folder_->get(), name.c_str()) != 0)
      return fail(errno_error(fmt::format("cannot rename {} to {}", link.name, path), errno));
    link.name = name;
    link.number = static_cast<std::uint8_t>(next++);
  }
  return fault(FaultPoint::kContentNamed);
}

ContentChunk ReusedChunks::place_of(std::uint32_t number) const {
  if (const auto moved = moved_.find(number); moved != moved_.end()) return moved->second;
  ContentChunk chunk = base_->index().chunks[number];
  chunk.file = links_[chunk.file].number;
  return chunk;
}

std::vector<ReusedChunks::File> ReusedChunks::files() const {
  std::vector<File> files;
  for (std::size_t i = 0; i < links_.size(); ++i) {
    const Link& link = links_[i];
    if (link.name.empty()) continue;
    files.push_back(
        {content_data_path(base_->kind(), link.number), base_->index().file_sizes[i], &link.file});
  }
  return files;
}

}  // namespace stasis
