#include "attach/inside_lot.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <ctime>

#include "proc/process_id.h"

// Of the section that the code lies in: the linker makes the first and the last of these.
extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): the linker's names
extern const unsigned char __start_stasis_inside[] __attribute__((visibility("hidden")));
extern const unsigned char __stop_stasis_inside[] __attribute__((visibility("hidden")));
extern const unsigned char stasis_inside_clone[] __attribute__((visibility("hidden")));
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
}

namespace stasis::attach {
namespace {

constexpr std::uint64_t kStackSize = std::uint64_t{128} << 10;

// At the beginning of the mapping of code.
struct CodeHead {
  std::array<std::uint64_t, 2> mark{};
  std::uint64_t build = 0;  // of the code, and of what it takes its block for
  std::uint64_t data = 0;
  std::uint64_t data_size = 0;
  std::uint64_t vector_capacity = 0;
  std::uint64_t owner_start = 0;
};
constexpr std::array<std::uint64_t, 2> kMark{0x5354415349530101, 0x3c7e91a5d2b84f60};
constexpr std::uint64_t kCodeOffset = 64;
static_assert(sizeof(CodeHead) <= kCodeOffset);

// Behind the block, in its page: since when a tool works with the lot, 0: none does.
constexpr std::uint64_t kTakenOffset = 2048;
static_assert(sizeof(InsideBlock) <= kTakenOffset);
// No call takes so long; then the tool was killed.
constexpr std::uint64_t kAbandonedAfter = 60;
// As many pages of code without a file are looked through.
constexpr std::uint64_t kMostPages = 64 << 10;

std::uint64_t rounded(std::uint64_t size) { return (size + kPage - 1) / kPage * kPage; }

std::span<const unsigned char> code() {
  return {__start_stasis_inside,
          static_cast<std::size_t>(__stop_stasis_inside - __start_stasis_inside)};
}

std::uint64_t build_of_code() {
  std::uint64_t hash = 0xcbf29ce484222325 ^ sizeof(InsideBlock);
  for (const unsigned char byte : code())
    hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

std::uint64_t now_in_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<std::uint64_t>(now.tv_sec) + 1;
}

template <class T>
void put(std::vector<std::byte>& bytes, std::uint64_t at, const T& value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

// A tool that was killed has left it, and no thread of ours is in it or on its way there.
bool is_abandoned(const MemoryReader& memory, const CLibrary& library, const InsideLot& lot,
                  std::uint64_t taken) {
  const std::uint64_t now = now_in_seconds();
  if (taken <= now && now - taken < kAbandonedAfter) return false;
  std::uint32_t tid = 0;
  InsideBlock block;
  if (!memory(lot.data + lot.layout.thread + library.tid_offset(), &tid, sizeof tid) ||
      !memory(lot.data, &block, sizeof block))
    return false;
  if (tid == 0) return true;  // the kernel never made it
  if (block.first_tid != 0) return false;
  const auto first = static_cast<InsideState>(block.first_state);
  return first == InsideState::kFailed || first == InsideState::kCancelled ||
         has_ended(memory, library, block);
}

}  // namespace

InsideLayout InsideLayout::of(const CLibrary& library, std::uint64_t vector_capacity) {
  InsideLayout out;
  out.vector_capacity = vector_capacity;
  out.stack = 2 * kPage;
  out.stack_end = out.stack + kStackSize;
  out.storage = out.stack_end;
  out.thread = out.storage + library.static_size();
  out.vector = out.thread + rounded(library.thread_size());
  out.vector_end = out.vector + rounded((vector_capacity + 2) * 16);
  out.input = out.vector_end;
  out.answers = out.input + rounded(kMostRanges * sizeof(SurveyRange));
  out.size = out.answers + rounded(kMostAnswers * sizeof(SurveyAnswer));
  return out;
}

std::uint64_t InsideLot::clone_instruction() const {
  return code + kCodeOffset +
         static_cast<std::uint64_t>(stasis_inside_clone - __start_stasis_inside);
}

std::vector<std::uint64_t> inside_code_words(const InsideLot& lot, std::uint64_t owner_start) {
  const auto bytes = attach::code();
  std::vector<std::uint64_t> words((kCodeOffset + bytes.size() + 7) / 8);
  const CodeHead head{
      kMark, build_of_code(), lot.data, lot.layout.size, lot.layout.vector_capacity, owner_start};
  std::memcpy(words.data(), &head, sizeof head);
  std::memcpy(words.data() + kCodeOffset / 8, bytes.data(), bytes.size());
  return words;
}

std::vector<std::byte> make_thread(const CLibrary& library, const CLibrary::RealThread& real,
                                   const InsideLot& lot) {
  const InsideLayout& layout = lot.layout;
  std::vector<std::byte> out(layout.vector_end - layout.storage);
  const std::uint64_t thread = layout.thread - layout.storage;
  for (const StaticThreadStorage& storage : library.static_storage())
    std::copy(storage.image.begin(), storage.image.end(),
              out.begin() + static_cast<std::ptrdiff_t>(thread - storage.distance));
  const std::uint64_t self = lot.data + layout.thread;
  put(out, thread + kTcbSelf, self);
  put(out, thread + kTcbThread, self);
  put(out, thread + kTcbSeveralThreads, std::uint32_t{1});
  put(out, thread + kTcbStackGuard, real.stack_guard);
  put(out, thread + kTcbPointerGuard, real.pointer_guard);
  // Two words before the first entry: how many there is room for.
  const std::uint64_t vector = layout.vector - layout.storage;
  put(out, thread + kTcbThreadVector, lot.data + layout.vector + 16);
  put(out, vector, layout.vector_capacity);
  put(out, vector + 16, real.generation);
  for (std::uint64_t i = 1; i <= layout.vector_capacity; ++i)
    put(out, vector + 16 + i * 16, kUnallocated);
  if (const auto offset = library.rseq_offset()) {
    const auto at = static_cast<std::uint64_t>(static_cast<std::int64_t>(thread) + *offset);
    put(out, at + 4, real.rseq_processor);
  }
  return out;
}

std::optional<InsideLot> find_lot(const proc::AddressSpace& space,
                                  const std::vector<proc::Mapping>& mappings,
                                  const CLibrary& library, std::uint64_t owner_start) {
  const auto memory = reader_of(space);
  const std::uint64_t build = build_of_code();
  std::uint64_t pages = 0;
  for (const proc::Mapping& mapping : mappings) {
    if (mapping.inode != 0 || mapping.permissions != "r-xp") continue;
    // The kernel makes one mapping of neighbours that are alike.
    for (std::uint64_t at = mapping.start; at + kInsideCodeSize <= mapping.end; at += kPage) {
      if (++pages > kMostPages) return std::nullopt;
      CodeHead head;
      if (!memory(at, &head, sizeof head)) break;
      if (head.mark != kMark || head.build != build || head.owner_start != owner_start) continue;
      if (head.vector_capacity == 0 || head.vector_capacity > (1 << 16)) continue;
      InsideLot lot{at, head.data, InsideLayout::of(library, head.vector_capacity), false};
      if (head.data % kPage != 0 || head.data >= kLastAddress || lot.layout.size != head.data_size)
        continue;
      std::uint64_t taken = 0;
      if (!memory(lot.data + kTakenOffset, &taken, sizeof taken)) continue;
      if (taken == 0 || is_abandoned(memory, library, lot, taken)) return lot;
    }
  }
  return std::nullopt;
}

Result<void> take_lot(const proc::AddressSpace& space, const InsideLot& lot) {
  const std::uint64_t now = now_in_seconds();
  return space.write(lot.data + kTakenOffset, &now, sizeof now);
}

Result<void> release_lot(const proc::AddressSpace& space, const InsideLot& lot) {
  const std::uint64_t free = 0;
  return space.write(lot.data + kTakenOffset, &free, sizeof free);
}

bool has_ended(const MemoryReader& memory, const CLibrary& library, const InsideBlock& block) {
  const auto state = static_cast<InsideState>(block.state);
  if (state != InsideState::kDone && state != InsideState::kCancelled) return false;
  // Another thread may have its stack by now, or none.
  std::int32_t tid = 0;
  return !memory(block.thread + library.tid_offset(), &tid, sizeof tid) || tid != block.tid;
}

}  // namespace stasis::attach
