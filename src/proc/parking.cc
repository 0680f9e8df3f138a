// Long because a lot, the threads in it and the way back from a half-parked one share the layout of
// its page.
#include "proc/parking.h"

#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/fault_point.h"
#include "base/units.h"
#include "proc/code_map.h"
#include "proc/procfs.h"
#include "proc/remote_syscall.h"
#include "proc/stopped_threads.h"

namespace stasis {
namespace {

using proc::AddressSpace;
using proc::StoppedThreads;
using Registers = StoppedThreads::Registers;

// The mapping: a page with kLotMagic, the number of slots, and the code, then the slots, then a
// page that CRIU does not see in a dump that says kSavedMark. It is never writable for the program;
// the tool writes through ptrace.
constexpr std::array<std::uint64_t, 2> kLotMagic{0x5354415349530001, 0x9d1f3c5b7e2a4068};
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kCapacityOffset = 16;
constexpr std::uint64_t kMarkOffset = 24;
constexpr std::uint64_t kInWorkMark = 0x5aa5a3a1b1c7d39c;
constexpr std::uint64_t kSavedMark = 0x5aa5a3a1b1c7d39d;
// Of an earlier stasis: the memory was given back to the system until the image was written back.
constexpr std::uint64_t kAwayMark = 0x5aa5a3a1b1c7d39b;
// The word there says that the mapping has the last page.
constexpr std::uint64_t kHasOriginalOffset = 32;
constexpr std::uint64_t kHasOriginal = 0x1c7d39e5aa5a3a1b;
// The first word of the last page, where that was not left out by CRIU.
constexpr std::uint64_t kOriginalMark = 0x39e5aa5a3a1b1c7d;
constexpr std::uint64_t kCodeOffset = 64;
//   again: mov eax, 202 (futex)    b8 ca 00 00 00
//          syscall                 0f 05
//          jmp again               eb f7
// with rdi = the slot, rsi = FUTEX_WAIT_PRIVATE, rdx = its first word, r10 = 0 (for ever).
constexpr std::array<std::uint64_t, 2> kParkCode{0xeb050f000000cab8, 0xf7};
constexpr std::uint64_t kParkCodeSize = 9;
constexpr std::uint64_t kFutexWaitPrivate = 128;
constexpr std::uint64_t kSlotSize = 256;
constexpr std::uint64_t kFewestSlots = 60;
// Of a mapping without a file, such as what a compiler in the program has made.
constexpr std::uint64_t kLargestSearched = 4 << 20;
// Of all of them together: reading 256 Ki pages takes 0.2 s. And of lots: a process has one, or a
// few if it has had very many threads; a target can make as many as it likes.
constexpr std::uint64_t kMostPages = 256 << 10;
constexpr std::size_t kMostLots = 64;

// A slot holds a SavedThread, whose mark is the word that the thread waits on.
static_assert(sizeof(SavedThread) <= kSlotSize && sizeof(SavedThread) % 8 == 0);

struct Lot {
  std::uint64_t start = 0;
  std::uint64_t capacity = 0;
  std::uint64_t mark = 0;
  bool has_original = false;  // it has the page for that

  bool is_in_work() const { return mark == kInWorkMark; }  // mark_memory_in_work()
  AddressRange original() const {
    const std::uint64_t at = start + kPage + (capacity * kSlotSize + kPage - 1) / kPage * kPage;
    return {at, at + kPage};
  }

