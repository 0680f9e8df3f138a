// System calls that a thread of another process makes for us.
//
// They are made in the unused end of the last page of some library's code, put back right
// afterwards. What the thread goes on with lies beside them, in case the tool is killed in that
// instant: the code behind the call takes its registers and its signal mask from there, so that the
// program runs on without a tool. (A single step would leave a trap armed that no tracer takes, and
// that ends the program.) What lies there then is removed by the next tool: finish_remote_call().
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "proc/address_space.h"
#include "proc/bounded_seize.h"
#include "proc/procfs.h"
#include "proc/stopped_threads.h"

namespace stasis {

// What a thread goes on with, as it lies in the process's memory.
struct SavedThread {
  static constexpr std::uint64_t kMark = 0x50415231;
  std::uint64_t mark = kMark;
  std::uint64_t signal_mask = 0;
  proc::StoppedThreads::Registers registers{};

  std::vector<std::uint64_t> words() const;
};

// kInternal if it is damaged.
Result<SavedThread> read_saved(const proc::AddressSpace& space, std::uint64_t address);
// `anywhere`: to go on from another kind of stop than this one.
Result<SavedThread> save(const proc::StoppedThreads& stopped, Tid thread, bool anywhere);
// In an order in which each step leaves a thread that can be found, and loses no signal.
Result<void> send_on(const proc::StoppedThreads& stopped, Tid thread, const SavedThread& saved);

// Where in a process system calls can be made for us.
struct RemoteCallRoom {
  struct Begun {
    std::uint64_t address = 0;
    Tid thread;
  };
  std::optional<Begun> begun;         // left by a tool that was killed
  std::optional<std::uint64_t> room;  // zeros now

  // Looks at one of the process's mappings.
  void probe(const proc::AddressSpace& space, const proc::Mapping& mapping);
};

// The call's own answer, negative for an error.
using SystemCall = std::function<Result<std::int64_t>(std::uint64_t number,
                                                      std::span<const std::uint64_t> arguments)>;

// Has the first of `stopped`, all threads of the process, make the calls of `act`. Whatever that
// returns, the thread is as it was before. `data`, at most kRemoteCallData words, can be read by
// the calls, at remote_call_data(). kNotSupported: no room.
Result<void> make_system_calls(const proc::AddressSpace& space, const proc::StoppedThreads& stopped,
                               const RemoteCallRoom& places,
                               const std::function<Result<void>(const SystemCall&)>& act,
                               std::span<const std::uint64_t> data = {});
// The same by another one of them.
Result<void> make_system_calls(const proc::AddressSpace& space, const proc::StoppedThreads& stopped,
                               Tid thread, const RemoteCallRoom& places,
                               const std::function<Result<void>(const SystemCall&)>& act,
                               std::span<const std::uint64_t> data = {});
inline constexpr std::size_t kRemoteCallData = 24;
std::uint64_t remote_call_data(const RemoteCallRoom& places);
// Code by which the thread that is in the middle of make_system_calls() goes on by itself, for a
// system call that `act` makes elsewhere (StoppedThreads::system_call()).
std::uint64_t way_back(const RemoteCallRoom& places);

// Sends on what a killed caller has left: a thread that is on its way back, or one that it had only
// just begun with, or done with. `stopped` are all threads of the process.
Result<void> finish_remote_call(const proc::AddressSpace& space,
                                const proc::StoppedThreads& stopped,
                                const RemoteCallRoom::Begun& begun);

}  // namespace stasis
