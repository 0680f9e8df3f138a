#include "base/fault_point.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis {
namespace {

using enum FaultPoint;

constexpr std::array kPoints = {
    FaultPointInfo{kJournalBegin, "journal.begin", true, "before anything is in the journal"},
    FaultPointInfo{kJournalLocked, "journal.locked", true, "the lock is ours, no record yet"},
    FaultPointInfo{kJournalWrite, "journal.write", true, "the new record's file is there, empty"},
    FaultPointInfo{kJournalWritten, "journal.written", true, "the record stands"},
    FaultPointInfo{kJournalFinish, "journal.finish", false, "before the record is removed"},
    FaultPointInfo{kJournalRemoved, "journal.removed", false, "removed, the lock file is not"},
    FaultPointInfo{kJournalFinished, "journal.finished", false, "nothing is in the journal"},
    FaultPointInfo{kGroupOpened, "group.opened", true, "all is entered, nothing is done"},
    FaultPointInfo{kDirectPrepared, "direct.prepared", true, "buffers and the mover are ready"},
    FaultPointInfo{kDirectClosed, "direct.closed", true, "all gates are closed"},
    FaultPointInfo{kDirectCopied, "direct.copied", true, "device memory is copied out"},
    FaultPointInfo{kDirectContent, "direct.content", true, "its content is whole in the image"},
    FaultPointInfo{kDirectKept, "direct.kept", true, "agents keep device memory"},
    FaultPointInfo{kDirectEmptied, "direct.emptied", true, "device memory is given back"},
    FaultPointInfo{kDirectHeld, "direct.held", true, "no agent looks after its peer any more"},
    FaultPointInfo{kDirectDropped, "direct.dropped", true, "what agents kept is let go"},
    FaultPointInfo{kDirectRefill, "direct.refill", true, "before device memory is taken again"},
    FaultPointInfo{kDirectRefilled, "direct.refilled", false, "device memory is there, empty"},
    FaultPointInfo{kDirectFilled, "direct.filled", false, "its content is back"},
    FaultPointInfo{kDirectOpened, "direct.opened", false, "the gates are open"},
    FaultPointInfo{kLockBefore, "lock.before", true, "before the driver's lock"},
    FaultPointInfo{kLockAfter, "lock.after", true, "locked"},
    FaultPointInfo{kParkBefore, "park.before", true, "before a thread is kept still"},
    FaultPointInfo{kParkStep, "park.step", true, "a thread is about to make our mapping"},
    FaultPointInfo{kParkMapped, "park.mapped", true, "the mapping is there, and not yet marked"},
    FaultPointInfo{kParkThread, "park.thread", true, "a thread is parked"},
    FaultPointInfo{kParkAfter, "park.after", true, "all threads are parked"},
    FaultPointInfo{kCheckpointBefore, "checkpoint.before", true, "before the driver's checkpoint"},
    FaultPointInfo{kCheckpointAfter, "checkpoint.after", true, "checkpointed"},
    FaultPointInfo{kZerosDropped, "zeros.dropped", false,
                   "some of the zeros that it saved are dropped, by a thread that is not back yet"},
    FaultPointInfo{kRestoreBefore, "restore.before", true, "before the driver's restore"},
    FaultPointInfo{kRestoreAfter, "restore.after", true, "restored, and locked"},
    FaultPointInfo{kUnlockBefore, "unlock.before", true, "before the driver's unlock"},
    FaultPointInfo{kUnlockAfter, "unlock.after", true, "unlocked, its threads still parked"},
    FaultPointInfo{kUnparkThread, "unpark.thread", true, "a thread goes on"},
    FaultPointInfo{kUnparkAfter, "unpark.after", true, "all threads go on"},
    FaultPointInfo{kReplaceBefore, "replace.before", true,
                   "before a process's inherited device files are replaced"},
    FaultPointInfo{kReplaceStep, "replace.step", true, "one of its threads is about to do it"},
    FaultPointInfo{kReplaceClosed, "replace.closed", true, "the first of the files is closed"},
    FaultPointInfo{kReplaceFile, "replace.file", true, "one of the files is replaced"},
    FaultPointInfo{kReplaceMapped, "replace.mapped", true, "the first of the mappings is replaced"},
    FaultPointInfo{kReplaceAfter, "replace.after", true, "they are replaced"},
    FaultPointInfo{kRememberWrite, "remember.write", true, "before its GPU memory is noted"},
    FaultPointInfo{kRememberWritten, "remember.written", false, "its GPU memory is noted"},
    FaultPointInfo{kForget, "forget", false, "before the note of its GPU memory is removed"},
    FaultPointInfo{kImageCreate, "image.create", true, "before the image's directory is made"},
    FaultPointInfo{kImageCreated, "image.created", true, "the directory is there, empty"},
    FaultPointInfo{kCriuStart, "criu.start", true, "before criu is started"},
    FaultPointInfo{kCriuStarted, "criu.started", true, "criu waits for its request"},
    FaultPointInfo{kCriuRequested, "criu.requested", true, "criu has its request"},
    FaultPointInfo{kCriuPreDump, "criu.pre-dump", true, "criu is about to freeze the tree"},
    FaultPointInfo{kCriuPostDump, "criu.post-dump", true, "criu has written all it has to"},
    FaultPointInfo{kContentCreate, "content.create", true, "before the folder for GPU content"},
    FaultPointInfo{kContentLink, "content.link", true,
                   "before the base's data files are linked to"},
    FaultPointInfo{kContentLinked, "content.linked", true, "they are, under names of the time"},
    FaultPointInfo{kContentTake, "content.take", true, "before chunks are taken by their digests"},
    FaultPointInfo{kContentWrite, "content.write", true, "before GPU content is written"},
    FaultPointInfo{kContentWritten, "content.written", true, "all GPU content is written"},
    FaultPointInfo{kContentNamed, "content.named", true, "what is used of them has its names"},
    FaultPointInfo{kContentSynced, "content.synced", true, "GPU content is on the disk"},
    FaultPointInfo{kContentIndex, "content.index", true, "the file of its index is there, empty"},
    FaultPointInfo{kContentIndexWritten, "content.index-written", true, "its index stands"},
    FaultPointInfo{kImageCollected, "image.collected", true, "the files are listed"},
    FaultPointInfo{kImageChecksummed, "image.checksummed", true, "the files are checksummed"},
    FaultPointInfo{kImageSynced, "image.synced", true, "the files are on the disk"},
    FaultPointInfo{kImageManifest, "image.manifest", true, "the manifest's file is there, empty"},
    FaultPointInfo{kImageManifestWritten, "image.manifest-written", true, "the manifest stands"},
    FaultPointInfo{kImageName, "image.name", true, "before the image gets its name"},
    FaultPointInfo{kImageNamed, "image.named", true, "the image has its name"},
    FaultPointInfo{kDumpComplete, "dump.complete", true, "the image is complete and durable"},
    FaultPointInfo{kDumpEnding, "dump.ending", true, "the journal says so; criu has no answer yet"},
    FaultPointInfo{kCriuEnded, "criu.ended", false, "criu has ended"},
    FaultPointInfo{kDumpFinish, "dump.finish", false, "criu has ended the tree, or let it go"},
    FaultPointInfo{kImageCommit, "image.commit", false, "before the old image is removed"},
    FaultPointInfo{kImageCommitted, "image.committed", false, "the old image is removed"},
    FaultPointInfo{kRestoreVerified, "restore.verified", true, "the image is sound and fits here"},
    FaultPointInfo{kRestoreLog, "restore.log", true, "criu's directory is there"},
    FaultPointInfo{kCriuPreRestore, "criu.pre-restore", true, "criu is about to make the tree"},
    FaultPointInfo{kCriuPostRestore, "criu.post-restore", true,
                   "the tree is made, and stands still"},
    FaultPointInfo{kRestoreHeld, "restore.held", true, "its processes are in the journal"},
    FaultPointInfo{kCriuPreResume, "criu.pre-resume", true, "criu is about to let the tree go"},
    FaultPointInfo{kCriuPostResume, "criu.post-resume", true, "criu has let the tree go"},
    FaultPointInfo{kRestoreAdopted, "restore.adopted", true, "the tree is ours, its GPU not back"},
    FaultPointInfo{kRestoreBack, "restore.back", true, "its GPU is back"},
    FaultPointInfo{kRestoreKept, "restore.kept", false, "it is handed over"},
    FaultPointInfo{kSuspendVerified, "suspend.verified", true, "all are seen to be checkpointed"},
    FaultPointInfo{kResumePlanned, "resume.planned", true, "it is known that they fit"},
    FaultPointInfo{kResumeVerified, "resume.verified", false, "all are seen to run"},
    FaultPointInfo{kSwapRecorded, "swap.recorded", true, "the record of the swap is written"},
    FaultPointInfo{kSwapBegun, "swap.begun", false, "its parts have begun"},
    FaultPointInfo{kSwapDone, "swap.done", false, "both parts are done"},
    FaultPointInfo{kSwapUndone, "swap.undone", false, "a killed swap is decided, its record there"},
    FaultPointInfo{kRecoverAdopted, "recover.adopted", true, "the record is ours"},
    FaultPointInfo{kRecoverAlone, "recover.alone", true, "nobody of the killed operation is left"},
    FaultPointInfo{kRecoverSettled, "recover.settled", true, "its targets have come to rest"},
    FaultPointInfo{kRecoverTarget, "recover.target", true, "before a target is brought back"},
    FaultPointInfo{kRecoverTargetDone, "recover.target-done", true, "a target is brought back"},
    FaultPointInfo{kRecoverImage, "recover.image", true, "before a half image is removed"},
    FaultPointInfo{kRecoverImageDone, "recover.image-done", true, "no half image is left"},
};

constexpr bool in_order() {
  for (std::size_t i = 0; i < kPoints.size(); ++i) {
    if (static_cast<std::size_t>(kPoints[i].point) != i) return false;
  }
  return kPoints.size() == static_cast<std::size_t>(kRecoverImageDone) + 1;
}
static_assert(in_order(), "a row for each point, in the order of the enum");

const char* setting(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

}  // namespace

std::span<const FaultPointInfo> fault_points() { return kPoints; }

#ifndef STASIS_FAULT_POINTS

Result<void> check_fault_setting() {
  for (const char* name : {"STASIS_FAULT", "STASIS_FAULT_LOG", "STASIS_FAULT_FILL"}) {
    if (setting(name) == nullptr) continue;
    return fail(ErrorCode::kUsage,
                fmt::format("{} is set, and this build has no fault points", name),
                "unset it, or build with -DSTASIS_FAULT_POINTS=ON");
  }
  return {};
}

#else

namespace {

enum class FaultAction {
  kKill,
  kError,
  kTargetDies,
  kCriuDies,
  kMoverDies,
  kDiskFull,
  kNoMemory,
  kTargetNoMemory
};

struct Fault {
  const FaultPointInfo* point = nullptr;
  FaultAction action = FaultAction::kKill;
  std::string_view action_name;
  int nth = 1;
};

std::optional<FaultAction> action_from_name(std::string_view name) {
  if (name == "kill") return FaultAction::kKill;
  if (name == "error") return FaultAction::kError;
  if (name == "target-dies") return FaultAction::kTargetDies;
  if (name == "criu-dies") return FaultAction::kCriuDies;
  if (name == "mover-dies") return FaultAction::kMoverDies;
  if (name == "disk-full") return FaultAction::kDiskFull;
  if (name == "no-memory") return FaultAction::kNoMemory;
  if (name == "target-no-memory") return FaultAction::kTargetNoMemory;
  return std::nullopt;
}

tl::unexpected<Error> cannot_be(std::string message) {
  return fail(ErrorCode::kUsage, std::move(message),
              "STASIS_FAULT=POINT:ACTION[@N]; `stasis list-fault-points` lists the points; actions "
              "are kill, error, target-dies, criu-dies, mover-dies, disk-full, no-memory and "
              "target-no-memory");
}

// Nothing if no fault is asked for.
Result<std::optional<Fault>> parse(const char* text) {
  if (text == nullptr) return std::optional<Fault>();
  std::string_view rest = text;
  const std::size_t colon = rest.find(':');
  if (colon == std::string_view::npos) return cannot_be(fmt::format("'{}' is no fault", text));
  Fault fault;
  for (const FaultPointInfo& info : kPoints) {
    if (info.name == rest.substr(0, colon)) fault.point = &info;
  }
  if (fault.point == nullptr) {
    return cannot_be(fmt::format("there is no fault point '{}'", rest.substr(0, colon)));
  }
  rest.remove_prefix(colon + 1);
  if (const std::size_t at = rest.find('@'); at != std::string_view::npos) {
    const std::string_view number = rest.substr(at + 1);
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), fault.nth);
    if (error != std::errc() || end != number.data() + number.size() || fault.nth < 1) {
      return cannot_be(fmt::format("'{}' does not say at which time", text));
    }
    rest = rest.substr(0, at);
  }
  const auto action = action_from_name(rest);
  if (!action) return cannot_be(fmt::format("there is no action '{}'", rest));
  fault.action = *action;
  fault.action_name = rest;
  if (*action == FaultAction::kError && !fault.point->can_fail) {
    return cannot_be(
        fmt::format("nothing can fail at {}: {}", fault.point->name, fault.point->what));
  }
  if (*action == FaultAction::kDiskFull && setting("STASIS_FAULT_FILL") == nullptr) {
    return cannot_be("disk-full needs STASIS_FAULT_FILL, a directory on the disk to be filled");
  }
  return std::optional<Fault>(fault);
}