  std::uint64_t slot(std::uint64_t index) const { return start + kPage + index * kSlotSize; }
  std::optional<std::uint64_t> index_of(std::uint64_t slot_address) const {
    const std::uint64_t offset = slot_address - (start + kPage);
    if (offset % kSlotSize != 0 || offset / kSlotSize >= capacity) return std::nullopt;
    return offset / kSlotSize;
  }
};

// What the tool has in the target, and where a mapping can be made from.
struct ParkingPlaces {
  std::vector<Lot> lots;
  RemoteCallRoom calls;
};

// What lies at the beginning of a page, if it is a lot.
std::optional<Lot> lot_at(const AddressSpace& space, std::uint64_t address) {
  std::array<std::uint64_t, 5> header{};
  if (!space.read(address, header.data(), sizeof header)) return std::nullopt;
  if (header[0] != kLotMagic[0] || header[1] != kLotMagic[1]) return std::nullopt;
  return Lot{address, std::min(header[2], kLargestSearched / kSlotSize), header[3],
             header[4] == kHasOriginal};
}

Error too_much(Pid pid) {
  return refusal({"parking", Severity::kRed, pid,
                  fmt::format("process {} has more code that belongs to no file than is looked "
                              "through for its threads that stand still ({} pages, {} places)",
                              pid.value, kMostPages, kMostLots),
                  fmt::format("see what made it: `cat /proc/{}/maps`", pid.value)});
}

Result<ParkingPlaces> probe(const AddressSpace& space) {
  const Pid pid = space.pid();
  ParkingPlaces places;
  std::uint64_t pages = 0;
  const proc::ProcFs procfs;
  auto mappings = procfs.mappings(pid);
  if (!mappings) {
    if (procfs.threads(pid).empty()) return places;  // it has ended
    return fail(std::move(mappings.error()));
  }
  for (const proc::Mapping& mapping : *mappings) {
    if (mapping.permissions != "r-xp") continue;
    const std::uint64_t start = mapping.start;
    if (mapping.inode == 0) {
      // The kernel makes one mapping of neighbours that are alike, so ours may begin within one.
      const std::uint64_t end = std::min(mapping.end, start + kLargestSearched);
      for (std::uint64_t at = start; at + 2 * kPage <= end; at += kPage) {
        if (++pages > kMostPages || places.lots.size() > kMostLots) return fail(too_much(pid));
        if (auto lot = lot_at(space, at)) places.lots.push_back(*lot);
      }
      continue;
    }
    places.calls.probe(space, mapping);
  }
  return places;
}

// The slot a thread waits in, if its registers say so. The lot is looked for where the thread is.
std::optional<std::uint64_t> slot_of(const AddressSpace& space, std::uint64_t instruction,
                                     std::uint64_t first_argument) {
  const std::uint64_t in_page = instruction % kPage;
  if (in_page < kCodeOffset || in_page > kCodeOffset + kParkCodeSize) return std::nullopt;
  const auto lot = lot_at(space, instruction - in_page);
  if (!lot || !lot->index_of(first_argument)) return std::nullopt;
  return first_argument;
}

// What /proc says of a thread without stopping it: where it waits, or nothing for one that runs.
struct Waiting {
  bool running = false;
  std::uint64_t first_argument = 0;
  std::uint64_t stack = 0;
  std::uint64_t instruction = 0;
};
Waiting waiting_of(Pid pid, Tid thread) {
  // "202 0x7f.. 0x80 0x.. 0x0 0x.. 0x.. 0xSP 0xPC", "-1 0xSP 0xPC", or "running".
  std::ifstream file(fmt::format("/proc/{}/task/{}/syscall", pid.value, thread.value));
  std::vector<std::string> words;
  for (std::string word; file >> word;)
    words.push_back(std::move(word));
  // Neither, such as one that waits for a page: it has to be stopped to know.
  Waiting out;
  out.running = words.size() != 9;
  if (!out.running) {
    out.first_argument = std::strtoull(words[1].c_str(), nullptr, 16);
    out.stack = std::strtoull(words[7].c_str(), nullptr, 16);
    out.instruction = std::strtoull(words[8].c_str(), nullptr, 16);
  }
  return out;
}

bool is_parked(const AddressSpace& space, const Waiting& waiting) {
  return !waiting.running && slot_of(space, waiting.instruction, waiting.first_argument);
}

// Has a thread of the target make the mapping.
Result<Lot> make_lot(const AddressSpace& space, const StoppedThreads& stopped,
                     const ParkingPlaces& places, std::size_t threads) {
  const Pid pid = space.pid();
  const std::uint64_t capacity = std::bit_ceil(std::max<std::uint64_t>(threads * 2, kFewestSlots));
  const std::uint64_t size = Lot{0, capacity}.original().end;
  const Tid thread = stopped.threads().front();
  std::int64_t made = 0;
  auto called =
      make_system_calls(space, stopped, places.calls, [&](const SystemCall& call) -> Result<void> {
        STASIS_TRY(fault(FaultPoint::kParkStep));
        const std::array<std::uint64_t, 6> arguments{0,
                                                     size,
                                                     PROT_READ | PROT_EXEC,
                                                     MAP_PRIVATE | MAP_ANONYMOUS,
                                                     static_cast<std::uint64_t>(-1),
                                                     0};
        STASIS_TRY_ASSIGN(auto mapped, call(SYS_mmap, arguments));
        made = mapped;
        return fault(FaultPoint::kParkMapped);
      });
  STASIS_TRY(std::move(called));
  if (made < 0 && made > -static_cast<std::int64_t>(kPage)) {
    auto message =
        fmt::format("process {} may not map {} bytes of code to keep its threads still: {}",
                    pid.value, size, std::generic_category().message(static_cast<int>(-made)));
    if (made == -ENOMEM)
      return fail(ErrorCode::kOutOfHostMemory, std::move(message),
                  "raise its limits of memory (`prlimit --pid PID --as --data`; `ulimit -v`, `-d` "
                  "before it starts), or vm.max_map_count");
    return fail(refusal({"parking", Severity::kRed, pid, std::move(message),
                         "see whether SELinux (execmem) or a seccomp filter forbids it"}));
  }
  const Lot lot{static_cast<std::uint64_t>(made), capacity};
  STASIS_TRY(stopped.write(thread, lot.start + kCodeOffset, kParkCode));
  const std::array<std::uint64_t, 3> head{capacity, 0, kHasOriginal};
  static_assert(kMarkOffset == kCapacityOffset + 8 && kHasOriginalOffset == kMarkOffset + 8);
  STASIS_TRY(stopped.write(thread, lot.start + kCapacityOffset, head));
  STASIS_TRY(stopped.write(thread, lot.start, kLotMagic));
  return lot;
}

Result<void> park(const StoppedThreads& stopped, Tid thread, const SavedThread& slot,
                  const Lot& lot, std::uint64_t index) {
  STASIS_TRY(stopped.write(thread, lot.slot(index), slot.words()));
  Registers registers = slot.registers;
  registers.orig_rax = static_cast<std::uint64_t>(-1);
  registers.rip = lot.start + kCodeOffset;
  registers.rdi = lot.slot(index);
  registers.rsi = kFutexWaitPrivate;
  registers.rdx = SavedThread::kMark;
  registers.r10 = 0;
  STASIS_TRY(stopped.set_registers(thread, registers));
  return stopped.set_signal_mask(thread, proc::kAllSignals);
}

// Sends a stopped thread on if it is parked.
Result<void> unpark(const AddressSpace& space, const StoppedThreads& stopped, Tid thread) {
  auto registers = stopped.registers(thread);
  if (!registers) return {};  // killed
  const auto at = slot_of(space, registers->rip, registers->rdi);
  if (!at) return {};
  STASIS_TRY_ASSIGN(auto slot, read_saved(space, *at));
  STASIS_TRY(send_on(stopped, thread, slot));
  const std::array<std::uint64_t, 1> free{0};
  STASIS_TRY(stopped.write(thread, *at, free));
  return fault(FaultPoint::kUnparkThread);
}

Result<void> finish_remote_call_of(const AddressSpace& space, const RemoteCallRoom::Begun& begun) {
  STASIS_TRY_ASSIGN(auto stopped, StoppedThreads::stop(space, [](Tid) { return true; }));
  return finish_remote_call(space, stopped, begun);
}

// The word that a thread waits on, of each slot; of none if it cannot be read.
std::vector<std::uint64_t> first_words(const AddressSpace& space, const Lot& lot) {
  std::vector<std::byte> slots(lot.capacity * kSlotSize);
  if (!space.read(lot.slot(0), slots.data(), slots.size())) return {};
  std::vector<std::uint64_t> words(lot.capacity);
  for (std::uint64_t i = 0; i < lot.capacity; ++i)
    std::memcpy(&words[i], &slots[i * kSlotSize], sizeof words[i]);
  return words;
}

// Whether a slot says that a thread waits in it, or is on its way there. A tool that was killed
// between the two steps of parking a thread has left a slot that says so of no thread.
bool any_slot_in_use(const AddressSpace& space, const std::vector<Lot>& lots) {
  for (const Lot& lot : lots) {
    for (const std::uint64_t word : first_words(space, lot))
      if (word == SavedThread::kMark) return true;
  }
  return false;
}

// Whether the process is what CRIU has made of one that said kSavedMark.
bool lacks_memory(const AddressSpace& space, const Lot& lot) {
  if (lot.mark != kSavedMark) return lot.mark == kAwayMark;
  std::uint64_t word = 0;
  return !space.read(lot.original().start, &word, sizeof word) || word != kOriginalMark;
}

Result<void> check_is_there(const AddressSpace& space, const ParkingPlaces& places) {
  const Pid pid = space.pid();
  if (std::any_of(places.lots.begin(), places.lots.end(),
                  [](const Lot& lot) { return lot.is_in_work(); })) {
    return fail(ErrorCode::kWrongState,
                fmt::format("the agent in process {} was replacing memory of it when the tool that "
                            "had asked for that was killed or gave up",
                            pid.value),
                fmt::format("`stasis recover {}` waits for its end", pid.value));
  }
  if (std::none_of(places.lots.begin(), places.lots.end(),
                   [&](const Lot& lot) { return lacks_memory(space, lot); }))
    return {};
  return fail(
      ErrorCode::kWrongState,
      fmt::format("part of the host memory of process {} is in the image that it was "
                  "restored from, and not in the process",
                  pid.value),
      fmt::format("end it (`kill -9 {}`) and restore the image with `stasis restore`", pid.value));
}

// Thread by thread, so that one that cannot be stopped holds up no other.
Result<void> unpark_all(const AddressSpace& space) {
  const Pid pid = space.pid();
  STASIS_TRY_ASSIGN(auto places, probe(space));
  STASIS_TRY(check_is_there(space, places));
  if (places.calls.begun) {
    STASIS_TRY(finish_remote_call_of(space, *places.calls.begun));
  }
  Result<void> worst;
  for (const Tid thread : proc::ProcFs().threads(pid)) {
    const Waiting waiting = waiting_of(pid, thread);
    const bool parked = is_parked(space, waiting);
    // Where there is no lot no thread is on the way into one.
    if (!parked && (!waiting.running || places.lots.empty())) continue;
    auto stopped = StoppedThreads::stop(space, thread);
    auto done =
        stopped && !stopped->threads().empty() ? unpark(space, *stopped, thread) : Result<void>();
    if (!stopped) done = fail(std::move(stopped.error()));
    if (!done && done.error().code != ErrorCode::kProcessGone) worst = std::move(done);
  }
  // A thread that could not be stopped was not parked, if no slot is in use. Where the threads are
  // does not tell: one that was parked just now may not have come to wait yet.
  if (!worst && !any_slot_in_use(space, places.lots)) return {};
  return worst;
}

// Parks the threads one by one, each at a moment when it may: parked in the driver's code it could
// hold a lock that the driver needs to restore the process (seen on 580.159.04: for ever). Since
// the process is locked and its GPU idle, a thread stays in the driver for microseconds, or
// sleeps in it: in front of the lock, or for events.
class Parker {
 public:
  Parker(const AddressSpace& space, const std::vector<Tid>& spared)
      : space_(space), pid_(space.pid()), spared_(spared), code_(space), start_(Clock::now()) {}

