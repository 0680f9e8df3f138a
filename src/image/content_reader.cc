#include "image/content_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <mutex>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "image/content_codec.h"
#include "image/content_format.h"
#include "image/directory.h"
#include "image/parallel.h"

namespace stasis {
namespace {

using namespace content_format;  // NOLINT(google-build-using-namespace): constants only

// Of one system call. What comes from the page cache is best hashed while it is in the processor's.
constexpr std::size_t kRunFromCache = 256U << 10;
constexpr std::size_t kRunFromDisk = 4U << 20;

struct DataFile {
  UniqueFd file;
  bool direct = false;
};

Result<DataFile> open_data(const UniqueFd& dir, const std::string& path, std::uint64_t size,
                           bool direct) {
  DataFile data;
  struct stat info = {};
  STASIS_TRY_ASSIGN(data.file, open_regular(dir, path, info));
  if (static_cast<std::uint64_t>(info.st_size) != size) {
    return corrupt_image(fmt::format("{} has {} bytes, expected {}", path, info.st_size, size));
  }
  // Without it the same descriptor reads through the page cache.
  data.direct = direct && ::fcntl(data.file.get(), F_SETFL, O_DIRECT) == 0;
  return data;
}

Result<std::vector<std::byte>> read_index(const UniqueFd& dir, const std::string& path,
                                          const ContentRecord& expected) {
  struct stat info = {};
  STASIS_TRY_ASSIGN(const auto file, open_regular(dir, path, info));
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size != expected.index_size || size > kMaxIndex) {
    return corrupt_image(fmt::format("{} has {} bytes, expected {}, at most {}", path, size,
                                     expected.index_size, kMaxIndex));
  }
  std::vector<std::byte> bytes(size);
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t got = TEMP_FAILURE_RETRY(
        ::pread(file.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done)));
    if (got < 0) return fail(read_error("cannot read " + path, errno));
    if (got == 0)
      return corrupt_image(fmt::format("{} ends after {} bytes, expected {}", path, done, size));
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

}  // namespace

struct ContentReader::State {
  ContentKind kind = ContentKind::kGpu;
  ContentIndex index;
  mutable std::vector<DataFile> files;
  mutable std::mutex mutex;
  mutable std::vector<Workspace> idle;

  // A chunk: the stream and its number there, for messages.
  struct Place {
    std::size_t stream = 0;
    std::uint64_t number = 0;
  };
  // Chunks one behind the other in a file.
  struct Run {
    std::vector<Place> places;
    std::size_t file = 0;
    std::uint64_t position = 0;
    std::uint64_t bytes = 0;  // with what lies between them, and behind the last one up to 4096
  };

  const ContentChunk& chunk(const Place& place) const {
    return index.chunks[index.first_chunk[place.stream] + place.number];
  }

  Workspace take_workspace() const {
    const std::lock_guard lock(mutex);
    if (idle.empty()) return {};
    Workspace workspace = std::move(idle.back());
    idle.pop_back();
    return workspace;
  }
  void give_back(Workspace workspace) const {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(workspace));
  }

  std::string describe(const Place& place) const;
  tl::unexpected<Error> damaged(const Place& place, std::string_view what) const;
  bool append(Run& run, const Place& place, std::size_t limit) const;
  Result<void> read_run(const Run& run, std::span<std::byte> into) const;
  Result<void> check(const Place& place, std::span<const std::byte> content) const;
  Result<void> unpack(const Place& place, std::span<const std::byte> stored,
                      std::span<std::byte> into, Workspace& workspace) const;
  Result<void> read(std::size_t stream, std::uint64_t offset, std::span<std::byte> bytes,
                    Workspace& workspace) const;
  Result<void> verify(const Run& run, Workspace& workspace) const;
  // All of them, with all processors. `judge` says what becomes of each result.
  Result<void> verify(const std::vector<Run>& runs, std::string_view phase, Progress& progress,
                      const Interrupt& interrupt,
                      const std::function<Result<void>(const Run&, Result<void>)>& judge) const;
  std::vector<Run> all_runs() const;
};

