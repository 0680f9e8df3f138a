#include "criu/inside_criu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <tuple>
#include <utility>

#include "base/own_files.h"

namespace stasis {

using inside_criu::kMostRanges;
using inside_criu::kTableBytes;
using inside_criu::Range;
using inside_criu::Table;

void InsideCriu::Unmap::operator()(Table* table) const { (void)::munmap(table, kTableBytes); }

Result<std::string> InsideCriu::find_library() {
  std::string library = own_file("libstasis-inside-criu.so");
  if (::access(library.c_str(), R_OK) != 0)
    return fail(ErrorCode::kNotSupported, library + " is not there", "install Stasis whole");
  // The linker takes blanks and colons for separators, and replaces what a dollar begins: it would
  // look for the rest where criu happens to work.
  if (library.find_first_of(" :$") != std::string::npos)
    return fail(
        ErrorCode::kNotSupported,
        library + " has a blank, a colon or a dollar in its path, which LD_PRELOAD cannot hold",
        "install Stasis elsewhere");
  return library;
}

Result<InsideCriu> InsideCriu::create() {
  STASIS_TRY_ASSIGN(auto library, find_library());
  UniqueFd file(::memfd_create("stasis-inside-criu", MFD_CLOEXEC));
  if (!file.valid() || ::ftruncate(file.get(), static_cast<off_t>(kTableBytes)) != 0)
    return fail(errno_error("cannot create a memory file", errno));
  void* const mapped =
      ::mmap(nullptr, kTableBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) return fail(errno_error("cannot map a memory file", errno));
  return InsideCriu(std::move(file), static_cast<Table*>(mapped), std::move(library));
}

bool InsideCriu::is_heard() const { return table_->is_heard.load(std::memory_order_acquire) != 0; }

void InsideCriu::await() { table_->is_awaited.store(1, std::memory_order_release); }

bool InsideCriu::hide(std::vector<Range> ranges) {
  if (ranges.size() > kMostRanges) {
    hide_none();
    return false;
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& one, const Range& other) {
    return std::tie(one.owner, one.start) < std::tie(other.owner, other.start);
  });
  std::copy(ranges.begin(), ranges.end(), table_->ranges);
  table_->count.store(ranges.size(), std::memory_order_release);
  hide_none();
  return true;
}

void InsideCriu::hide_none() { table_->is_awaited.store(0, std::memory_order_release); }

bool InsideCriu::is_asked() const { return table_->is_asked.load(std::memory_order_acquire) != 0; }

std::optional<Tid> InsideCriu::thread_with_tiles() const {
  const std::uint64_t thread = table_->tiles_of.load(std::memory_order_acquire);
  return thread == 0 ? std::nullopt : std::optional(Tid{static_cast<int>(thread)});
}

std::uint64_t InsideCriu::hidden_bytes() const {
  return table_->hidden.load(std::memory_order_relaxed) * 4096;
}

}  // namespace stasis
