// What a swap says to the processes that do its two sides, and what they answer: sent as records
// over a channel.
//
// Values and functions; any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/channel.h"
#include "base/ids.h"
#include "base/result.h"
#include "driver/bounded_driver.h"
#include "job/target.h"
#include "operations/operations.h"

namespace stasis::job {

// Before any order: the process that the side is about, and how it is to work.
struct SideSetup {
  std::string name;  // for messages
  Pid root;          // in the namespaces that `entry` enters
  Entry entry;
  std::chrono::milliseconds timeout{0};  // for the lock
  MemoryPath path = MemoryPath::kAutomatic;
  bool ignore_obstacles = false;
  std::optional<AttachWay> attach;  // its library comes as a descriptor
  std::string gpu_map;              // of a resume, as the user gave it; empty: none
  std::uint64_t ring_bytes = 0;
  std::optional<DriverTimeouts> timeouts;
};

enum class SideOrder {
  kProbe,
  kAttach,
  kSuspend,
  kSuspendBeside,  // the other side does its part meanwhile, once told that this one is quiesced
  kResume,
  kUndo,  // what a killed operation on it has left half done
};

// Of a suspend: its processes have no work on the GPU any more, and it goes on.
struct Quiesced {};

// How far what goes on now has come.
struct Progressed {
  std::uint64_t done = 0;  // bytes
  std::uint64_t total = 0;
};

struct Undone {
  bool any = false;  // there was something
};
// Its programs have the agent.
struct Attached {};
struct SideResult {
  std::variant<TreeStatus, Report, Undone, Attached, Error> what;
  std::vector<std::string> notes = {};  // for people
  std::string simulated = {};           // the simulated driver's library; empty: it is the real one
};
using SideEvent = std::variant<Quiesced, SideResult, Progressed>;

// The trace of a side comes with its result, as a descriptor: it is more than a message holds.
Result<void> send(const Channel& channel, const SideSetup& setup);
Result<void> send(const Channel& channel, SideOrder order);
Result<void> send(const Channel& channel, const SideEvent& event, UniqueFd trace);
// Never waits: it is lost where the other end does not read.
void send(const Channel& channel, const Progressed& progressed);
// Nothing of a malformed message.
std::optional<SideSetup> parse_side_setup(Channel::Message& message);
std::optional<SideOrder> parse_side_order(const Channel::Message& message);
std::optional<SideEvent> parse_side_event(Channel::Message& message);

}  // namespace stasis::job