std::string ContentReader::State::describe(const Place& place) const {
  const ContentChunk& stored = chunk(place);
  return fmt::format("chunk {} of process {} ({} bytes at {} of its {}, in the file {} at {})",
                     place.number, index.streams[place.stream].pid.value,
                     index.bytes_of(place.stream, place.number), place.number * index.chunk_bytes,
                     kind == ContentKind::kHost ? "host memory" : "GPU content", stored.stored,
                     stored.position);
}

tl::unexpected<Error> ContentReader::State::damaged(const Place& place,
                                                    std::string_view what) const {
  return corrupt_image(
      fmt::format("{}: {} {}", content_data_path(kind, chunk(place).file), describe(place), what));
}

// Adds a chunk to the run if it lies right behind it. Room for the last one's padding counts.
bool ContentReader::State::append(Run& run, const Place& place, std::size_t limit) const {
  const ContentChunk& next = chunk(place);
  const std::uint64_t padded = page_aligned(next.stored);
  if (run.places.empty()) {
    run = {{place}, next.file, next.position, padded};
    return true;
  }
  if (next.file != run.file || next.position != run.position + run.bytes ||
      run.bytes + padded > limit) {
    return false;
  }
  run.places.push_back(place);
  run.bytes += padded;
  return true;
}

// Fills `into`, which may be shorter than the run by the last chunk's padding.
Result<void> ContentReader::State::read_run(const Run& run, std::span<std::byte> into) const {
  DataFile& data = files[run.file];
  std::uint64_t at = run.position;
  while (!into.empty()) {
    const ssize_t got = TEMP_FAILURE_RETRY(
        ::pread(data.file.get(), into.data(), into.size(), static_cast<off_t>(at)));
    // This file system wants more than 4096, or the rest of a short read is odd: not past the
    // cache.
    if (got < 0 && errno == EINVAL && (::fcntl(data.file.get(), F_GETFL) & O_DIRECT) != 0 &&
        ::fcntl(data.file.get(), F_SETFL, 0) == 0) {
      continue;
    }
    if (got < 0) {
      return fail(read_error(
          fmt::format("cannot read {} at {}", content_data_path(kind, run.file), at), errno));
    }
    if (got == 0) {
      return corrupt_image(fmt::format("{} ends after {} bytes, expected {}: {} is cut off",
                                       content_data_path(kind, run.file), at,
                                       index.file_sizes[run.file], describe(run.places.back())));
    }
    at += static_cast<std::uint64_t>(got);
    into = into.subspan(static_cast<std::size_t>(got));
  }
  return {};
}

Result<void> ContentReader::State::check(const Place& place,
                                         std::span<const std::byte> content) const {
  const BlockDigest found = xxh3(content);
  if (found == chunk(place).digest) return {};
  return damaged(place, fmt::format("has the checksum {}, expected {}", to_hex(found),
                                    to_hex(chunk(place).digest)));
}

// From what stands in the file to the content, verified. `stored` may be `into` itself.
Result<void> ContentReader::State::unpack(const Place& place, std::span<const std::byte> stored,
                                          std::span<std::byte> into, Workspace& workspace) const {
  const ContentChunk& from = chunk(place);
  if (from.encoding == ContentEncoding::kRaw) {
    if (stored.data() != into.data()) std::copy_n(stored.begin(), into.size(), into.begin());
  } else if (!workspace.decompress(from.encoding, stored.first(from.stored), into)) {
    return damaged(
        place, fmt::format("cannot be decompressed to {} bytes (encoding {}), expected "
                           "the checksum {}",
                           into.size(), static_cast<unsigned>(from.encoding), to_hex(from.digest)));
  }
  return check(place, into);
}

