// A terminal of the job's own. A process that is part of the job, and so of its images, holds the
// master and copies from and to the job's pipes: CRIU saves a pty of which both ends are in the
// tree; for one that is held outside it needs help, which a restore elsewhere cannot give.
// docs/adr/0022-jobs-by-name.md.
#pragma once

#include <sys/ioctl.h>

#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"

namespace stasis::job {

// The hidden verb by which the holder is started: `stasis hold-terminal STREAMS ROWSxCOLUMNS
// COMMAND...`.
inline constexpr const char* kHoldTerminal = "hold-terminal";
// The first pty of the job's own devpts, which is the holder's.
inline constexpr const char* kTerminal = "/dev/pts/0";

// Which of a job's standard streams are a terminal: a bit each, input, output, error.
using TerminalStreams = unsigned;

// Those of this process that are a terminal, for which the job gets one too. None without output:
// there would be nowhere to show what is typed.
TerminalStreams our_terminals();
// The size of the first stream of this process that is a terminal; 0 by 0 if none says.
winsize our_size();

// The words that start the holder for a command.
std::vector<std::string> holder_command(TerminalStreams streams, const winsize& size,
                                        const std::vector<std::string>& command);
// Those streams of a job whose first process is a holder; 0 if it is none.
TerminalStreams held_streams(Pid root);

struct HolderOrder {
  TerminalStreams streams = 0;
  winsize size{};
  std::vector<std::string> command;
};
// Of the words after "hold-terminal"; nothing if holder_command() has not made them.
std::optional<HolderOrder> parse_holder_order(const std::vector<std::string>& words);

}  // namespace stasis::job
