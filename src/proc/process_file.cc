#include "proc/process_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include <fmt/format.h>

#include "base/call_within.h"

namespace stasis::proc {
namespace {

constexpr std::size_t kBlock = 65536;
constexpr std::int64_t kLongestMs = 30000;

// What `read` gives, a call of the kernel with this room.
template <class Read>
Result<std::string> bytes_of(Pid pid, std::size_t most, Read read) {
  struct Answer {
    std::string bytes;
    int error;
  };
  auto answer = call_within(pid, [most, read = std::move(read)] {
    std::string bytes(most, '\0');
    const ssize_t size = TEMP_FAILURE_RETRY(read(bytes.data(), bytes.size()));
    const int error = size < 0 ? errno : 0;
    bytes.resize(size < 0 ? 0 : static_cast<std::size_t>(size));
    return Answer{std::move(bytes), error};
  });
  if (!answer) return fail(keeps_its_memory(pid));
  if (answer->error != 0)
    return fail(errno_error(fmt::format("cannot read of process {}", pid.value), answer->error));
  return std::move(answer->bytes);
}

Result<UniqueFd> open_within(Pid pid, const std::string& path, int flags) {
  auto opened = call_within(pid, [path, flags] { return open_file(AT_FDCWD, path, flags); });
  if (!opened) return fail(keeps_its_memory(pid));
  return std::move(*opened);
}

}  // namespace

Result<ProcessFile> ProcessFile::open(Pid pid, const std::string& name) {
  return open_path(pid, fmt::format("/proc/{}/{}", pid.value, name));
}

Result<ProcessFile> ProcessFile::open_path(Pid pid, const std::string& path) {
  STASIS_TRY_ASSIGN(auto file, open_within(pid, path, O_RDONLY | O_NONBLOCK));
  return ProcessFile(pid, std::make_shared<const UniqueFd>(std::move(file)));
}

Result<std::string> ProcessFile::read(std::size_t most) const {
  return bytes_of(pid_, most, [file = file_](char* to, std::size_t size) {
    return ::read(file->get(), to, size);
  });
}

Result<std::string> ProcessFile::read_at(std::uint64_t offset, std::size_t most) const {
  return bytes_of(pid_, most, [file = file_, offset](char* to, std::size_t size) {
    return ::pread(file->get(), to, size, static_cast<off_t>(offset));
  });
}

ProcessText::ProcessText(Pid pid, const std::string& name)
    : std::istream(this), file_(ProcessFile::open(pid, name)), left_ms_(kLongestMs) {}

std::streambuf::int_type ProcessText::underflow() {
  using std::chrono::steady_clock;
  if (!file_ || left_ms_ <= 0) return std::streambuf::traits_type::eof();
  const auto begin = steady_clock::now();
  auto block = file_->read(kBlock);
  left_ms_ -=
      std::chrono::duration_cast<std::chrono::milliseconds>(steady_clock::now() - begin).count();
  if (!block || block->empty()) return std::streambuf::traits_type::eof();
  block_ = std::move(*block);
  setg(block_.data(), block_.data(), block_.data() + block_.size());
  return std::streambuf::traits_type::to_int_type(*gptr());
}

Result<UniqueFd> open_after_look(Pid pid, const std::string& path) {
  auto opened = call_within(pid, [path] {
    auto file = open_file(AT_FDCWD, path, O_RDONLY);
    std::uint64_t entry = 0;  // pagemap gives no less
    if (!file) return file;
    [[maybe_unused]] const ssize_t got = ::pread(file->get(), &entry, sizeof entry, 0);
    return file;
  });
  if (!opened) return fail(keeps_its_memory(pid));
  return std::move(*opened);
}

std::string link_of_mapping(Pid pid, const Mapping& mapping) {
  return fmt::format("/proc/{}/map_files/{:x}-{:x}", pid.value, mapping.start, mapping.end);
}

MappedFile::MappedFile(Pid pid, const Mapping& mapping) {
  auto place = open_within(pid, link_of_mapping(pid, mapping), O_PATH);
  if (!place) return;
  place_ = std::move(*place);
  link_ = fmt::format("/proc/self/fd/{}", place_.get());
}

}  // namespace stasis::proc
