#include "attach/inside_call.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "attach/inside_lot.h"
#include "attach/seccomp_filter.h"
#include "attach/suitable.h"
#include "base/fault_point.h"
#include "base/printable.h"
#include "base/units.h"
#include "proc/descriptors.h"
#include "proc/parking.h"
#include "proc/remote_syscall.h"
#include "proc/stopped_threads.h"

namespace stasis::attach {

using proc::AddressSpace;
using proc::StoppedThreads;

namespace {

constexpr std::uint64_t kMoreLibraries = 512;  // that may be loaded while the thread lives
// Of the process's threads, as many are tried.
constexpr std::size_t kMostTried = 64;
constexpr std::chrono::milliseconds kGoingAway{500};
constexpr std::chrono::microseconds kFirstPause{50};
constexpr std::chrono::microseconds kLongestPause{2000};
constexpr std::size_t kLargestPiece = std::size_t{1} << 20;
constexpr std::uint64_t kCloneFlags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND |
                                      CLONE_THREAD | CLONE_SYSVSEM | CLONE_SETTLS |
                                      CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;

Error refused(Pid pid, std::string_view what, std::int64_t result) {
  return Error{ErrorCode::kNotSupported,
               fmt::format("process {} may not {}: {}", pid.value, what,
                           std::generic_category().message(static_cast<int>(-result))),
               "see its limits (`prlimit --pid`, pids.max of its cgroup), and whether SELinux "
               "(execmem) or PR_SET_MDWE forbids it"};
}

// Threads that can be stopped at once: one that waits for a disk, or for a child in vfork(2), is
// left alone, and so is what is stopped. The first thread comes first.
std::vector<Tid> threads_to_try(Pid pid) {
  const proc::ProcFs procfs;
  std::vector<Tid> out;
  for (const Tid thread : procfs.threads(pid)) {
    const auto info = procfs.thread(pid, thread);
    if (!info || info->has_ended() || info->state == 'D' || info->state == 'T') continue;
    if (out.size() < kMostTried) out.push_back(thread);
  }
  std::stable_partition(out.begin(), out.end(),
                        [&](Tid thread) { return thread.value == pid.value; });
  return out;
}

// Only one thread is stopped: another one may unload a library meanwhile, and where its code was,
// there is no memory then, or another library's.
Result<RemoteCallRoom> find_room(const AddressSpace& space, const CLibrary& library,
                                 const std::vector<proc::Mapping>& mappings) {
  for (int tries = 0; tries < 2; ++tries) {
    RemoteCallRoom room;
    RemoteCallRoom elsewhere;
    for (const proc::Mapping& mapping : mappings)
      (library.keeps(mapping) ? room : elsewhere).probe(space, mapping);
    if (!room.begun && !elsewhere.begun) return room;
    // Left by a tool that was killed, or there by one that is just at work; then its thread is
    // traced, and this says so.
    STASIS_TRY(finish_remote_call(space.pid()));
  }
  return fail(ErrorCode::kBusy,
              fmt::format("another tool is at work in process {}", space.pid().value), "try again");
}

}  // namespace

// One call, from its beginning to its end.
class InsideCall {
 public:
  InsideCall(const Inside& inside, const InsideWork& work)
      : inside_(inside), work_(work), memory_(reader_of(inside.space_)), pid_(inside.id_.pid) {}

  Result<InsideAnswer> run(std::chrono::milliseconds timeout) {
    const auto& library = inside_.library_;
    found_ = find_lot(inside_.space_, inside_.mappings_, library, inside_.id_.start_ticks);
    auto begun = on_a_thread([this](const StoppedThreads& stopped, const RemoteCallRoom& room) {
      return begin(stopped, room);
    });
    if (!is_begun_) {
      return fail(give_up(begun ? Error{ErrorCode::kInternal, "no thread was made"}
                                : std::move(begun.error())));
    }
    auto fine = fault(FaultPoint::kInsideBegun);
    auto answer = wait(Clock::now() + timeout);
    if (!answer) return answer;
    if (fine) fine = fault(FaultPoint::kInsideDone);
    read_answers(*answer);
    clean_up(*answer);
    if (fine) fine = fault(FaultPoint::kInsideAfter);
    if (!fine) return fail(std::move(fine.error()));
    return answer;
  }

 private:
  using Act = std::function<Result<void>(const StoppedThreads&, const RemoteCallRoom&)>;

