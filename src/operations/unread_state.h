// What a socket has not yet given to its program, and CRIU 4.2.1 does not save, or not where it
// was. Looked at from outside when CRIU has saved all, and all stands still.
//
// Private to src/operations. One thread at a time.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "base/ids.h"
#include "image/manifest.h"
#include "operations/lost.h"
#include "proc/procfs.h"
#include "proc/socket_options.h"

namespace stasis {

class UnreadState {
 public:
  // All must outlive it. `tcp_close`: connections are not kept, nor what is in them.
  UnreadState(const UniqueFd& criu_dir, const std::vector<ProcessRecord>& tree, bool tcp_close,
              Lost& lost)
      : criu_dir_(criu_dir), tree_(tree), tcp_close_(tcp_close), lost_(lost) {}

  void note(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
            const proc::OpenFile& file);
  // kBusy for the first from whose middle CRIU has left something out.
  const std::optional<Error>& torn() const { return torn_; }

 private:
  void note_tcp(const UniqueFd& socket, Pid pid, const proc::OpenFile& file);
  void note_unix(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
                 const proc::OpenFile& file);
  void note_under_way(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid, int descriptor,
                      std::uint32_t count);
  void note_messages(const UniqueFd& socket, const proc::SocketKind& kind, Pid pid,
                     const proc::OpenFile& file);
  void tear(Pid pid, int descriptor, const std::string& what);

  const UniqueFd& criu_dir_;
  const std::vector<ProcessRecord>& tree_;
  bool tcp_close_;
  Lost& lost_;
  std::optional<std::map<std::uint64_t, std::uint64_t>> saved_;  // bytes, by inode number
  std::optional<Error> torn_;
  bool is_held_up_ = false;  // by a file that a program serves: no other look is taken
};

}  // namespace stasis