  Result<void> run() {
    STASIS_TRY_ASSIGN(places_, probe(space_));
    if (places_.calls.begun) {
      STASIS_TRY(unpark_threads(pid_));
      STASIS_TRY_ASSIGN(places_, probe(space_));
    }
    find_free_places();
    return park_all();
  }

 private:
  using Clock = std::chrono::steady_clock;
  // A thread that has not run for so long sleeps.
  static constexpr std::chrono::milliseconds kAsleep{3};
  // The C library's locks are held for less than a microsecond; when a thread is only ever seen in
  // it, it is let be there.
  static constexpr int kLibraryTries = 100;
  static constexpr std::chrono::seconds kLimit{10};
  static constexpr std::chrono::milliseconds kLimitPerThread{20};  // of a thousand at most

  // A call that a thread makes again and again: it was seen in it so often, over such a time.
  static constexpr int kRestTries = 10;
  static constexpr std::chrono::milliseconds kRest{20};
  // A thread that runs in the driver is let run for a moment and looked at again, so often, before
  // the others get their turn: threads that do nothing but ask it are outside for some 10 ns per
  // microsecond.
  static constexpr int kLooks = 50;
  static constexpr int kLongestRunNs = 50000;
  // Those that are stopped together stand still for each other, some 50 us each.
  static constexpr std::size_t kTogether = 64;

