#include "operations/dump_terminals.h"

#include <algorithm>

#include <fmt/format.h>

#include "proc/procfs.h"
#include "proc/terminal_state.h"

namespace stasis {

DumpedTerminals::DumpedTerminals(const UniqueFd& criu_dir, std::vector<Pid> tree, Unread unread)
    : tree_(std::move(tree)), unread_(unread) {
  const proc::ProcFs procfs;
  for (const Pid pid : tree_) {
    const auto details = procfs.details(pid);
    numbers_.push_back(details ? details->ns_pid : 0);
  }
  terminals_ = saved_terminals(criu_dir, numbers_);
}

void DumpedTerminals::wait_again(std::vector<std::string>& failed, bool are_rewritten) const {
  for (const SavedTerminal& terminal : terminals_) {
    auto done = proc::set_terminal_flags(process_of(terminal), terminal.descriptor, terminal.flags,
                                         are_rewritten);
    if (!done) failed.push_back(done.error().to_string());
  }
}

Pid DumpedTerminals::process_of(const SavedTerminal& terminal) const {
  const auto found = std::find(numbers_.begin(), numbers_.end(), terminal.number);
  return found == numbers_.end() ? Pid{}
                                 : tree_[static_cast<std::size_t>(found - numbers_.begin())];
}

void DumpedTerminals::tell_of_unread(std::vector<std::string>& lost) const {
  if (std::any_of(terminals_.begin(), terminals_.end(),
                  [](const SavedTerminal& terminal) { return terminal.has_more; }))
    lost.emplace_back("what is not yet read of a terminal beyond the first 16 KiB");
}

void DumpedTerminals::give_back(std::vector<std::string>& failed) const {
  const auto is_unread = [](const SavedTerminal& terminal) { return !terminal.unread.empty(); };
  if (std::none_of(terminals_.begin(), terminals_.end(), is_unread)) return;
  const proc::TerminalPairs pairs(tree_);
  for (const SavedTerminal& terminal : terminals_) {
    if (!terminal.is_first || terminal.has_more) continue;
    const bool is_written = unread_ == Unread::kWritten;
    // What has come to an end of which CRIU took nothing is an echo of what it has written.
    if (terminal.unread.empty() && !is_written) continue;
    auto done = pairs.put_unread_back(process_of(terminal), terminal.descriptor, terminal.unread,
                                      is_written);
    if (!done && !terminal.unread.empty()) failed.push_back(done.error().to_string());
  }
}

}  // namespace stasis