struct State {
  std::optional<Fault> fault;
  const char* log = setting("STASIS_FAULT_LOG");
  std::array<std::atomic<int>, kPoints.size()> reached{};
  std::atomic<bool> done = false;
  std::atomic<int> target = 0;
  std::atomic<int> criu = 0;
  std::atomic<int> mover = 0;

  State() {
    if (auto parsed = parse(setting("STASIS_FAULT"))) fault = *parsed;
  }
};

State& state() {
  static State state;
  return state;
}

// And is no zombie.
bool lives(int pid) {
  if (pid <= 0) return false;
  auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/stat", pid), 4096);
  const std::size_t end = text ? text->rfind(')') : std::string::npos;
  return end != std::string::npos && end + 2 < text->size() && (*text)[end + 2] != 'Z' &&
         (*text)[end + 2] != 'X';
}

void log_line(const std::string& text) {
  if (state().log == nullptr) return;
  if (auto file = open_file(AT_FDCWD, state().log, O_WRONLY | O_CREAT | O_APPEND, 0600)) {
    (void)write_all(file->get(), text.data(), text.size(), state().log);
  }
}

// To the last byte, in a file of its own, which the test removes.
Result<void> fill_disk() {
  constexpr std::size_t kMost = 256U << 20;
  const std::string path = std::string(setting("STASIS_FAULT_FILL")) + "/fault-fill";
  auto file = open_file(AT_FDCWD, path, O_WRONLY | O_CREAT, 0600);
  if (!file) return fail(std::move(file.error()));
  const std::string zeros(64U << 10, '\0');
  std::size_t written = 0;
  for (std::size_t step = zeros.size(); step >= 1;) {
    const ssize_t got = ::write(file->get(), zeros.data(), step);
    if (got > 0) {
      written += static_cast<std::size_t>(got);
      if (written <= kMost) continue;
      (void)::unlink(path.c_str());
      return cannot_be("disk-full needs a small disk: 256 MiB did not fill that of " + path);
    }
    if (errno != ENOSPC) return fail(errno_error("cannot fill " + path, errno));
    step /= 2;
  }
  return {};
}

