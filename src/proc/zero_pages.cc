#include "proc/zero_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <span>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/fd.h"
#include "base/threads.h"
#include "proc/pagemap.h"
#include "proc/parking.h"
#include "proc/process_file.h"

namespace stasis {
namespace {

constexpr std::uint64_t kPageSize = 4096;
// The unit of the scan, which is the size of a huge page.
constexpr std::uint64_t kBlock = 2 << 20;
constexpr std::size_t kPagesPerBlock = kBlock / kPageSize;
// Read at once: some of it stays in the processor's cache until it is looked at.
constexpr std::size_t kPagesPerRead = 64;
// A block is read whole if of so many of its pages at least half begin with so many zeros. So what
// a program has in its GPU memory costs little: 65,536 looks for 16 GiB.
constexpr std::size_t kSamples = 8;
constexpr std::size_t kSampleSize = 64;
// A system call of a held thread takes some 30 us, in which CRIU writes 64 KiB.
constexpr std::uint64_t kLeastRun = 64 << 10;
// At most so much in one call, which takes 15 ms: the code that waits for it gives up after two
// seconds.
constexpr std::uint64_t kLargestCall = 64 << 20;

// More than any GPU's memory: not the driver's, but addresses that the program has only reserved.
constexpr std::uint64_t kMostLookedThrough = 1ULL << 40;

// The driver reads all of it when it restores the process. Huge pages of zeros, of which there is
// one for all, take 30 ms for 512 MiB where small ones take 250, and those with something in them
// 80 (a virtual machine, Linux 6.18). Only where nothing is left: blocks with something in them the
// kernel would fill up again by itself. Each such run is a mapping of its own, of which a process
// may have 65,530.
constexpr int kMostHuge = 256;

constexpr std::array<char, kPageSize> kZeros{};

// Looks through the memory of one process, from one thread.
class Searcher {
 public:
  Searcher(const proc::AddressSpace& space, int pagemap)
      : space_(space), pagemap_(pagemap), buffer_(kPagesPerRead * kPageSize) {}

  void probe(const AddressRange& block) {
    const std::size_t pages = (block.end - block.start) / kPageSize;
    const auto entries = std::span(entries_).first(pages);
    if (proc::read_pagemap(pagemap_, block.start, entries) != pages) return;
    there_.clear();
    for (std::size_t page = 0; page < pages; ++page)
      if (entries_[page].is_owned()) there_.push_back(page);
    runs_before_ = runs_.size();
    if (there_.empty() || !begins_with_zeros(block.start)) return;
    for (std::size_t page = 0; page < pages; page += kPagesPerRead)
      read(block.start, page, std::min(kPagesPerRead, pages - page));
  }

  std::vector<ZeroRun> take() { return std::move(runs_); }

 private:
  bool begins_with_zeros(std::uint64_t start) {
    std::array<char, kSampleSize> beginning{};
    const std::size_t count = std::min(kSamples, there_.size());
    std::size_t zero = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t page = start + there_[i * there_.size() / count] * kPageSize;
      if (!space_.read(page, beginning.data(), kSampleSize)) return false;
      if (std::memcmp(beginning.data(), kZeros.data(), kSampleSize) == 0) ++zero;
    }
    return zero * 2 >= count;
  }

  // Some pages of a block, from `first` on.
  void read(std::uint64_t start, std::size_t first, std::size_t count) {
    std::size_t filled = 0;
    for (std::size_t page = first; page < first + count;) {
      std::size_t end = page;
      while (end < first + count && entries_[end].is_owned())
        ++end;
      const std::size_t size = (end - page) * kPageSize;
      if (size > 0 && !space_.read(start + page * kPageSize, &buffer_[filled], size)) return;
      filled += size;
      page = std::max(end, page + 1);
    }
    const char* content = buffer_.data();
    for (std::size_t page = first; page < first + count; ++page) {
      const std::uint64_t at = start + page * kPageSize;
      if (entries_[page].is_owned()) {
        if (std::memcmp(content, kZeros.data(), kPageSize) == 0) add(at, kPageSize);
        content += kPageSize;
      } else if (!entries_[page].is_touched()) {
        add(at, 0);  // nothing is there to be lost, and a run need not end
      }
    }
  }

  void add(std::uint64_t page, std::uint64_t bytes) {
    if (runs_.size() > runs_before_ && runs_.back().range.end == page) {
      runs_.back().range.end += kPageSize;
      runs_.back().bytes += bytes;
    } else if (bytes > 0) {
      runs_.push_back({{page, page + kPageSize}, bytes});
    }
  }