  // With one thread of the program stopped.
  Result<void> on_a_thread(const Act& act) {
    STASIS_TRY_ASSIGN(const auto mappings, proc::ProcFs().mappings(pid_));
    STASIS_TRY_ASSIGN(const auto room, find_room(inside_.space_, inside_.library_, mappings));
    Result<void> last =
        fail(ErrorCode::kBusy,
             fmt::format("no thread of process {} can be stopped now", pid_.value), "try again");
    for (const Tid thread : threads_to_try(pid_)) {
      bool acted = false;
      auto done = trace_on_own_thread([&]() -> Result<void> {
        STASIS_TRY_ASSIGN(auto stopped, StoppedThreads::stop(inside_.space_, thread));
        if (stopped.threads().empty())
          return fail(ErrorCode::kProcessGone, fmt::format("thread {} has ended", thread.value));
        STASIS_TRY_ASSIGN(const auto registers, stopped.registers(thread));
        STASIS_TRY_ASSIGN(
            real_, inside_.library_.check(memory_, registers.fs_base, inner_number(pid_, thread)));
        STASIS_TRY(check_filters(pid_, thread, calls_made()));
        acted = true;
        return act(stopped, room);
      });
      if (done || acted) {
        if (!done) (void)finish_remote_call(pid_);
        return done;
      }
      last = std::move(done);
    }
    STASIS_TRY(inside_.space_.check_current());
    STASIS_TRY(check_runs(pid_));
    return last;
  }

  CallsInside calls_made() const {
    const bool has_library = work_.job == InsideJob::kLoad || work_.job == InsideJob::kCall;
    return has_library ? CallsInside::kOfLibrary : CallsInside::kOfThreads;
  }

  Result<void> begin(const StoppedThreads& stopped, const RemoteCallRoom& room) {
    const Tid thread = stopped.threads().front();
    if (real_.rseq_processor >> 31 != 0 && inside_.library_.malloc_is_replaced()) {
      return fail(ErrorCode::kNotSupported,
                  fmt::format("process {} has a malloc() of its own, which may use restartable "
                              "sequences that its C library does not know of",
                              pid_.value));
    }
    return make_system_calls(
        inside_.space_, stopped, room, [&](const SystemCall& call) -> Result<void> {
          STASIS_TRY(fault(FaultPoint::kInsideStep));
          if (found_) {
            lot_ = *found_;
          } else {
            STASIS_TRY(map(call));
          }
          STASIS_TRY(take_lot(inside_.space_, lot_));
          if (lot_.is_new) {
            STASIS_TRY(
                stopped.write(thread, lot_.code, inside_code_words(lot_, inside_.id_.start_ticks)));
            thread_ = make_thread(inside_.library_, real_, lot_);
            STASIS_TRY(inside_.space_.write(lot_.data + lot_.layout.storage, thread_.data(),
                                            thread_.size()));
          }
          STASIS_TRY(write_block(way_back(room)));
          if (work_.job == InsideJob::kLoad) STASIS_TRY(copy_library(call));
          STASIS_TRY(fault(FaultPoint::kInsideMapped));
          const std::uint64_t self = lot_.data + lot_.layout.thread;
          const std::array<std::uint64_t, 6> arguments{kCloneFlags,
                                                       lot_.data + lot_.layout.stack_end,
                                                       self + inside_.library_.tid_offset(),
                                                       lot_.data + offsetof(InsideBlock, first_tid),
                                                       self,
                                                       lot_.data};
          STASIS_TRY_ASSIGN(const auto made, stopped.system_call(thread, lot_.clone_instruction(),
                                                                 SYS_clone, arguments));
          if (made < 0) return fail(refused(pid_, "make a thread", made));
          is_begun_ = true;
          return {};
        });
  }

  Result<void> map(const SystemCall& call) {
    const auto make = [&](std::uint64_t size, std::uint64_t protection) -> Result<std::uint64_t> {
      const std::array<std::uint64_t, 6> arguments{
          0, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, ~std::uint64_t{0}, 0};
      STASIS_TRY_ASSIGN(const auto at, call(SYS_mmap, arguments));
      if (at < 0) return fail(refused(pid_, "map memory for a thread of the tool", at));
      return static_cast<std::uint64_t>(at);
    };
    lot_.layout = InsideLayout::of(inside_.library_, real_.capacity + kMoreLibraries);
    // The tool writes the code as a tracer, so that it is writable for no instant.
    STASIS_TRY_ASSIGN(lot_.code, make(kInsideCodeSize, PROT_READ | PROT_EXEC));
    STASIS_TRY_ASSIGN(lot_.data, make(lot_.layout.size, PROT_READ | PROT_WRITE));
    const std::array<std::uint64_t, 3> guard{lot_.data + lot_.layout.stack - kPage, kPage,
                                             PROT_NONE};
    STASIS_TRY_ASSIGN(const auto guarded, call(SYS_mprotect, guard));
    return guarded < 0 ? Result<void>(fail(refused(pid_, "protect memory", guarded)))
                       : Result<void>();
  }

