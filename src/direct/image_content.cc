#include "direct/image_content.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>

#include "base/trace.h"
#include "checkpoint/journal.h"
#include "image/content_format.h"
#include "image/directory.h"
#include "image/image_reader.h"
#include "image/removal.h"

namespace stasis {

namespace {

constexpr const char* kMixed =
    "its parts are not of the same dump: restore from another image, or copy it again from where "
    "it "
    "came from";

// 32 hexadecimal digits as two numbers; zero for anything else, which is the id of no content.
direct::ContentId id_of(const std::string& checksum) {
  direct::ContentId id{};
  if (checksum.size() != 32) return {};
  for (std::size_t half = 0; half < id.size(); ++half) {
    const char* begin = checksum.data() + 16 * half;
    const auto read = std::from_chars(begin, begin + 16, id[half], 16);
    if (read.ec != std::errc{} || read.ptr != begin + 16) return {};
  }
  return id;
}

}  // namespace

Result<ContentRecord> content_record_in(const UniqueFd& image_dir, ContentKind kind) {
  // Another user may have made it: no link is followed, and no pipe is waited for.
  STASIS_TRY_ASSIGN(auto file, open_beneath(image_dir, content_index_path(kind),
                                            O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  struct stat info {};
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return fail(ErrorCode::kImageCorrupt, content_index_path(kind) + " is no file");
  }
  STASIS_TRY_ASSIGN(auto text, read_file(AT_FDCWD, fmt::format("/proc/self/fd/{}", file.get()),
                                         content_format::kMaxIndex));
  const auto bytes = std::as_bytes(std::span(text));
  STASIS_TRY_ASSIGN(auto index, parse_content_index(bytes, kind));
  BlockDigest digest{};
  std::memcpy(digest.data(), bytes.last(digest.size()).data(), digest.size());
  ContentRecord record;
  record.index_size = bytes.size();
  record.index_checksum = to_hex(digest);
  record.data_sizes = std::move(index.file_sizes);
  return record;
}

Result<void> discard_content(const UniqueFd& image_dir) {
  const char* folder = content_folder(ContentKind::kGpu);
  return remove_tree(image_dir, folder, folder);
}

Result<std::shared_ptr<ImageContent>> ImageContent::create(const UniqueFd& image_dir,
                                                           const ContentOptions& options) {
  STASIS_TRY_ASSIGN(auto writer, ContentWriter::create(image_dir, options));
  STASIS_TRY_ASSIGN(auto own, open_file(image_dir.get(), ".", O_RDONLY | O_DIRECTORY));
  auto content = std::make_shared<ImageContent>();
  content->image_dir_ = std::move(own);
  content->writer_.emplace(std::move(writer));
  return content;
}

std::shared_ptr<ImageContent> ImageContent::of(ContentReader reader, ContentRecord record) {
  auto content = std::make_shared<ImageContent>();
  content->record_ = std::move(record);
  content->reader_.emplace(std::move(reader));
  return content;
}

Result<std::shared_ptr<ImageContent>> ImageContent::open(const std::string& image_dir) {
  STASIS_TRY_ASSIGN(auto dir, open_file(AT_FDCWD, image_dir, O_RDONLY | O_DIRECTORY));
  STASIS_TRY_ASSIGN(auto record, content_record_in(dir, ContentKind::kGpu));
  STASIS_TRY_ASSIGN(auto reader, ContentReader::open(dir, record));
  return of(std::move(reader), std::move(record));
}

Result<std::size_t> ImageContent::add(Pid pid, std::uint64_t bytes,
                                      const std::vector<direct::SegmentPlace>& places) {
  std::vector<ContentRange> ranges;
  ranges.reserve(places.size());
  for (const direct::SegmentPlace& place : places)
    ranges.push_back({place.offset, place.bytes, place.gpu, place.address});
  std::sort(ranges.begin(), ranges.end(),
            [](const ContentRange& a, const ContentRange& b) { return a.offset < b.offset; });
  STASIS_TRY(writer_->add_stream(pid, bytes, std::move(ranges)));
  return streams_++;
}

Result<void> ImageContent::finish(Progress& progress, const Interrupt& interrupt) {
  const Span span(TraceKind::kImage, "complete the content");
  STASIS_TRY_ASSIGN(auto summary, writer_->finish(progress, interrupt));
  unwanted_ = writer_->take_unwanted_room();
  writer_.reset();
  record_ = std::move(summary.record);
  reused_bytes_ = summary.use.reused_bytes;
  precopied_bytes_ = summary.precopied_bytes;
  direct_io_ = summary.direct_io && summary.written_bytes > 0;
  STASIS_TRY_ASSIGN(auto reader, ContentReader::open(image_dir_, record_));
  reader_.emplace(std::move(reader));
  return {};
}

Result<void> ImageContent::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  return writer_->write(offset / kGap, offset % kGap, bytes);
}

Result<void> ImageContent::precopy(std::span<const std::byte> bytes) {
  auto stored = writer_->precopy(bytes);
  if (!stored) return fail(std::move(stored.error()));
  stored_before_bytes_ += *stored;
  return {};
}

Result<void> ImageContent::read(std::uint64_t offset, std::span<std::byte> bytes) {
  return reader_->read(offset / kGap, offset % kGap, bytes);
}

Result<void> ImageContent::deduplicate(std::uint64_t offset, std::span<std::byte> digests) {
  return writer_->deduplicate(offset / kGap, offset % kGap, digests);
}

Result<void> ImageContent::zeros(std::uint64_t offset, std::span<std::byte> flags) {
  return reader_->zeros(offset / kGap, offset % kGap, flags);
}

std::optional<std::size_t> ImageContent::stream_of(Pid pid) const {
  const auto& streams = reader_->streams();
  const auto stream = std::find_if(streams.begin(), streams.end(),
                                   [&](const ContentStream& one) { return one.pid == pid; });
  if (stream == streams.end()) return std::nullopt;
  return static_cast<std::size_t>(stream - streams.begin());
}

Result<std::size_t> ImageContent::stream_of(Pid pid, std::uint64_t bytes) const {
  const auto found = stream_of(pid);
  if (!found) {
    return fail(ErrorCode::kImageCorrupt,
                fmt::format("the image holds no GPU memory of process {}", pid.value), kMixed);
  }
  const ContentStream& stream = reader_->streams()[*found];
  if (stream.bytes != bytes) {
    return fail(ErrorCode::kImageCorrupt,
                fmt::format("the image holds {} bytes of GPU memory of process {}, which had {}",
                            stream.bytes, pid.value, bytes),
                kMixed);
  }
  return *found;
}

direct::ContentId ImageContent::id() const { return id_of(record_.index_checksum); }

std::vector<std::string> image_and_its_halves(const std::string& path) {
  if (path.empty()) return {};
  std::vector<std::string> paths{path};
  for (const Leftover& leftover : find_leftovers(path)) {
    struct stat info {};
    const bool ours = ::lstat(leftover.path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) &&
                      (info.st_uid == ::geteuid() || info.st_uid == 0);
    if (ours) paths.push_back(leftover.path);
  }
  return paths;
}

std::vector<std::shared_ptr<ImageContent>> find_content(const std::string& path) {
  std::vector<std::shared_ptr<ImageContent>> found;
  for (const std::string& one : image_and_its_halves(path))
    if (auto content = ImageContent::open(one)) found.push_back(std::move(*content));
  return found;
}

std::optional<Pid> who_needs(const std::string& image_dir) {
  auto dir = open_file(AT_FDCWD, image_dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!dir) return std::nullopt;
  const auto record = content_record_in(*dir, ContentKind::kGpu);
  if (!record) return std::nullopt;
  const direct::ContentId id = id_of(record->index_checksum);
  std::error_code ignored;
  for (std::filesystem::directory_iterator entries("/proc", ignored), end; entries != end;
       entries.increment(ignored)) {
    const std::string name = entries->path().filename().string();
    int number = 0;
    const auto read = std::from_chars(name.data(), name.data() + name.size(), number);
    if (read.ec != std::errc{} || read.ptr != name.data() + name.size()) continue;
    const auto agent = direct::probe_agent(Pid{number});
    if (agent && *agent && direct::is_away((*agent)->state) && (*agent)->content_id == id)
      return Pid{number};
  }
  return std::nullopt;
}

}  // namespace stasis
