// One program of a swap, and the process that does its part in the program's namespaces: an
// operation is about one tree.
//
// One thread at a time.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/helper_process.h"
#include "job/swap_messages.h"

namespace stasis::job {

class SwapSide {
 public:
  // Starts a process that calls serve_swap_side().
  using StartHelper = std::function<Result<HelperProcess>()>;
  // `setup` but for its root and entry, which the target says. Called while this thread starts no
  // other process.
  static Result<SwapSide> start(const Target& target, SideSetup setup, const StartHelper& helper);

  const std::string& name() const { return name_; }
  int fd() const { return busy_ ? process_.channel().fd() : -1; }
  bool busy() const { return busy_; }
  // How far what it does now has come, or what it did last.
  const Progressed& progressed() const { return progressed_; }
  // What it suspends has no work on the GPU any more.
  bool quiesced() const { return quiesced_; }

  void begin(SideOrder order);
  // Takes the answer, which has come.
  void take();
  // Only one that hears(): a signal would end a process that has just been started.
  void stop();
  // Says it once more to what was told already: the user insists (Interrupt::insists()). What is
  // undone since then is not told.
  void insist();
  bool hears() const { return has_answered_ || !busy_; }

  // The trace of all that was done, as events; empty if the process records none.
  nlohmann::json take_trace() { return std::exchange(trace_, nlohmann::json::array()); }
  // Of what was done last.
  const SideResult& result() const { return done_; }
  // None if it was none of that.
  template <class What>
  const What* get() const {
    return std::get_if<What>(&done_.what);
  }
  bool succeeded() const { return get<Error>() == nullptr; }
  Error error() const;

 private:
  SwapSide(std::string name, HelperProcess process)
      : name_(std::move(name)), process_(std::move(process)) {}
  void lost();

  std::string name_;
  HelperProcess process_;
  bool busy_ = false;
  bool quiesced_ = false;
  Progressed progressed_;
  bool has_answered_ = false;  // before
  bool is_stopped_ = false;    // what it does now
  SideResult done_;
  nlohmann::json trace_ = nlohmann::json::array();
};

// What `ps` shows of such a process.
inline constexpr const char* kSwapSideName = "stasis-swap";

// In the process: does what it is told, until the channel ends. While the process has one thread;
// its SIGTERM is what stops an order.
void serve_swap_side(const Channel& channel);

}  // namespace stasis::job