  // Into memory of the target's, by a descriptor that only the tool and it know of.
  Result<void> copy_library(const SystemCall& call) {
    const std::uint64_t name = lot_.data + offsetof(InsideBlock, path);
    STASIS_TRY(write_text(name, work_.library_name, sizeof(InsideBlock::path)));
    STASIS_TRY(write_text(lot_.data + offsetof(InsideBlock, name), work_.function,
                          sizeof(InsideBlock::name)));
    const std::array<std::uint64_t, 2> arguments{name, MFD_CLOEXEC};
    STASIS_TRY_ASSIGN(const auto descriptor, call(SYS_memfd_create, arguments));
    if (descriptor < 0) return fail(refused(pid_, "make a file in memory", descriptor));
    const auto number = static_cast<std::int32_t>(descriptor);
    STASIS_TRY(inside_.space_.write(lot_.data + offsetof(InsideBlock, descriptor), &number,
                                    sizeof number));
    auto done = fill(number);
    const std::array<std::uint64_t, 1> same{static_cast<std::uint64_t>(number)};
    if (!done) (void)call(SYS_close, same);
    return done;
  }

  // The target may have put another file in its place: one that it may not write is not written.
  Result<void> fill(int number) const {
    STASIS_TRY_ASSIGN(const auto process, Pidfd::open(pid_));
    STASIS_TRY_ASSIGN(const auto file,
                      proc::take_descriptor(pid_, process, number, &is_memory_file));
    STASIS_TRY(inside_.space_.check_current());
    struct stat info {};
    if (::fstat(file.get(), &info) != 0 || !is_memory_file(info) || info.st_size != 0) {
      return fail(ErrorCode::kNotSupported,
                  fmt::format("process {} has exchanged the file that it has made for the tool",
                              pid_.value),
                  "do not trust that program");
    }
    std::vector<char> piece(kLargestPiece);
    for (off_t at = 0;;) {
      const ssize_t got = ::pread(work_.library->get(), piece.data(), piece.size(), at);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return fail(errno_error("cannot read a library", errno));
      if (got == 0) return {};
      STASIS_TRY(
          write_all(file.get(), piece.data(), static_cast<std::size_t>(got), work_.library_name));
      at += got;
    }
  }

  // With the zero at its end; cut if it is too long for that.
  Result<void> write_text(std::uint64_t at, const std::string& text, std::size_t room) const {
    const std::string fits = text.substr(0, room - 1);
    return inside_.space_.write(at, fits.c_str(), fits.size() + 1);
  }

  Result<void> write_block(std::uint64_t way_back) {
    const CLibrary& library = inside_.library_;
    InsideBlock block{};
    block.first_tid = 1;  // the kernel's to clear
    block.way_back = way_back;
    block.pthread_create = library.pthread_create();
    block.attr_init = library.attr_init();
    block.attr_set_detached = library.attr_set_detached();
    if (library.rseq_offset() && real_.rseq_processor >> 31 == 0) {
      block.rseq_area =
          lot_.data + lot_.layout.thread + static_cast<std::uint64_t>(*library.rseq_offset());
      block.rseq_size = kRseqSize;
      block.rseq_signature = kRseqSignature;
    }
    block.job = static_cast<std::uint32_t>(work_.job);
    block.get_attributes = work_.get_attributes;
    block.get_handle = work_.get_handle;
    block.ranges = lot_.data + lot_.layout.input;
    block.range_count = std::min(work_.ranges.size(), kMostRanges);
    block.step = std::max<std::uint64_t>(work_.step, kPage);
    block.answers = lot_.data + lot_.layout.answers;
    block.answer_room = kMostAnswers;
    block.dlopen = library.dlopen();
    block.dlsym = library.dlsym();
    block.dlerror = library.dlerror();
    block.argument = work_.argument;
    block.function = work_.address;
    const std::uint32_t none = 0;
    STASIS_TRY(inside_.space_.write(lot_.data + lot_.layout.thread + library.tid_offset(), &none,
                                    sizeof none));
    STASIS_TRY(inside_.space_.write(block.ranges, work_.ranges.data(),
                                    block.range_count * sizeof work_.ranges[0]));
    return inside_.space_.write(lot_.data, &block, sizeof block);
  }