// All that a process has is all that it gets: of address space, and of what it may write to, which
// keeps the C library from using what it has only reserved. Its hard limits stay, so that the test
// can lift it.
Result<void> take_no_more_memory(int pid) {
  auto text = read_file(AT_FDCWD, fmt::format("/proc/{}/status", pid), 65536);
  if (!text) return fail(std::move(text.error()));
  const auto limit = [&](auto resource, std::string_view field) -> Result<void> {
    const std::size_t at = text->find(field);
    rlimit limits{};
    if (at == std::string::npos || ::prlimit(pid, resource, nullptr, &limits) != 0)
      return fail(errno_error(fmt::format("cannot read {} of process {}", field, pid), errno));
    // In KiB.
    limits.rlim_cur = std::min<rlim_t>(
        limits.rlim_max, std::strtoull(text->c_str() + at + field.size(), nullptr, 10) << 10);
    if (::prlimit(pid, resource, &limits, nullptr) == 0) return {};
    return fail(errno_error(fmt::format("cannot limit the memory of process {}", pid), errno));
  };
  auto done = limit(RLIMIT_AS, "\nVmSize:");
  return done ? limit(RLIMIT_DATA, "\nVmData:") : done;
}

// What cannot be done is an error in any case, so that no test passes because nothing happened.
Result<void> act(const Fault& fault) {
  const auto signal = [&](int pid, const char* whom) -> Result<void> {
    if (!lives(pid)) return cannot_be(fmt::format("at {} there is no {}", fault.point->name, whom));
    ::kill(pid, SIGKILL);
    return {};
  };
  switch (fault.action) {
    case FaultAction::kKill:
      ::kill(::getpid(), SIGKILL);
      return {};
    case FaultAction::kError:
      return fail(ErrorCode::kInternal, fmt::format("a test made {} fail", fault.point->name),
                  "unset STASIS_FAULT");
    case FaultAction::kTargetDies:
      return signal(state().target.load(), "target");
    case FaultAction::kCriuDies:
      return signal(state().criu.load(), "criu");
    case FaultAction::kMoverDies:
      return signal(state().mover.load(), "mover");
    case FaultAction::kDiskFull:
      return fill_disk();
    case FaultAction::kNoMemory: {
      auto done = take_no_more_memory(::getpid());
      for (const int helper : {state().criu.load(), state().mover.load()})
        if (done && lives(helper)) done = take_no_more_memory(helper);
      return done;
    }
    case FaultAction::kTargetNoMemory:
      if (lives(state().target.load())) return take_no_more_memory(state().target.load());
      return cannot_be(fmt::format("at {} there is no target", fault.point->name));
  }
  return {};
}

}  // namespace

