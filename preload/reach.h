// Who besides this process has a piece of GPU memory, and what becomes of the piece because of it:
// whether it can leave its place, and whether other memory with the same content may take that.
//
// A value of Physical's (eviction_internal.h), which is locked with the tables. Nothing here asks
// the driver.
#pragma once

#include <compare>
#include <cstdint>

namespace stasis::preload {

// What another process shares with this one, by the agent's socket in it and its number there. All
// zero: the agent does not know whose it is.
struct ShareKey {
  std::uint64_t service = 0;
  std::uint64_t share = 0;
  auto operator<=>(const ShareKey&) const = default;
};

class Reach {
 public:
  // --- What has happened to the piece

  // It was imported by this key, which stays when this process inherits the piece (sharing.h).
  void enter_key(const ShareKey& key) { key_ = key; }
  // Other processes know it by this number from now on.
  void enter_share(std::uint64_t share) { share_ = share; }
  // Other processes have opened it by that number so many times more, or less.
  void count_open(int change) { open_elsewhere_ += static_cast<unsigned>(change); }
  // The program has a descriptor of the agent's, which it may pass on.
  void give_out() { is_given_out_ = true; }
  // Hardware has it, or it was given out past the agent. For ever, because the agent does not learn
  // when it is given up.
  void stay() { stays_ = true; }
  // Whether a device has it as a dma-buf, and goes on using it where it is. Of a unit of small
  // memory: for as long as a piece that the device has is in it.
  void set_outside(bool is_outside) { is_outside_ = is_outside; }
  // What the driver has said to an export (export_trial.h).
  void enter_trial(bool is_refused) { is_refused_ = is_refused; }
  // The driver could not be asked. What was inherited counts as refused, because it cannot be
  // renewed when it is refused later.
  void skip_trial() { is_refused_ = has_key(); }
  // The driver has not been asked yet, or other memory has taken the place of what it refused.
  void forget_trial() { is_refused_ = false; }

  // --- What it is known by

  const ShareKey& key() const { return key_; }
  bool has_key() const { return key_ != ShareKey{}; }
  std::uint64_t share() const { return share_; }  // 0: it was never exported
  bool is_known_elsewhere() const { return share_ != 0 || has_key(); }

  // --- Who has it

  // How often other processes have it open by its number, also while they have given it up for a
  // checkpoint.
  unsigned open_elsewhere() const { return open_elsewhere_; }
  // Another process has this piece. The agent does not count who has what was imported or
  // inherited.
  bool others_have() const { return open_elsewhere_ > 0 || has_key(); }
  // Or may have imported it by a descriptor, of which the agent counts the processes alone.
  bool others_may_have() const { return others_have() || is_given_out_; }
  bool is_outside() const { return is_outside_; }

  // --- What follows

  bool is_refused() const { return is_refused_; }
  // Other memory may take its place: no other process goes on with what it was. `is_lending` says
  // whether any has memory of this process's by a descriptor, and is asked only if that matters.
  bool can_be_renewed(bool (*is_lending)()) const {
    return !others_have() && !(is_given_out_ && is_lending());
  }
  // It may be evicted, when the others have given it up (kDetach). What the driver does not export,
  // and other memory must not replace, it keeps.
  bool can_leave() const { return !stays_ && !is_outside_ && !(is_refused_ && others_may_have()); }

 private:
  ShareKey key_{};
  std::uint64_t share_ = 0;
  // Each is independent of the others: of a piece that is open elsewhere a descriptor may be given
  // out, a device may have it as a dma-buf until that is freed, hardware may have it for ever, and
  // the driver may refuse to export it since a restore, in any combination.
  unsigned open_elsewhere_ = 0;
  bool is_given_out_ = false;
  bool stays_ = false;
  bool is_outside_ = false;
  bool is_refused_ = false;
};

}  // namespace stasis::preload