  // Until both threads of ours have ended.
  Result<InsideAnswer> wait(Clock::time_point deadline) {
    InsideAnswer answer;
    bool cancelled = false;
    for (auto pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
      std::this_thread::sleep_for(pause);
      STASIS_TRY(inside_.space_.read(lot_.data, &answer.block, sizeof answer.block));
      if (is_over(answer.block)) break;
      // SIGSTOP stops the tool's threads with the program's own.
      auto runs = pause < kLongestPause ? Result<void>() : check_runs(pid_);
      if (runs && Clock::now() < deadline) continue;
      if (!std::exchange(cancelled, true)) {
        const std::uint32_t yes = 1;
        STASIS_TRY(
            inside_.space_.write(lot_.data + offsetof(InsideBlock, cancel), &yes, sizeof yes));
        deadline = Clock::now() + kGoingAway;
        if (runs) continue;
      }
      if (runs) return fail(still_inside());
      return fail(std::move(runs.error()));
    }
    const auto first = static_cast<InsideState>(answer.block.first_state);
    if (first == InsideState::kDone &&
        static_cast<InsideState>(answer.block.state) == InsideState::kDone)
      return answer;
    clean_up(answer);
    if (first == InsideState::kFailed)
      return fail(refused(pid_, "have its C library make a thread", -answer.block.create_error));
    return fail(ErrorCode::kTimeout,
                fmt::format("process {} was not looked through in time", pid_.value), "try again");
  }

  bool is_over(const InsideBlock& block) const {
    if (block.first_tid != 0) return false;
    const auto first = static_cast<InsideState>(block.first_state);
    return first == InsideState::kFailed || first == InsideState::kCancelled ||
           (first == InsideState::kDone && has_ended(memory_, inside_.library_, block));
  }

  Error still_inside() const {
    return Error{ErrorCode::kTimeout,
                 fmt::format("a thread of the tool in process {} has not come back in time; it is "
                             "left there, with {} of memory, and ends by itself",
                             pid_.value, format_bytes(lot_.layout.size + kInsideCodeSize)),
                 "see what holds the process up: a lock of its malloc(), its loader or the driver"};
  }

  void read_answers(InsideAnswer& answer) const {
    const auto count = std::min<std::uint64_t>(answer.block.answer_count, kMostAnswers);
    answer.answers.resize(count);
    if (!inside_.space_.read(lot_.data + lot_.layout.answers, answer.answers.data(),
                             count * sizeof(SurveyAnswer)))
      answer.answers.clear();
    // Whatever it says of their number, these are all that there are.
    if (answer.answers.size() != answer.block.answer_count) answer.block.overflow = 1;
  }

  // The library has noted nothing in the descriptor, so that it misses nothing when it has gone.
  bool is_untouched() const {
    if (!lot_.is_new) return false;
    std::vector<std::byte> now(thread_.size());
    if (!inside_.space_.read(lot_.data + lot_.layout.storage, now.data(), now.size())) return false;
    auto before = thread_;
    const auto ignore = [&](std::uint64_t offset, std::uint64_t size) {
      const auto at = static_cast<std::ptrdiff_t>(offset);
      std::fill_n(now.begin() + at, size, std::byte{0});
      std::fill_n(before.begin() + at, size, std::byte{0});
    };
    const std::uint64_t self = lot_.layout.thread - lot_.layout.storage;
    ignore(self + inside_.library_.tid_offset(), sizeof(std::uint32_t));
    if (const auto offset = inside_.library_.rseq_offset())
      ignore(self + static_cast<std::uint64_t>(*offset), kRseqSize);
    return now == before;
  }

  // No thread of ours is inside. What cannot be unmapped now is there for the next call.
  void clean_up(InsideAnswer& answer) {
    const bool unmapped = is_untouched() && on_a_thread([this](const StoppedThreads& stopped,
                                                               const RemoteCallRoom& room) {
                                              return unmap(stopped, room);
                                            }).has_value();
    if (unmapped) return;
    answer.kept_bytes = lot_.layout.size + kInsideCodeSize;
    (void)release_lot(inside_.space_, lot_);
  }

  Result<void> unmap(const StoppedThreads& stopped, const RemoteCallRoom& room) {
    return make_system_calls(
        inside_.space_, stopped, room, [&](const SystemCall& call) -> Result<void> {
          // The code has the mark by which a lot is found: it goes first.
          STASIS_TRY(call(SYS_munmap, std::array<std::uint64_t, 2>{lot_.code, kInsideCodeSize}));
          STASIS_TRY(call(SYS_munmap, std::array<std::uint64_t, 2>{lot_.data, lot_.layout.size}));
          return {};
        });
  }

