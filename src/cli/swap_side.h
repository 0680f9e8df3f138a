// One program of a swap, and the process that does its part in the program's namespaces: an
// operation is about one tree.
//
// One thread at a time.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/helper_process.h"
#include "cli/target.h"
#include "cli/verbs.h"

namespace stasis::cli {

struct SwapArguments {
  Target out;
  Target in;
  SuspendOptions suspend;
  std::optional<std::string> device_map;
};

class Side {
 public:
  // Called while the process has one thread.
  static Result<Side> start(const SwapArguments& arguments, const Target& target,
                            const Context& asked);

  const std::string& name() const { return name_; }
  int fd() const { return busy_ ? process_.channel().fd() : -1; }
  bool busy() const { return busy_; }
  // What it suspends has no work on the GPU any more.
  bool at_rest() const { return at_rest_; }

  // "look", "suspend", "resume"; "undo": what a killed operation on it has left half done.
  // `at_once`: the other side does its part meanwhile.
  void begin(const char* what, bool at_once = false);
  // Takes the answer, which has come.
  void take();
  void stop();

  // The trace of all that was done; with --trace.
  nlohmann::json take_trace() { return std::exchange(trace_, nlohmann::json::array()); }
  // Of what was done last.
  const nlohmann::json& result() const { return done_; }
  bool succeeded() const { return done_.is_object() && !done_.contains("error"); }
  Error error() const;

 private:
  Side(std::string name, HelperProcess process)
      : name_(std::move(name)), process_(std::move(process)) {}
  void lost();

  std::string name_;
  HelperProcess process_;
  bool busy_ = false;
  bool at_rest_ = false;
  nlohmann::json done_;
  nlohmann::json trace_ = nlohmann::json::array();
};

}  // namespace stasis::cli