Result<void> ContentReader::State::read(std::size_t stream, std::uint64_t offset,
                                        std::span<std::byte> bytes, Workspace& workspace) const {
  const auto length = [&](std::uint64_t number) { return index.bytes_of(stream, number); };
  std::uint64_t number = offset / index.chunk_bytes;
  while (!bytes.empty()) {
    Place place{stream, number};
    if (chunk(place).encoding == ContentEncoding::kZero) {
      std::memset(bytes.data(), 0, length(number));
      bytes = bytes.subspan(length(number++));
      continue;
    }
    // As many as lie one behind the other, and all raw so that they are read to where they belong.
    const bool raw = chunk(place).encoding == ContentEncoding::kRaw;
    const bool direct = files[chunk(place).file].direct;
    const std::size_t limit = direct ? kRunFromDisk : kRunFromCache;
    Run run;
    std::size_t content = 0;
    while (content < bytes.size()) {
      place.number = number + run.places.size();
      const ContentChunk& next = chunk(place);
      if (next.encoding == ContentEncoding::kZero ||
          (next.encoding == ContentEncoding::kRaw) != raw || !append(run, place, limit)) {
        break;
      }
      content += length(place.number);
    }
    const bool aligned = reinterpret_cast<std::uintptr_t>(bytes.data()) % kPage == 0;
    const bool in_place = raw && (!direct || (aligned && content % kPage == 0));
    std::span<std::byte> stored = bytes.first(content);
    if (!in_place) {
      STASIS_TRY_ASSIGN(auto room, workspace.stored(run.bytes));
      stored = room.first(run.bytes);
    }
    STASIS_TRY(read_run(run, stored));
    for (const Place& one : run.places) {
      const std::uint64_t from = chunk(one).position - run.position;
      STASIS_TRY(unpack(one, stored.subspan(from), bytes.first(length(one.number)), workspace));
      bytes = bytes.subspan(length(one.number));
    }
    number += run.places.size();
  }
  return {};
}

// Everything that is stored, in the order of the files. Of what several chunks share, one.
std::vector<ContentReader::State::Run> ContentReader::State::all_runs() const {
  std::vector<Place> places;
  for (std::size_t stream = 0; stream < index.streams.size(); ++stream) {
    for (std::uint64_t i = 0; i < index.chunks_of(stream); ++i) {
      if (chunk({stream, i}).encoding != ContentEncoding::kZero) places.push_back({stream, i});
    }
  }
  const auto key = [this](const Place& place) {
    const ContentChunk& at = chunk(place);
    return std::tuple(at.file, at.position, at.stored, at.encoding, at.digest,
                      index.bytes_of(place.stream, place.number));
  };
  std::sort(places.begin(), places.end(),
            [&](const Place& a, const Place& b) { return key(a) < key(b); });
  places.erase(std::unique(places.begin(), places.end(),
                           [&](const Place& a, const Place& b) { return key(a) == key(b); }),
               places.end());
  std::vector<Run> runs;
  for (const Place& place : places) {
    if (runs.empty() || !append(runs.back(), place, kRunFromDisk))
      append(runs.emplace_back(), place, 0);
  }
  return runs;
}

Result<void> ContentReader::State::verify(const Run& run, Workspace& workspace) const {
  STASIS_TRY_ASSIGN(auto stored, workspace.stored(run.bytes));
  STASIS_TRY_ASSIGN(auto content, workspace.content(index.chunk_bytes));
  STASIS_TRY(read_run(run, stored.first(run.bytes)));
  for (const Place& place : run.places) {
    const auto from = stored.subspan(chunk(place).position - run.position);
    const std::uint32_t length = index.bytes_of(place.stream, place.number);
    const bool raw = chunk(place).encoding == ContentEncoding::kRaw;
    STASIS_TRY(unpack(place, from, raw ? from.first(length) : content.first(length), workspace));
  }
  return {};
}

ContentReader::ContentReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
ContentReader::ContentReader(ContentReader&&) noexcept = default;
ContentReader& ContentReader::operator=(ContentReader&&) noexcept = default;
ContentReader::~ContentReader() = default;

ContentKind ContentReader::kind() const { return state_->kind; }
const ContentIndex& ContentReader::index() const { return state_->index; }

Result<ContentReader> ContentReader::open(const UniqueFd& image_dir, const ContentRecord& expected,
                                          const ContentReadOptions& options) {
  const std::string path = content_index_path(options.kind);
  STASIS_TRY_ASSIGN(auto bytes, read_index(image_dir, path, expected));
  STASIS_TRY_ASSIGN(auto index, parse_content_index(bytes, options.kind));
  BlockDigest digest{};
  std::memcpy(digest.data(), bytes.data() + bytes.size() - digest.size(), digest.size());
  if (to_hex(digest) != expected.index_checksum) {
    return corrupt_image(fmt::format("{} has the checksum {}, expected {}", path, to_hex(digest),
                                     expected.index_checksum));
  }
  if (index.file_sizes != expected.data_sizes) {
    return corrupt_image(path +
                         " and manifest.json do not agree about the sizes of the data files");
  }
  auto state = std::make_unique<State>();
  state->index = std::move(index);
  state->kind = options.kind;
  for (std::size_t i = 0; i < state->index.file_sizes.size(); ++i) {
    STASIS_TRY_ASSIGN(auto data, open_data(image_dir, content_data_path(options.kind, i),
                                           state->index.file_sizes[i], options.direct_io));
    state->files.push_back(std::move(data));
  }
  return ContentReader(std::move(state));
}

