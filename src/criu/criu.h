// CRIU, driven through its RPC (`criu swrk`): one criu process for one request, without a shell.
//
// Stateless apart from the program's path and version; const methods may be called from several
// threads, each of which runs a criu of its own. The calling process must be able to reap:
// restore() makes the restored root its child.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/interrupt.h"
#include "base/result.h"
#include "image/criu_options.h"

namespace stasis {

class InsideCriu;

// The oldest CRIU that has the hooks this project needs: 4.0.
inline constexpr int kOldestCriu = 40000;

struct DumpRequest {
  Pid root;
  const UniqueFd& images_dir;
  const UniqueFd& log_dir;  // gets dump.log and stats-dump
  CriuOptions options = {};
  bool leave_running = false;  // resume the tree after the dump instead of ending it
  // What of the tree's memory criu is not to save; filled when on_ready is back. May be nullptr.
  const InsideCriu* hidden = nullptr;
  // Where a reader of an error message finds dump.log, e.g. ImageWriter::failed_log_path().
  std::string log_path = {};
  std::chrono::milliseconds deadline{0};  // for the whole dump; 0 = none
  int log_level = 4;                      // CRIU's: 1 errors .. 4 debug
  // Called with criu's number before it is told anything. May be empty.
  std::function<Result<void>(Pid)> on_started = {};
  // Called on this thread when criu has tried the kernel out and has all that it needs, before it
  // looks at the tree or touches it: what makes the tree ready may take as long as it likes. If it
  // fails, criu ends, and its error is returned as it is. May be empty.
  std::function<Result<void>()> on_ready = {};
  // Looked at ten times a second after that, until the image is complete; an error ends criu, which
  // may wait for ever for a process that was killed. May be empty.
  std::function<Result<void>()> check = {};
};

// A descriptor that takes the place of a dumped file at restore; CRIU's --inherit-fd.
struct InheritedFd {
  std::string key;  // "pipe:[1234]", "dev/pts/3", ...
  const UniqueFd* fd = nullptr;
};

struct RestoreRequest {
  const UniqueFd& images_dir;
  // Gets the log and stats-restore. CRIU follows links there and loads what calls itself a plugin,
  // so it must be a fresh directory that only we can write to, and never one of the image's.
  const UniqueFd& work_dir;
  std::string log_name;                    // "restore-20261121T093000Z.log"; no slash
  CriuOptions options = {};                // of the dump
  std::vector<std::string> external = {};  // overrides those of the dump: externals_for_restore()
  std::vector<InheritedFd> inherit = {};
  // Of a tree with sockets that may be bound to addresses which the machine does not have
  // (IP_FREEBIND, IP_TRANSPARENT). criu then binds the others to such ones, too.
  bool binds_anywhere = false;
  // A shell job is not to be of the caller's process group.
  bool in_background = false;
  Pid root = {};                  // the numbers that the image needs; checked to be free first,
  std::vector<Pid> pids = {};     // and used to clean up after a failed restore
  std::vector<Tid> threads = {};  // those of their other threads, as far as they are known
  // Where a reader of an error message finds the log; asked when criu has ended. May be empty, or
  // say nothing.
  std::function<std::string()> log_path = {};
  // Called some ten times a second while CRIU works, on this thread. May be empty.
  std::function<void()> on_wait = {};
  // Called when everything of the tree is restored and none of it runs yet, later than on_restored:
  // nothing can fail any more. May be empty.
  std::function<void()> on_resume = {};
  // Looked at as often; an error gives the restore up. May be empty.
  std::function<Result<void>()> check = {};
  // Called before what there is of the tree is killed. May be empty.
  std::function<void()> on_give_up = {};
  std::chrono::milliseconds deadline{0};  // 0 = none. A restore can hang for ever in CRIU
  int log_level = 4;
  // Called with criu's number before it is told anything. May be empty.
  std::function<Result<void>(Pid)> on_started = {};
};

struct RestoredTree {
  Pid root;  // a child of this process
  Pidfd root_fd;
};

// What a remedy says of it: the first is installed by the package, the second lies in the source.
inline constexpr const char* kGetCriu = "`stasis-get-criu` (in the source: tools/get-criu)";

class Criu {
 public:
  // Looks at `explicit_path`, then $STASIS_CRIU, then PATH, then the private folders that
  // stasis-get-criu fills: /opt/stasis/criu and ${XDG_CACHE_HOME:-~/.cache}/stasis/criu. One that
  // was named (the first two) must work. kCriuMissing, kCriuTooOld.
  static Result<Criu> find(const std::optional<std::string>& explicit_path = std::nullopt);

  // Whether this user may dump anything by this criu: with a capability of its own, or of criu's
  // file. kNotPermitted, before anything is touched.
  Result<void> may_dump() const;
  // Whether this user may restore anything here: a job whose images could only be restored
  // elsewhere is not to be begun. kNotPermitted, naming what is missing.
  static Result<void> may_restore();
  // Those in effect that a restore takes, whatever is in the image; the kernel's numbers, as bits.
  static std::uint64_t capabilities_to_restore();

  const std::string& path() const { return path_; }
  int version() const { return version_; }  // 40201 is 4.2.1
  std::string version_text() const;         // "4.2.1"

  // Dumps the tree below `request.root`. When all images are written and the tree still stands
  // still, unharmed, `on_images_complete` is called, on this thread; only if it succeeds is the
  // tree ended (or resumed, with leave_running). If it fails, its error is returned, and the tree
  // runs on. On EVERY error the tree runs on as before, unless its message says that the root has
  // ended: a criu that is killed at the wrong moment takes it along. An interrupt is honoured until
  // on_images_complete has succeeded. kCriuFailed with CRIU's own last errors, what they mean, and
  // where the log is; kInterrupted; kTimeout; kNoSpace; kNotPermitted.
  Result<void> dump(const DumpRequest& request,
                    const std::function<Result<void>()>& on_images_complete,
                    const Interrupt& interrupt) const;

  // Restores the tree and leaves it running. On an error, and when anything that is called from
  // here throws, nothing of it is left. The caller may let the root go or wait for it (waitid on
  // root_fd with P_PIDFD). `on_restored` is called when every process stands complete but none runs
  // yet; if it fails, the tree is killed and its error is returned. May be empty. An interrupt is
  // honoured until the end, within a second or two even if criu is stuck. kPidInUse, kImageCorrupt,
  // kCriuFailed, kInterrupted, kTimeout, kNotRolledBack (something is left; named).
  Result<RestoredTree> restore(const RestoreRequest& request,
                               const std::function<Result<void>()>& on_restored,
                               const Interrupt& interrupt) const;

 private:
  Criu(std::string path, int version) : path_(std::move(path)), version_(version) {}
  std::string path_;
  int version_ = 0;
};

// "4.2.1" from 40201, "4.2" from 40200.
std::string criu_version_text(int version);

}  // namespace stasis