Result<void> check_fault_setting() {
  if (auto parsed = parse(setting("STASIS_FAULT")); !parsed) return fail(std::move(parsed.error()));
  return {};
}

std::string_view fault_not_reached() {
  const State& now = state();
  return now.fault && !now.done.load() ? now.fault->point->name : std::string_view();
}

Result<void> fault(FaultPoint point) {
  State& now = state();
  if (!now.fault && now.log == nullptr) return {};
  const auto at = static_cast<std::size_t>(point);
  const int nth = ++now.reached.at(at);
  const bool hit = now.fault && now.fault->point->point == point && now.fault->nth == nth;
  log_line(fmt::format("{}{} {} target={} criu={} mover={}\n", hit ? "fault " : "",
                       kPoints.at(at).name, hit ? now.fault->action_name : "-",
                       lives(now.target.load()) ? 1 : 0, lives(now.criu.load()) ? 1 : 0,
                       lives(now.mover.load()) ? 1 : 0));
  if (!hit) return {};
  now.done = true;
  return act(*now.fault);
}

void fault_only(FaultPoint point) { (void)fault(point); }

void set_fault_target(Pid pid) { state().target = pid.value; }
void set_fault_criu(Pid pid) { state().criu = pid.value; }
void set_fault_mover(Pid pid) { state().mover = pid.value; }

#endif

}  // namespace stasis
