// What an open file is set to and CRIU 4.2.1 does not restore: a terminal's exclusive mode and what
// of its settings is locked, how an epoll polls network devices, whom a file signals, what of an
// eventfd's value is beyond 32 bits, and whose a pipe is. Of terminals there is more
// (terminal_state.h).
//
// Stateless; thread-safe. The files are looked at through copies of the descriptors (pidfd_getfd).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"

namespace stasis::proc {

// Of an epoll, as EPIOCSPARAMS has it.
struct EpollPolling {
  std::uint32_t microseconds = 0;
  std::uint16_t budget = 0;
  bool prefer = false;
  bool operator==(const EpollPolling&) const = default;
};

struct FileState {
  int descriptor = -1;
  bool exclusive = false;  // TIOCEXCL
  EpollPolling polling;
  // A terminal's settings, as TCGETS has them, if any of them is locked (TIOCSLCKTRMIOS).
  std::string locked_settings;
  bool signals = false;          // O_ASYNC
  Tid owner_thread;              // F_OWNER_TID of F_SETOWN_EX; 0: no thread
  std::uint32_t value_high = 0;  // an eventfd: the upper half of its value
  // A pipe without a name: what is not as of a new one of the user whose tool this is.
  std::optional<std::uint32_t> mode = std::nullopt;
  std::optional<std::uint32_t> uid = std::nullopt;
  std::optional<std::uint32_t> gid = std::nullopt;
  // A terminal, as terminal_states() has it: what is written to this end is stopped by TCOOFF; a
  // master: what is written to the slave is, because a stop was typed (^S); speeds that have no
  // name (BOTHER).
  bool is_stopped = false;
  bool has_typed_stop = false;
  std::uint32_t input_speed = 0;
  std::uint32_t output_speed = 0;
  bool operator==(const FileState&) const = default;
};

// Of the process's pipes, sockets, terminals, epolls and eventfds that have any of it; what cannot
// be read is left out.
std::vector<FileState> file_states(Pid pid);

// The descriptors of folders that the process watches by F_NOTIFY: the kernel tells that they have
// an owner to signal, and not what of.
std::vector<int> watched_folders(Pid pid);

// Sets a pipe, a terminal, an epoll and an eventfd through a copy of the descriptor. kIo if the
// kernel refuses.
Result<void> set_file_state(Pid pid, const Pidfd& process, const FileState& state);

}  // namespace stasis::proc
