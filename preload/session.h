// What the agent's thread does: it serves the tools that ask on its page, one request at a time,
// and undoes what it did for a tool that has died.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "abi/agent_protocol.h"
#include "abi/cuda_abi.h"
#include "eviction.h"
#include "sharing.h"

namespace stasis::preload {

// The program is ending: the driver's own end is about to come, or has.
extern std::atomic<bool> g_ending;

// Managed memory is given up with the program's threads kept still, and one that is kept still in a
// fork would have the agent's locks: where there is some, a fork passes the gate like a call, and
// closing it waits for those under way.
extern std::atomic<bool> g_forks_pass;

// Whether the descriptor is still the page's: a program may close all that it did not open, and
// open others, which get the same numbers. By what CRIU restores, so not by the inode.
bool holds_page(int fd);

// A batch of exports, and what the driver may open for it.
inline constexpr int kExportRoom = 4 * direct::kExportBatch;

class Session {
  using Clock = std::chrono::steady_clock;
  class PeersTimeout;

 public:
  explicit Session(direct::ControlPage& page, int fd);

  [[noreturn]] void run();

 private:
  // What the page says of these is for the peer to read. The agent trusts only its own copies: a
  // process that may open the page may write anything into it.
  direct::AgentState state() const { return state_; }
  void set_state(direct::AgentState state);
  void set_buffer(std::uint64_t address, std::uint64_t bytes);

  bool undoes_on_its_own() const;
  std::chrono::nanoseconds until_poll(bool something_to_undo) const;
  bool rejoin_file();
  template <class T>
  bool read_file_at(std::size_t offset, T& value) const {
    return ::pread(fd_, &value, sizeof value, static_cast<off_t>(offset)) == sizeof value;
  }

  bool peer_is_gone() const;

  void done() { page_.cu_result = 0; }
  void refuse(cuda::CUresult result, const char* what, const char* value);
  void refuse(cuda::CUresult result, const char* what, std::uint64_t value);
  void report(const Outcome& outcome);
  bool expect(direct::AgentState wanted);
  void refuse_ending() { refuse(cuda::CUDA_ERROR_DEINITIALIZED, "it is about to exit", "let it"); }

  void answer();
  void tell_counts();
  void serve(direct::AgentCommand command);

  std::byte* buffer() const { return reinterpret_cast<std::byte*>(buffer_address_); }

  bool have_buffer(std::uint64_t bytes);

  void give_buffer_back();
  void free_buffer();

  void set_content(std::uint64_t high, std::uint64_t low);
  bool content_is_elsewhere() const { return (content_id_[0] | content_id_[1]) != 0; }

  bool expect_buffer();
  void make_buffer();

  // The commands, and what the agent does when its peer has died (session_commands.cc).
  void prepare();
  bool refuse_deep_bound();
  void close_gate();
  bool hold_calls(const PeersTimeout& timeout);
  bool finish_work(const PeersTimeout& timeout);
  void export_batch();
  void close_exported();
  void pin();
  bool save_pinned();
  void evict();
  void repopulate();
  void open_gate(bool keeps_buffer);
  void list_shares();
  void detach();
  void stay();
  void retake();
  void lend_piece();
  void offer_socket();
  void take_pieces();
  void adopt();
  void close_sockets();
  void undo();

  direct::ControlPage& page_;
  const int fd_;
  const bool may_be_split_;  // rejoin_file()
  std::uint32_t beat_ = 0;
  Clock::time_point last_request_ = Clock::now();
  std::uint32_t serving_ = 0;
  std::vector<Segment> segments_;
  std::vector<Shared> listed_;  // by list_shares(), of which a part is told already
  bool buffer_wanted_ = true;
  // What the page says too, where others of the same user can write.
  direct::AgentState state_ = direct::AgentState::kRunning;
  std::uint64_t arguments_[2] = {};
  std::uint64_t segment_bytes_ = 0;
  std::uint64_t content_id_[2] = {};
  std::uint64_t buffer_address_ = 0;
  std::uint64_t buffer_bytes_ = 0;
  std::uint64_t deep_loads_ = 0;  // when library_deep_bound() looked last
  bool was_detached_ = false;     // kDetach or kStay, since the gate was closed
  int sockets_[2] = {-1, -1};     // kAttach
  std::span<std::byte> unused_;   // a buffer that was given back, and is not yet freed
};

}  // namespace stasis::preload