  // No thread was made.
  Error give_up(Error why) {
    if (found_ && lot_.data != 0) {
      (void)release_lot(inside_.space_, lot_);
    } else if (lot_.code != 0) {
      (void)on_a_thread([this](const StoppedThreads& stopped, const RemoteCallRoom& room) {
        return unmap(stopped, room);
      });
    }
    return why;
  }

  const Inside& inside_;
  const InsideWork& work_;
  MemoryReader memory_;
  Pid pid_;
  CLibrary::RealThread real_;
  std::optional<InsideLot> found_;
  InsideLot lot_;
  std::vector<std::byte> thread_;  // as it was made
  bool is_begun_ = false;
};

Result<Inside> Inside::open(Pid pid) {
  const proc::ProcFs procfs;
  STASIS_TRY_ASSIGN(const auto info, procfs.process(pid));
  // Bound before it is looked at: a program that executes another one meanwhile, with more rights,
  // is not taken for what it was.
  auto bound = AddressSpace::open(pid);
  STASIS_TRY(check_process(pid, info));
  if (!bound) return fail(std::move(bound.error()));
  AddressSpace space = std::move(*bound);
  STASIS_TRY(fault(FaultPoint::kInsideChecked));
  const auto within = [&](Error why) {
    why.message =
        fmt::format("the tool makes no calls inside process {}: {}", pid.value, why.message);
    return fail(std::move(why));
  };
  // First of all: a program that is just starting has one, and a library that says as little of its
  // locks as one with several, and not yet where things lie.
  if (procfs.threads(pid).size() < 2) {
    return within(
        Error{ErrorCode::kNotSupported, "it has one thread, which its C library relies on"});
  }
  STASIS_TRY_ASSIGN(auto mappings, procfs.mappings(pid));
  STASIS_TRY(space.check_current());
  if (auto fits = check_mappings(mappings); !fits) return within(std::move(fits.error()));
  auto library = CLibrary::read(space, mappings);
  if (!library) return within(std::move(library.error()));
  // All of this is of the process that was looked at first.
  STASIS_TRY_ASSIGN(const auto now, procfs.process(pid));
  STASIS_TRY(space.check_current());
  if (now.id() != info.id())
    return fail(ErrorCode::kProcessGone, fmt::format("process {} has ended", pid.value));
  return Inside(std::move(space), info.id(), std::move(mappings), std::move(*library));
}

Result<int> load_inside(const Inside& inside, const UniqueFd& file, const std::string& name,
                        const std::string& function, std::uint64_t argument,
                        std::chrono::milliseconds timeout) {
  InsideWork work{InsideJob::kLoad};
  work.library = &file;
  work.library_name = name;
  work.function = function;
  work.argument = argument;
  STASIS_TRY_ASSIGN(const auto answer, call_inside(inside, work, timeout));
  if (answer.block.function != 0) return answer.block.result;
  const char* text = answer.block.error;
  const std::string words(text, ::strnlen(text, sizeof answer.block.error));
  // The library is open in the process, so only the way to its descriptor can be missing.
  if (words.starts_with("/proc/") && words.find("No such file") != std::string::npos) {
    return fail(ErrorCode::kNotSupported,
                fmt::format("process {} cannot load {}, as its root directory has no /proc of its "
                            "PID namespace (chroot): {}",
                            inside.space().pid().value, name, printable(words)),
                "mount one there (`mount -t proc proc ROOT/proc`, in its mount namespace), or "
                "start it with `stasis run`");
  }
  return fail(ErrorCode::kNotSupported,
              fmt::format("process {} cannot load {}: {}", inside.space().pid().value, name,
                          printable(words)));
}

Result<int> call_function_inside(const Inside& inside, std::uint64_t address,
                                 std::uint64_t argument, std::chrono::milliseconds timeout) {
  InsideWork work{InsideJob::kCall};
  work.address = address;
  work.argument = argument;
  STASIS_TRY_ASSIGN(const auto answer, call_inside(inside, work, timeout));
  return answer.block.result;
}

Result<InsideAnswer> call_inside(const Inside& inside, const InsideWork& work,
                                 std::chrono::milliseconds timeout) {
  return InsideCall(inside, work).run(timeout);
}

}  // namespace stasis::attach
