#include "direct/remote_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "base/threads.h"
#include "base/trace.h"
#include "image/checksum.h"
#include "proc/pagemap.h"
#include "proc/process_file.h"

namespace stasis::direct {
namespace {

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
constexpr std::size_t kPagesInHuge = kHugePage / kPage;

}  // namespace

Result<void> RemoteMemory::check_range(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset <= bytes_ && bytes <= bytes_ - offset) return {};
  return fail(ErrorCode::kUsage, fmt::format("{} bytes at offset {} are beyond the {} bytes that "
                                             "process {} keeps for the content of its GPU memory",
                                             bytes, offset, bytes_, space_->pid().value));
}

Result<void> RemoteMemory::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  STASIS_TRY(check_range(offset, bytes.size()));
  return space_->write(address_ + offset, bytes.data(), bytes.size());
}

Result<void> RemoteMemory::read(std::uint64_t offset, std::span<std::byte> bytes) {
  STASIS_TRY(check_range(offset, bytes.size()));
  return space_->read(address_ + offset, bytes.data(), bytes.size());
}

Result<void> RemoteMemory::deduplicate(std::uint64_t offset, std::span<std::byte> digests) {
  static const Digest kZeros = xxh3(std::vector<std::byte>(kChunk));
  STASIS_TRY(check_range(offset, digests.size() / sizeof(Digest) * kChunk));
  for (std::size_t at = 0; at < digests.size(); at += sizeof(Digest)) {
    const bool zero = std::memcmp(&digests[at], kZeros.data(), sizeof kZeros) == 0;
    digests[at] = std::byte{is_fresh_ && zero};
  }
  return {};
}

Result<void> RemoteMemory::zeros(std::uint64_t offset, std::span<std::byte> flags) {
  STASIS_TRY(check_range(offset, flags.size() * kChunk));
  std::fill(flags.begin(), flags.end(), std::byte{0});
  const auto pages =
      proc::open_after_look(space_->pid(), fmt::format("/proc/{}/pagemap", space_->pid().value));
  if (!pages) return {};
  std::array<proc::PageEntry, kChunk / kPage> entries{};
  for (std::size_t i = 0; i < flags.size(); ++i) {
    const std::uint64_t at = address_ + offset + i * kChunk;
    const bool known =
        at % kPage == 0 && proc::read_pagemap(pages->get(), at, entries) == entries.size();
    flags[i] = std::byte{known && std::none_of(entries.begin(), entries.end(),
                                               std::mem_fn(&proc::PageEntry::is_touched))};
  }
  // By the process's number, which another may have by now.
  return space_->check_current();
}

Result<void> RemoteMemory::touch(const UniqueFd& pages, std::uint64_t begin,
                                 std::uint64_t end) const {
  static const std::array<char, kPagesInHuge * kPage> zeros{};
  // One byte first: if the kernel answers with a huge page, nothing else is missing afterwards.
  STASIS_TRY(space_->write(begin, zeros.data(), 1));
  const std::size_t count = (end - 1) / kPage - begin / kPage + 1;
  std::array<proc::PageEntry, kPagesInHuge> entries{};
  if (pages.valid() &&
      proc::read_pagemap(pages.get(), begin, std::span(entries).first(count)) != count)
    entries.fill({});
  const auto missing = [&](std::size_t i) { return i > 0 && i < count && !entries[i].is_owned(); };
  // The others, as many as lie together in one call: to fill a page costs less than a call does.
  for (std::size_t i = 1; i < count; ++i) {
    if (!missing(i)) continue;
    const std::size_t first = i;
    while (missing(i + 1))
      ++i;
    const std::uint64_t from = (begin / kPage + first) * kPage;
    const std::uint64_t to = std::min(end, (begin / kPage + i + 1) * kPage);
    STASIS_TRY(space_->write(from, zeros.data(), to - from));
  }
  return {};
}

Result<void> RemoteMemory::fault_in(unsigned threads, const Interrupt& interrupt) {
  if (bytes_ == 0) return {};
  // Only a hint: a page that is taken for present by mistake is touched later, at its first use.
  // Without it (a kernel that does not tell) every page is touched, which is right and only slower.
  const Pid pid = space_->pid();
  auto opened = proc::open_after_look(pid, fmt::format("/proc/{}/pagemap", pid.value));
  const UniqueFd pages = opened ? std::move(*opened) : UniqueFd();

  const std::uint64_t first = address_ / kHugePage;
  const std::uint64_t blocks = (address_ + bytes_ - 1) / kHugePage - first + 1;
  std::atomic<std::uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::optional<Error> error;
  const auto work = [&] {
    const Span span(TraceKind::kMover, "touch host memory", pid);
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
  const auto most = std::min<std::uint64_t>(threads, blocks);
  (void)on_threads(static_cast<unsigned>(most), [&](unsigned) { work(); });
  if (error) return fail(std::move(*error));
  return {};
}

}  // namespace stasis::direct