bool ContentReader::reads_from(std::size_t number, const UniqueFd& file) const {
  struct stat own = {};
  struct stat other = {};
  return ::fstat(state_->files.at(number).file.get(), &own) == 0 &&
         ::fstat(file.get(), &other) == 0 && own.st_dev == other.st_dev &&
         own.st_ino == other.st_ino;
}

Result<void> ContentReader::read(std::size_t stream, std::uint64_t offset,
                                 std::span<std::byte> bytes) const {
  const ContentIndex& index = state_->index;
  const std::uint64_t size = stream < index.streams.size() ? index.streams[stream].bytes : 0;
  const bool inside =
      stream < index.streams.size() && offset <= size && bytes.size() <= size - offset;
  if (!inside || offset % index.chunk_bytes != 0 ||
      (bytes.size() % index.chunk_bytes != 0 && offset + bytes.size() != size)) {
    return fail(ErrorCode::kUsage,
                fmt::format("{} bytes at {} are no whole chunks of {} in stream {}", bytes.size(),
                            offset, index.chunk_bytes, stream));
  }
  Workspace workspace = state_->take_workspace();
  auto result = state_->read(stream, offset, bytes, workspace);
  state_->give_back(std::move(workspace));
  return result;
}

Result<void> ContentReader::zeros(std::size_t stream, std::uint64_t offset,
                                  std::span<std::byte> flags) const {
  const ContentIndex& index = state_->index;
  const std::uint64_t first = offset / index.chunk_bytes;
  const std::uint64_t count = stream < index.streams.size() ? index.chunks_of(stream) : 0;
  if (offset % index.chunk_bytes != 0 || first > count || flags.size() > count - first) {
    return fail(ErrorCode::kUsage,
                fmt::format("{} chunks at {} are not in stream {}", flags.size(), offset, stream));
  }
  for (std::size_t i = 0; i < flags.size(); ++i)
    flags[i] = std::byte{state_->chunk({stream, first + i}).encoding == ContentEncoding::kZero};
  return {};
}

Result<void> ContentReader::State::verify(
    const std::vector<Run>& runs, std::string_view phase, Progress& progress,
    const Interrupt& interrupt,
    const std::function<Result<void>(const Run&, Result<void>)>& judge) const {
  std::uint64_t total = 0;
  for (const Run& run : runs)
    total += run.bytes;
  return run_parallel(runs.size(), total, phase, progress, interrupt,
                      [&](std::size_t i) -> Result<std::uint64_t> {
                        Workspace workspace = take_workspace();
                        auto good = judge(runs[i], verify(runs[i], workspace));
                        give_back(std::move(workspace));
                        STASIS_TRY(std::move(good));
                        return runs[i].bytes;
                      });
}

Result<void> ContentReader::verify_all(Progress& progress, const Interrupt& interrupt) const {
  return state_->verify(state_->all_runs(), "verify", progress, interrupt,
                        [](const State::Run&, Result<void> good) { return good; });
}

Result<std::map<std::size_t, Error>> ContentReader::find_damage(const std::vector<bool>& chosen,
                                                                Progress& progress,
                                                                const Interrupt& interrupt) const {
  auto runs = state_->all_runs();
  std::erase_if(runs, [&](const State::Run& run) { return !chosen.at(run.file); });
  std::mutex mutex;
  std::map<std::size_t, Error> found;
  auto looked = state_->verify(
      runs, "verify base", progress, interrupt, [&](const State::Run& run, Result<void> good) {
        if (good ||
            (good.error().code != ErrorCode::kImageCorrupt && good.error().code != ErrorCode::kIo))
          return good;
        const std::lock_guard lock(mutex);
        found.emplace(run.file, std::move(good.error()));
        return Result<void>();
      });
  STASIS_TRY(std::move(looked));
  return found;
}

}  // namespace stasis
