#include "image/content_base.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <numeric>

#include <fmt/format.h>

#include "image/content_format.h"
#include "image/directory.h"
#include "image/image_reader.h"

namespace stasis {
namespace {

// A new image has room for so many data files besides those it writes itself.
constexpr std::size_t kMostReused =
    content_format::kMaxFiles - content_format::kNewFiles - content_format::kMovedFiles;

std::uint64_t first_word(const BlockDigest& digest) {
  std::uint64_t word = 0;
  std::memcpy(&word, digest.data(), sizeof word);
  return word;
}

std::string name_in_folder(const std::string& path) { return path.substr(path.find('/') + 1); }

}  // namespace

Result<std::shared_ptr<const ContentBase>> ContentBase::open(const std::string& image_dir,
                                                             Progress& progress,
                                                             const Interrupt& interrupt,
                                                             std::uint32_t chunk_bytes,
                                                             ContentKind kind) {
  STASIS_TRY_ASSIGN(auto image, ImageReader::open(image_dir));
  if (!image.has_content(kind)) {
    return fail(ErrorCode::kNotSupported,
                fmt::format("there is no {} content in {}",
                            kind == ContentKind::kGpu ? "GPU" : "host memory", image.path()));
  }
  STASIS_TRY_ASSIGN(auto reader, image.open_content({false, kind}));
  if (reader.chunk_bytes() != chunk_bytes) {
    return fail(ErrorCode::kNotSupported,
                fmt::format("the content of {} is in chunks of {} bytes, not {}", image.path(),
                            reader.chunk_bytes(), chunk_bytes));
  }
  STASIS_TRY_ASSIGN(auto folder, open_beneath(image.dir(), content_folder(kind),
                                              O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  std::shared_ptr<ContentBase> base(new ContentBase(image.path(), std::move(reader)));
  base->folder_ = std::move(folder);
  base->enter_chunks();
  base->choose_files();
  STASIS_TRY(base->verify(progress, interrupt));
  return base;
}

Result<void> ContentBase::verify(Progress& progress, const Interrupt& interrupt) {
  STASIS_TRY_ASSIGN(auto damaged, reader_.find_damage(gives_, progress, interrupt));
  for (auto& [file, why] : damaged) {
    gives_[file] = false;
    usable_bytes_ -= used_[file];
    damage_.push_back(std::move(why));
  }
  return {};
}

// Only whole ones, so that what has one digest has one size.
void ContentBase::enter_chunks() {
  const ContentIndex& all = index();
  table_.assign(std::bit_ceil(2 * all.chunks.size() + 2), 0);
  for (std::size_t stream = 0; stream < all.streams.size(); ++stream) {
    for (std::uint64_t i = 0; i < all.chunks_of(stream); ++i) {
      const std::uint64_t number = all.first_chunk[stream] + i;
      const ContentChunk& chunk = all.chunks[number];
      if (chunk.encoding == ContentEncoding::kZero || all.bytes_of(stream, i) != all.chunk_bytes)
        continue;
      std::uint64_t at = first_word(chunk.digest);
      const auto place = [&]() -> std::uint32_t& { return table_[at & (table_.size() - 1)]; };
      while (place() != 0 && all.chunks[place() - 1].digest != chunk.digest)
        ++at;
      if (place() == 0) place() = static_cast<std::uint32_t>(number + 1);
    }
  }
}

std::optional<std::uint32_t> ContentBase::find(const BlockDigest& digest) const {
  for (std::uint64_t at = first_word(digest);; ++at) {
    const std::uint32_t entry = table_[at & (table_.size() - 1)];
    if (entry == 0) return std::nullopt;
    if (index().chunks[entry - 1].digest == digest) return entry - 1;
  }
}

// The emptiest files are left out until the rest has no more bytes out of use than in use: so a
// dump moves as much as has become useless before. Of too many, those are left out from which the
// least has to be moved: the emptiest may be the largest by far.
void ContentBase::choose_files() {
  const std::vector<std::uint64_t>& sizes = index().file_sizes;
  used_.assign(sizes.size(), 0);
  for (const std::uint32_t entry : table_) {
    if (entry == 0) continue;
    const ContentChunk& chunk = index().chunks[entry - 1];
    used_[chunk.file] += content_format::page_aligned(chunk.stored);
  }
  std::vector<std::size_t> files(sizes.size());  // the fullest first
  std::iota(files.begin(), files.end(), 0);
  const auto share = [&](std::size_t file) {
    return static_cast<double>(used_[file]) /
           static_cast<double>(std::max<std::uint64_t>(sizes[file], 1));
  };
  std::stable_sort(files.begin(), files.end(),
                   [&](std::size_t a, std::size_t b) { return share(a) > share(b); });
  gives_.assign(sizes.size(), false);
  const std::uint64_t all_used = std::accumulate(used_.begin(), used_.end(), std::uint64_t{0});
  std::uint64_t useless = 0;
  const auto last = std::find_if(files.begin(), files.end(), [&](std::size_t file) {
    useless += sizes[file] - std::min(used_[file], sizes[file]);
    return used_[file] == 0 || useless > all_used;
  });
  files.erase(last, files.end());
  std::stable_sort(files.begin(), files.end(),
                   [&](std::size_t a, std::size_t b) { return used_[a] > used_[b]; });
  files.resize(std::min(files.size(), kMostReused));
  for (const std::size_t file : files) {
    gives_[file] = true;
    usable_bytes_ += used_[file];
  }
}

Result<UniqueFd> ContentBase::link(std::size_t file, const UniqueFd& folder,
                                   const std::string& name) const {
  const std::string shown = path_ + "/" + content_data_path(kind(), file);
  if (::linkat(folder_.get(), name_in_folder(content_data_path(kind(), file)).c_str(), folder.get(),
               name.c_str(), 0) != 0) {
    return fail(errno_error("cannot make a hard link to " + shown, errno));
  }
  // This looks at the file that was linked, and not at what may have had the name before.
  STASIS_TRY_ASSIGN(auto linked, open_file(folder.get(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  struct stat info = {};
  if (::fstat(linked.get(), &info) != 0) return fail(errno_error("cannot stat " + shown, errno));
  if (!S_ISREG(info.st_mode) ||
      static_cast<std::uint64_t>(info.st_size) != index().file_sizes[file]) {
    return fail(ErrorCode::kImageCorrupt, shown + " is not the file that its index tells of");
  }
  // As large and another: a program that copies an image over this one renames each file to its
  // place.
  if (!reader_.reads_from(file, linked))
    return fail(ErrorCode::kImageCorrupt, shown + " is not the file that was verified");
  if (info.st_uid != ::geteuid() || (info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return fail(ErrorCode::kNotPermitted,
                fmt::format("{} can be written by others than user {}", shown, ::geteuid()));
  }
  return linked;
}

}  // namespace stasis
