#include "direct/remote_memory.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "base/trace.h"
#include "direct/threads.h"

namespace stasis::direct {
namespace {

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
constexpr std::size_t kPagesInHuge = kHugePage / kPage;

// Bits of an entry of /proc/PID/pagemap, both told to everyone who may open it.
constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
constexpr std::uint64_t kExclusive = std::uint64_t{1} << 56;  // not shared, nor the zero page

iovec at(std::uint64_t address, std::uint64_t bytes) {
  return {reinterpret_cast<void*>(address), bytes};
}

}  // namespace

Result<void> RemoteMemory::check_range(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset <= bytes_ && bytes <= bytes_ - offset) return {};
  return fail(ErrorCode::kUsage, fmt::format("{} bytes at offset {} are beyond the {} bytes that "
                                             "process {} keeps for the content of its GPU memory",
                                             bytes, offset, bytes_, pid_.value));
}

Result<void> RemoteMemory::check_alive() const {
  if (pidfd_->alive()) return {};
  return fail(gone());
}

Error RemoteMemory::gone() const {
  return Error{
      ErrorCode::kProcessGone,
      fmt::format("process {} has ended, and the content of its GPU memory with it", pid_.value),
      {},
      {},
      {}};
}

Error RemoteMemory::refusal(const char* what, std::uint64_t address, std::uint64_t bytes,
                            int number) const {
  if (number == ESRCH || !pidfd_->alive()) return gone();
  Error error = errno_error(fmt::format("cannot {} {} bytes of memory at {:#x} of process {}", what,
                                        bytes, address, pid_.value),
                            number);
  if (number == EPERM || number == EACCES) {
    error.remedy = "run as root, or with CAP_SYS_PTRACE, or as the user who owns the process";
  }
  if (number == EFAULT) error.remedy = "the process has changed its own memory: try again";
  return error;
}

Result<void> RemoteMemory::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  if (auto in_range = check_range(offset, bytes.size()); !in_range) return in_range;
  if (auto alive = check_alive(); !alive) return alive;
  std::uint64_t to = address_ + offset;
  for (std::span<const std::byte> left = bytes; !left.empty();) {
    const iovec local{const_cast<std::byte*>(left.data()), left.size()};
    const iovec remote = at(to, left.size());
    const ssize_t done = ::process_vm_writev(pid_.value, &local, 1, &remote, 1, 0);
    if (done <= 0) return fail(refusal("write", to, left.size(), done < 0 ? errno : EIO));
    to += static_cast<std::uint64_t>(done);
    left = left.subspan(static_cast<std::size_t>(done));
  }
  return check_alive();
}

Result<void> RemoteMemory::read(std::uint64_t offset, std::span<std::byte> bytes) {
  if (auto in_range = check_range(offset, bytes.size()); !in_range) return in_range;
  if (auto alive = check_alive(); !alive) return alive;
  std::uint64_t from = address_ + offset;
  for (std::span<std::byte> left = bytes; !left.empty();) {
    const iovec local{left.data(), left.size()};
    const iovec remote = at(from, left.size());
    const ssize_t done = ::process_vm_readv(pid_.value, &local, 1, &remote, 1, 0);
    if (done <= 0) return fail(refusal("read", from, left.size(), done < 0 ? errno : EIO));
    from += static_cast<std::uint64_t>(done);
    left = left.subspan(static_cast<std::size_t>(done));
  }
  return check_alive();
}

Result<void> RemoteMemory::touch(const UniqueFd& pages, std::uint64_t begin,
                                 std::uint64_t end) const {
  // One byte first: if the kernel answers with a huge page, nothing else is missing afterwards.
  char zero = 0;
  const iovec local{&zero, 1};
  iovec first = at(begin, 1);
  if (::process_vm_writev(pid_.value, &local, 1, &first, 1, 0) != 1) {
    return fail(refusal("write", begin, 1, errno));
  }
  const std::size_t count = (end - 1) / kPage - begin / kPage + 1;
  std::array<std::uint64_t, kPagesInHuge> entries{};
  if (pages.valid()) {
    const auto place = static_cast<off_t>(begin / kPage * sizeof entries[0]);
    const ssize_t want = static_cast<ssize_t>(count * sizeof entries[0]);
    if (::pread(pages.get(), entries.data(), static_cast<std::size_t>(want), place) != want) {
      entries.fill(0);
    }
  }
  // The others in one call: an address each, fed from as many zeros.
  std::vector<iovec> missing;
  for (std::size_t i = 1; i < count; ++i) {
    constexpr std::uint64_t kOwned = kPresent | kExclusive;
    if ((entries[i] & kOwned) != kOwned) missing.push_back(at((begin / kPage + i) * kPage, 1));
  }
  if (missing.empty()) return {};
  static_assert(kPagesInHuge <= IOV_MAX);
  static const std::array<char, kPagesInHuge> zeros{};
  const iovec source{const_cast<char*>(zeros.data()), missing.size()};
  const ssize_t done =
      ::process_vm_writev(pid_.value, &source, 1, missing.data(), missing.size(), 0);
  if (done == static_cast<ssize_t>(missing.size())) return {};
  const int number = done < 0 ? errno : EFAULT;
  const auto where = reinterpret_cast<std::uint64_t>(
      missing[static_cast<std::size_t>(std::max<ssize_t>(done, 0))].iov_base);
  return fail(refusal("write", where, 1, number));
}

Result<void> RemoteMemory::fault_in(unsigned threads, const Interrupt& interrupt) {
  if (bytes_ == 0) return {};
  // Opened by number, so only good if the process is still there afterwards. Without it (no /proc,
  // or a kernel that does not tell) every page is touched, which is right and only slower.
  const UniqueFd pages(
      ::open(fmt::format("/proc/{}/pagemap", pid_.value).c_str(), O_RDONLY | O_CLOEXEC));
  if (auto alive = check_alive(); !alive) return alive;

  const std::uint64_t first = address_ / kHugePage;
  const std::uint64_t blocks = (address_ + bytes_ - 1) / kHugePage - first + 1;
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::optional<Error> error;
  const auto work = [&] {
    const Span span(TraceKind::kMover, "touch host memory", pid_);
    while (!stop) {
      const std::uint64_t block = next.fetch_add(1);
      if (block >= blocks) return;
      Result<void> done = interrupt.check();
      if (done) {
        done = touch(pages, std::max(address_, (first + block) * kHugePage),
                     std::min(address_ + bytes_, (first + block + 1) * kHugePage));
      }
      if (done) continue;
      stop = true;
      const std::scoped_lock lock(mutex);
      if (!error) error = std::move(done.error());
    }
  };
  if (threads == 0) threads = default_threads(1);
  const auto most = std::min<std::uint64_t>(threads, blocks);
  (void)on_threads(static_cast<unsigned>(most), [&](unsigned) { work(); });
  if (error) return fail(std::move(*error));
  return check_alive();
}

}  // namespace stasis::direct
