#include "operations/dump_terminals.h"

#include <algorithm>

#include <fmt/format.h>

#include "proc/procfs.h"
#include "proc/terminal_state.h"

namespace stasis {

DumpedTerminals::DumpedTerminals(const UniqueFd& criu_dir, std::vector<Pid> tree, bool gives_back,
                                 const Environment& env)
    : tree_(std::move(tree)), gives_back_(gives_back) {
  const proc::ProcFs procfs;
  for (const Pid pid : tree_) {
    const auto details = procfs.details(pid);
    numbers_.push_back(details ? details->ns_pid : 0);
  }
  terminals_ = saved_terminals(criu_dir, numbers_);
  for (const SavedTerminal& terminal : terminals_) {
    auto done = proc::set_terminal_flags(process_of(terminal), terminal.descriptor, terminal.flags);
    if (!done) env.tell(done.error().to_string());
  }
}

Pid DumpedTerminals::process_of(const SavedTerminal& terminal) const {
  const auto found = std::find(numbers_.begin(), numbers_.end(), terminal.number);
  return found == numbers_.end() ? Pid{}
                                 : tree_[static_cast<std::size_t>(found - numbers_.begin())];
}

void DumpedTerminals::tell_of_unread(std::vector<std::string>& lost) const {
  if (std::any_of(terminals_.begin(), terminals_.end(),
                  [](const SavedTerminal& terminal) { return !terminal.unread.empty(); }))
    lost.emplace_back(
        "unread input of a terminal in its first form: a restore writes it again, with other ends "
        "of lines, a second echo, and the bytes of packet mode (TIOCPKT)");
  if (std::any_of(terminals_.begin(), terminals_.end(),
                  [](const SavedTerminal& terminal) { return terminal.has_more; }))
    lost.emplace_back("what is not yet read of a terminal beyond the first 16 KiB");
}

void DumpedTerminals::give_back(const Environment& env) const {
  if (gives_back_) return;
  for (const SavedTerminal& terminal : terminals_) {
    if (terminal.unread.empty()) continue;
    auto done =
        proc::put_unread_back(tree_, process_of(terminal), terminal.descriptor, terminal.unread);
    if (!done) env.tell(done.error().to_string());
  }
}

}  // namespace stasis
