// libFuzzer's way into the readers of GPU and host content; built with clang and STASIS_FUZZ=ON.
//
// The input is two bytes for the length of an index without its closing checksum, that index, and
// the content of the first data file.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "image/content_reader.h"

namespace {

using namespace stasis;  // NOLINT(google-build-using-namespace): a program, not a header

constexpr std::uint64_t kMostRead = 1U << 20;
constexpr std::uint64_t kMostFile = 64U << 20;

struct Folder {
  std::string path = "/dev/shm/stasis-fuzz-XXXXXX";
  UniqueFd dir;

  Folder() {
    if (::mkdtemp(path.data()) == nullptr) {
      path = (std::filesystem::temp_directory_path() / "stasis-fuzz-XXXXXX").string();
      if (::mkdtemp(path.data()) == nullptr) std::abort();
    }
    std::filesystem::create_directory(path + "/gpu");
    std::filesystem::create_directory(path + "/host");
    dir = UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }

  void write(const std::string& name, std::span<const std::byte> bytes, std::uint64_t size) const {
    const UniqueFd file(::openat(dir.get(), name.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600));
    const std::size_t count = std::min<std::uint64_t>(bytes.size(), size);
    if (::pwrite(file.get(), bytes.data(), count, 0) != static_cast<ssize_t>(count) ||
        ::ftruncate(file.get(), static_cast<off_t>(size)) != 0) {
      std::abort();
    }
  }
};

// All that an index says can be read, or is an error.
void read_all(ContentKind kind, const ContentIndex& index, std::span<const std::byte> whole,
              std::span<const std::byte> data) {
  static const Folder folder;
  ContentRecord record;
  record.index_size = whole.size();
  BlockDigest digest{};
  std::transform(whole.end() - 16, whole.end(), digest.begin(),
                 [](std::byte byte) { return static_cast<unsigned char>(byte); });
  record.index_checksum = to_hex(digest);
  record.data_sizes = index.file_sizes;
  folder.write(content_index_path(kind), whole, whole.size());
  for (std::size_t i = 0; i < index.file_sizes.size(); ++i) {
    if (index.file_sizes[i] > kMostFile) return;
    folder.write(content_data_path(kind, i), data, index.file_sizes[i]);
  }
  const auto reader = ContentReader::open(folder.dir, record, {false, kind});
  if (!reader || reader->kind() != kind) std::abort();
  static std::vector<std::byte> bytes(kMostRead);
  bool sound = true;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < index.streams.size() && total <= kMostRead; ++i) {
    const std::uint64_t size = index.streams[i].bytes;
    total += size;
    if (total > kMostRead) return;
    sound = reader->read(i, 0, std::span(bytes).first(size)).has_value() && sound;
    for (std::uint64_t at = 0; at < size; at += index.chunk_bytes)
      (void)reader->read(
          i, at, std::span(bytes).first(std::min<std::uint64_t>(size - at, index.chunk_bytes)));
  }
  NoProgress progress;
  const Interrupt interrupt;
  // It reads the same; with threads, which cost more than all else here.
  if (!sound && data.size() % 16 != 0) return;
  if (reader->verify_all(progress, interrupt).has_value() != sound) std::abort();
  const std::vector<bool> all(index.file_sizes.size(), true);
  const auto damage = reader->find_damage(all, progress, interrupt);
  if (!damage || damage->empty() != sound) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> input(reinterpret_cast<const std::byte*>(data), size);
  (void)parse_content_index(input);
  if (size < 2) return 0;
  const std::size_t length = std::min<std::size_t>(data[0] + 256U * data[1], size - 2);
  // With a right checksum, so that the fuzzer gets past it.
  const auto stands = input.subspan(2, length);
  const auto whole = close_content_index({stands.begin(), stands.end()});
  const auto index = parse_content_index(whole);
  if (!index) return 0;
  const auto again = parse_content_index(serialize_content_index(*index));
  if (!again || *again != *index) std::abort();
  (void)content_use(*index, size % (index->file_sizes.size() + 1));
  const bool is_host =
      std::all_of(index->streams.begin(), index->streams.end(),
                  [](const ContentStream& stream) { return problem_of_host(stream).empty(); });
  read_all(is_host ? ContentKind::kHost : ContentKind::kGpu, *index, whole,
           input.subspan(2 + length));
  return 0;
}