  struct Seen {
    std::uint64_t switches = 0;
    Clock::time_point since;
    // The wait it was last seen in.
    std::uint64_t instruction = 0;
    std::uint64_t stack = 0;
    int waits = 0;
    Clock::time_point first_wait;
    int tries = 0;
    bool is_moving = false;  // stopped with others it was elsewhere
  };

  Result<void> park_all() {
    for (;;) {
      std::vector<Tid> not_parked;
      for (const Tid thread : proc::ProcFs().threads(pid_)) {
        if (std::find(spared_.begin(), spared_.end(), thread) != spared_.end()) continue;
        const Waiting waiting = waiting_of(pid_, thread);
        if (is_parked(space_, waiting)) continue;
        if (may_go_with_others(thread, waiting)) {
          together_.push_back(thread);
          if (together_.size() == kTogether) STASIS_TRY(park_together(not_parked));
          continue;
        }
        // It may take the place that those have been counted on.
        if (!together_.empty() && free_.size() <= together_.size())
          STASIS_TRY(park_together(not_parked));
        STASIS_TRY_ASSIGN(auto done, try_to_park(thread, waiting));
        if (!done) not_parked.push_back(thread);
      }
      STASIS_TRY(park_together(not_parked));
      const std::size_t left = not_parked.size();
      const auto resting = static_cast<std::size_t>(
          std::count_if(not_parked.begin(), not_parked.end(),
                        [this](Tid thread) { return rests(seen_[thread]); }));
      // Those that were just parked are seen to wait in the next round, and new ones are found.
      if (left == 0 && parked_ == 0) return {};
      parked_ = 0;
      // No thread is left that could hold what they wait for, if they are in the driver at all.
      take_resting_ = left > 0 && left == resting;
      if (Clock::now() - start_ > limit()) {
        return fail(ErrorCode::kBusy,
                    fmt::format("{} thread(s) of process {} are never seen outside of the driver",
                                left, pid_.value),
                    "try again; a program that waits for another process on the GPU has to be "
                    "suspended with it");
      }
      if (left > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  std::chrono::milliseconds limit() const {
    const auto threads = static_cast<std::int64_t>(std::min<std::size_t>(seen_.size(), 1000));
    return kLimit + kLimitPerThread * threads;
  }

  // One that waits outside of the driver is stopped with others like it: what each stop costs is
  // the proof that the process is still the same, and not the stop. Where a mapping is to be made
  // first a thread has to be alone.
  bool may_go_with_others(Tid thread, const Waiting& waiting) {
    const Seen& seen = seen_[thread];
    return !waiting.running && !seen.is_moving && free_.size() > together_.size() &&
           code_.site(waiting.instruction, waiting.stack, true) != proc::Site::kDriver;
  }

  // Those that are not where they were seen to wait get their turn alone.
  Result<void> park_together(std::vector<Tid>& not_parked) {
    const std::vector<Tid> threads = std::exchange(together_, {});
    if (threads.empty()) return {};
    STASIS_TRY_ASSIGN(auto stopped, StoppedThreads::stop(space_, threads));
    for (const Tid thread : stopped.threads()) {
      STASIS_TRY_ASSIGN(auto look, look_once(stopped, thread, false));
      if (look) continue;
      seen_[thread].is_moving = true;
      not_parked.push_back(thread);
    }
    return {};
  }

  // True if the thread is parked, or has ended.
  Result<bool> try_to_park(Tid thread, const Waiting& waiting) {
    Seen& seen = seen_[thread];
    const bool asleep = !waiting.running && sleeps(thread, seen);
    if (!waiting.running) note_wait(waiting, seen);
    // One that sleeps in the driver is not woken until it is sure that it does.
    if (!waiting.running && !asleep && !take_resting_ &&
        code_.site(waiting.instruction, waiting.stack, true) == proc::Site::kDriver) {
      return false;
    }
    STASIS_TRY_ASSIGN(auto stopped, StoppedThreads::stop(space_, thread));
    if (stopped.threads().empty()) return true;
    for (int looks = 0; looks < kLooks; ++looks) {
      STASIS_TRY_ASSIGN(const auto done, look_once(stopped, thread, asleep || take_resting_));
      if (done) return true;
      auto again = stopped.let_run(thread, std::chrono::nanoseconds(jitter_(random_)));
      if (!again && again.error().code == ErrorCode::kProcessGone) return true;
      STASIS_TRY(std::move(again));
    }
    seen.since = {};
    return false;
  }

  // Parks a stopped thread if it may be where it is, also, if it `rests`, in the wait that it was
  // seen in. True if it is parked, or has ended.
  Result<bool> look_once(const StoppedThreads& stopped, Tid thread, bool rests) {
    auto registers = stopped.registers(thread);
    if (!registers) return true;  // killed
    if (slot_of(space_, registers->rip, registers->rdi)) return true;
    Seen& seen = seen_[thread];
    const bool in_call = proc::is_in_system_call(*registers);
    const proc::Site site = code_.site(registers->rip, registers->rsp, in_call);
    const bool same_wait =
        in_call && registers->rip == seen.instruction && registers->rsp == seen.stack;
    const bool may = site == proc::Site::kProgram || (same_wait && rests) ||
                     (site == proc::Site::kLibrary && ++seen.tries > kLibraryTries);
    return may ? park_here(stopped, thread) : Result<bool>(false);
  }

  Result<bool> park_here(const StoppedThreads& stopped, Tid thread) {
    // Before a mapping is made, which changes the thread's registers.
    auto slot = save(stopped, thread, false);
    if (!slot) return true;  // killed
    STASIS_TRY_ASSIGN(auto place, free_place(stopped));
    auto done = park(stopped, thread, *slot, place.first, place.second);
    if (!done && done.error().code != ErrorCode::kProcessGone) return fail(std::move(done.error()));
    ++parked_;
    STASIS_TRY(fault(FaultPoint::kParkThread));
    return true;
  }

  // Has it not run for a while?
  bool sleeps(Tid thread, Seen& seen) const {
    const auto now = proc::ProcFs().thread_status(pid_, thread);
    if (!now || seen.since == Clock::time_point{} || now->switches != seen.switches) {
      seen.switches = now ? now->switches : 0;
      seen.since = Clock::now();
      return false;
    }
    return Clock::now() - seen.since >= kAsleep;
  }

  static void note_wait(const Waiting& waiting, Seen& seen) {
    if (seen.instruction != waiting.instruction || seen.stack != waiting.stack) {
      seen.instruction = waiting.instruction;
      seen.stack = waiting.stack;
      seen.waits = 0;
      seen.first_wait = Clock::now();
    }
    ++seen.waits;
  }

  // Does it make the same call again and again, such as a sleep of a millisecond?
  static bool rests(const Seen& seen) {
    return seen.waits >= kRestTries && Clock::now() - seen.first_wait >= kRest;
  }

  // In use are also slots of threads that were not looked at yet. What the target has forged may
  // lie across another lot, whose slots would be given away twice.
  void find_free_places() {
    std::uint64_t end = 0;
    for (const Lot& lot : places_.lots) {
      if (lot.start < end) continue;
      end = lot.slot(lot.capacity);
      const auto words = first_words(space_, lot);
      for (std::uint64_t i = 0; i < words.size(); ++i)
        if (words[i] != SavedThread::kMark) free_.emplace_back(lot, i);
    }
  }

  Result<std::pair<Lot, std::uint64_t>> free_place(const StoppedThreads& stopped) {
    if (free_.empty()) {
      STASIS_TRY_ASSIGN(auto lot,
                        make_lot(space_, stopped, places_, proc::ProcFs().threads(pid_).size()));
      places_.lots.push_back(lot);
      for (std::uint64_t i = 0; i < lot.capacity; ++i)
        free_.emplace_back(lot, i);
    }
    const auto place = free_.front();
    free_.pop_front();
    return place;
  }

  const AddressSpace& space_;
  Pid pid_;
  const std::vector<Tid>& spared_;
  ParkingPlaces places_;
  std::deque<std::pair<Lot, std::uint64_t>> free_;
  std::vector<Tid> together_;  // to be stopped in one go
  proc::CodeMap code_;
  Clock::time_point start_;
  std::map<Tid, Seen> seen_;
  int parked_ = 0;  // in this round
  bool take_resting_ = false;
  std::mt19937 random_{std::random_device{}()};
  std::uniform_int_distribution<int> jitter_{0, kLongestRunNs};
};

}  // namespace

Result<void> park_more_threads(Pid pid, const std::vector<Tid>& spared) {
  STASIS_TRY_ASSIGN(auto space, AddressSpace::open(pid));
  return trace_on_own_thread([&] { return Parker(space, spared).run(); });
}

Result<void> park_threads(Pid pid, const std::vector<Tid>& spared) {
  auto done = park_more_threads(pid, spared);
  // Now that ptrace holds no thread of the process any more.
  if (!done) (void)unpark_threads(pid);
  return done;
}

Result<void> unpark_threads(Pid pid) {
  auto space = AddressSpace::open(pid);
  // One that has ended has no thread to be let go.
  if (!space && space.error().code == ErrorCode::kProcessGone) return {};
  if (!space) return fail(std::move(space.error()));
  return trace_on_own_thread([&] { return unpark_all(*space); });
}

bool all_are_parked(const AddressSpace& space, const std::vector<Tid>& spared) {
  // One that was parked just now comes to wait when it gets a processor.
  constexpr std::chrono::seconds kComesToWait{1};
  constexpr std::chrono::milliseconds kPause{1};
  const auto places = probe(space);
  if (!places || !any_slot_in_use(space, places->lots)) return false;
  const auto deadline = Clock::now() + kComesToWait;
  const auto threads = proc::ProcFs().threads(space.pid());
  return std::all_of(threads.begin(), threads.end(), [&](Tid thread) {
    if (std::find(spared.begin(), spared.end(), thread) != spared.end()) return true;
    Waiting waiting = waiting_of(space.pid(), thread);
    while (waiting.running && Clock::now() < deadline) {
      std::this_thread::sleep_for(kPause);
      waiting = waiting_of(space.pid(), thread);
    }
    return is_parked(space, waiting);
  });
}

namespace {

tl::unexpected<Error> nothing_parked(Pid pid) {
  return fail(ErrorCode::kBusy, fmt::format("no thread of process {} is parked", pid.value),
              "try again");
}

Result<void> mark_lots(const AddressSpace& space, std::uint64_t mark) {
  STASIS_TRY_ASSIGN(auto places, probe(space));
  if (places.lots.empty() && mark != 0) return nothing_parked(space.pid());
  for (const Lot& lot : places.lots)
    STASIS_TRY(space.write(lot.start + kMarkOffset, &mark, sizeof mark));
  return {};
}

}  // namespace

Result<AddressRange> mark_host_memory_saved(const AddressSpace& space) {
  STASIS_TRY_ASSIGN(auto places, probe(space));
  if (places.lots.empty()) return nothing_parked(space.pid());
  const auto lot = std::find_if(places.lots.begin(), places.lots.end(),
                                [](const Lot& one) { return one.has_original; });
  if (lot == places.lots.end()) {
    return fail(refusal({"parking", Severity::kRed, space.pid(),
                         fmt::format("an earlier stasis has parked the threads of process {}",
                                     space.pid().value)}));
  }
  // In this order: a process that says the one without the other would never run again.
  STASIS_TRY(space.write(lot->original().start, &kOriginalMark, sizeof kOriginalMark));
  STASIS_TRY(space.write(lot->start + kMarkOffset, &kSavedMark, sizeof kSavedMark));
  return lot->original();
}

Result<void> mark_host_memory_there(const AddressSpace& space) { return mark_lots(space, 0); }

Result<void> mark_memory_in_work(const AddressSpace& space, bool in_work) {
  return mark_lots(space, in_work ? kInWorkMark : 0);
}

Result<bool> is_memory_in_work(const AddressSpace& space) {
  STASIS_TRY_ASSIGN(auto places, probe(space));
  return std::any_of(places.lots.begin(), places.lots.end(),
                     [](const Lot& lot) { return lot.is_in_work(); });
}

Result<void> check_host_memory_is_there(Pid pid) {
  STASIS_TRY_ASSIGN(auto space, AddressSpace::open(pid));
  STASIS_TRY_ASSIGN(auto places, probe(space));
  return check_is_there(space, places);
}

Result<void> finish_remote_call(Pid pid) {
  auto space = AddressSpace::open(pid);
  // One that has ended has no thread to be let go.
  if (!space && space.error().code == ErrorCode::kProcessGone) return {};
  if (!space) return fail(std::move(space.error()));
  return trace_on_own_thread([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(auto places, probe(*space));
    return places.calls.begun ? finish_remote_call_of(*space, *places.calls.begun) : Result<void>();
  });
}

Result<void> call_from_parked_thread(const AddressSpace& space,
                                     const std::function<Result<void>(const SystemCall&)>& act) {
  const Pid pid = space.pid();
  auto done = trace_on_own_thread([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(auto places, probe(space));
    for (const Tid thread : proc::ProcFs().threads(pid)) {
      if (!is_parked(space, waiting_of(pid, thread))) continue;
      STASIS_TRY_ASSIGN(auto stopped, StoppedThreads::stop(space, thread));
      if (stopped.threads().empty()) continue;  // killed
      return make_system_calls(space, stopped, places.calls, act);
    }
    return fail(ErrorCode::kBusy, fmt::format("no thread of process {} is parked", pid.value),
                "try again");
  });
  if (!done) (void)finish_remote_call(pid);
  return done;
}

Result<void> call_from_thread(
    const AddressSpace& space, Tid thread, std::span<const std::uint64_t> data,
    const std::function<Result<void>(const SystemCall&, std::uint64_t data_address)>& act) {
  auto done = trace_on_own_thread([&]() -> Result<void> {
    STASIS_TRY_ASSIGN(auto places, probe(space));
    STASIS_TRY_ASSIGN(auto stopped, StoppedThreads::stop(space, thread));
    if (stopped.threads().empty())
      return fail(ErrorCode::kProcessGone, fmt::format("thread {} has ended", thread.value), {});
    return make_system_calls(
        space, stopped, places.calls,
        [&](const SystemCall& call) { return act(call, remote_call_data(places.calls)); }, data);
  });
  if (!done) (void)finish_remote_call(space.pid());
  return done;
}

Result<void> call_from_each(const AddressSpace& space, const StoppedThreads& stopped,
                            std::span<const Tid> threads,
                            const std::function<Result<void>(Tid thread, const SystemCall&)>& act) {
  STASIS_TRY_ASSIGN(const auto places, probe(space));
  for (const Tid thread : threads)
    STASIS_TRY(make_system_calls(space, stopped, thread, places.calls,
                                 [&](const SystemCall& call) { return act(thread, call); }));
  return {};
}

Result<void> call_from_thread(
    Pid pid, Tid thread, std::span<const std::uint64_t> data,
    const std::function<Result<void>(const SystemCall&, std::uint64_t data_address)>& act) {
  STASIS_TRY_ASSIGN(auto space, AddressSpace::open(pid));
  return call_from_thread(space, thread, data, act);
}

}  // namespace stasis