  const proc::AddressSpace& space_;
  int pagemap_;
  std::array<proc::PageEntry, kPagesPerBlock> entries_{};
  std::vector<std::size_t> there_;  // pages of the block
  std::vector<char> buffer_;
  std::vector<ZeroRun> runs_;
  std::size_t runs_before_ = 0;  // this block
};

// Runs that touch within a mapping become one; short runs are left out.
std::vector<ZeroRun> tidied(std::vector<ZeroRun> runs, std::span<const AddressRange> mappings) {
  const auto begins_one = [&](const ZeroRun& run) {
    return std::any_of(mappings.begin(), mappings.end(), [&](const AddressRange& mapping) {
      return mapping.start == run.range.start;
    });
  };
  std::sort(runs.begin(), runs.end(),
            [](const ZeroRun& a, const ZeroRun& b) { return a.range.start < b.range.start; });
  std::vector<ZeroRun> out;
  for (const ZeroRun& run : runs) {
    if (!out.empty() && out.back().range.end == run.range.start && !begins_one(run)) {
      out.back().range.end = run.range.end;
      out.back().bytes += run.bytes;
    } else {
      out.push_back(run);
    }
  }
  std::erase_if(out, [](const ZeroRun& run) { return run.bytes < kLeastRun; });
  return out;
}

// Calls `part` for the whole of `range`, at most so much at a time, cut at multiples of that.
template <class Part>
Result<void> in_parts(const AddressRange& range, std::uint64_t most, const Part& part) {
  for (std::uint64_t at = range.start; at < range.end;) {
    const std::uint64_t end = std::min(range.end, (at / most + 1) * most);
    STASIS_TRY(part(AddressRange{at, end}));
    at = end;
  }
  return {};
}

}  // namespace

std::vector<AddressRange> new_memory(std::span<const proc::Mapping> before,
                                     std::span<const proc::Mapping> now) {
  std::vector<AddressRange> out;
  auto known = before.begin();
  for (const proc::Mapping& mapping : now) {
    if (mapping.permissions != "rw-p" || mapping.inode != 0 || !mapping.path.empty()) continue;
    std::uint64_t at = mapping.start;
    while (at < mapping.end) {
      while (known != before.end() && known->end <= at)
        ++known;
      const std::uint64_t free_to =
          known == before.end() ? mapping.end : std::min(mapping.end, known->start);
      if (free_to > at) out.push_back({at, free_to});
      at = known == before.end() ? mapping.end
                                 : std::max(free_to, std::min(mapping.end, known->end));
    }
  }
  return out;
}

std::vector<ZeroRun> find_zero_runs(const proc::AddressSpace& space,
                                    std::span<const AddressRange> ranges, unsigned threads) {
  std::vector<AddressRange> blocks;
  for (const AddressRange& range : ranges) {
    (void)in_parts(range, kBlock, [&](const AddressRange& block) -> Result<void> {
      blocks.push_back(block);
      return {};
    });
  }
  const auto pagemap =
      proc::open_after_look(space.pid(), fmt::format("/proc/{}/pagemap", space.pid().value));
  if (!pagemap) return {};
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::vector<ZeroRun> found;
  const auto search = [&] {
    Searcher searcher(space, pagemap->get());
    for (std::size_t i = next++; i < blocks.size(); i = next++)
      searcher.probe(blocks[i]);
    const std::scoped_lock lock(mutex);
    for (const ZeroRun& run : searcher.take())
      found.push_back(run);
  };
  (void)on_threads(static_cast<unsigned>(std::min<std::size_t>(threads, blocks.size())),
                   [&](unsigned) { search(); });
  return tidied(std::move(found), ranges);
}

std::uint64_t drop_zero_pages(const proc::AddressSpace& space,
                              std::span<const proc::Mapping> before, unsigned threads) {
  const auto now = proc::ProcFs().mappings(space.pid());
  if (!now) return 0;
  const std::vector<AddressRange> fresh = new_memory(before, *now);
  std::uint64_t size = 0;
  for (const AddressRange& range : fresh)
    size += range.end - range.start;
  if (size > kMostLookedThrough) return 0;
  const std::vector<ZeroRun> zeros = find_zero_runs(space, fresh, threads);
  if (zeros.empty()) return 0;
  std::uint64_t dropped = 0;
  int huge = 0;
  (void)call_from_parked_thread(space, [&](const SystemCall& call) -> Result<void> {
    // False for what the kernel refuses, such as pages that are locked.
    const auto advise = [&](const AddressRange& range, int advice) -> Result<bool> {
      const std::array<std::uint64_t, 3> arguments{range.start, range.end - range.start,
                                                   static_cast<std::uint64_t>(advice)};
      STASIS_TRY_ASSIGN(auto answer, call(SYS_madvise, arguments));
      return answer == 0;
    };
    for (const ZeroRun& run : zeros) {
      bool all = true;
      STASIS_TRY(in_parts(run.range, kLargestCall, [&](const AddressRange& part) -> Result<void> {
        STASIS_TRY_ASSIGN(auto gone, advise(part, MADV_DONTNEED));
        all = all && gone;
        fault_only(FaultPoint::kZerosDropped);
        return {};
      }));
      if (!all) continue;
      dropped += run.bytes;
      const AddressRange whole{(run.range.start + kBlock - 1) / kBlock * kBlock,
                               run.range.end / kBlock * kBlock};
      if (whole.end <= whole.start || ++huge > kMostHuge) continue;
      STASIS_TRY(advise(whole, MADV_HUGEPAGE));
    }
    return {};
  });
  return dropped;
}

}  // namespace stasis
