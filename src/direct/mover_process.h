// The mover in a process of its own: a driver that hangs, crashes or is killed there harms no other
// process, and this process never has a CUDA context.
// The mover has the GPUs and the ring, which both processes map. For each of its copying threads
// one thread here serves the Content, so any Content will do and knows nothing of it. Owns the
// mover, which ends with this process however that ends. Otherwise as mover.h says. Not
// thread-safe.
#pragma once

#include <atomic>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/helper_process.h"
#include "direct/mover.h"

namespace stasis::direct {

// What the process has asked for, counted by the threads that serve it.
struct Pulse {
  std::atomic<std::uint64_t> beats{0};
  std::atomic<unsigned> being_served{0};
};

class MoverProcess final : public MemoryMover {
 public:
  // Forks, and does nothing else. While this process has one thread, and before it has called the
  // driver's cuInit: a forked child of a process with CUDA has none. `cache`: the directory in
  // which the driver keeps what it compiles for digests, some 40 ms; empty: it compiles each time.
  static Result<MoverProcess> start(const std::string& cache = {});
  // The same by a program that calls serve_mover_program(), for a process that may have threads.
  static Result<MoverProcess> start_program(const std::string& program,
                                            std::span<const std::string> arguments);
  MoverProcess(MoverProcess&&) noexcept = default;
  MoverProcess& operator=(MoverProcess&&) = delete;
  ~MoverProcess() override { end(); }

  // As Mover::start(), before anything else. Nothing if it was done.
  Result<void> start_driver(const MoverOptions& options, const Interrupt& interrupt,
                            Clock::time_point deadline);
  // As Mover::open(), with all GPUs of the machine visible, before the first copy; starts the
  // driver if that was not done, and only then are the options heeded. Nothing if it was done.
  // After an error other than kNoAnswer nothing of it is left, and the caller may try again.
  Result<void> prepare(const MoverOptions& options, std::span<const GpuUuid> gpus,
                       const Interrupt& interrupt, Clock::time_point deadline);
  // As in mover.h. kNoAnswer if the process crashed, was killed, did not answer for ten seconds
  // after the deadline or an interrupt, or did nothing for as long as MoverOptions::silence says:
  // it is ended then, which lets everything go, and each later call says the same.
  Result<CopyReport> copy_out(std::vector<Segment> segments, Content& content,
                              const Interrupt& interrupt, Clock::time_point deadline) override;
  Result<CopyReport> copy_in(std::vector<Segment> segments, Content& content,
                             const Interrupt& interrupt, Clock::time_point deadline) override;
  Result<void> prepare_digests(const Interrupt& interrupt, Clock::time_point deadline) override;
  void keep(std::vector<SpareRoom> room) override { keep_ = std::move(room); }
  void hold(std::vector<UniqueFd> files) override { hold_ = std::move(files); }
  Result<CopyReport> prefetch(const std::vector<PrefetchRequest>& requests, Content& content,
                              const Interrupt& interrupt, Clock::time_point deadline) override;

  bool was_silent() const override { return was_silent_; }

  // Gives the GPUs and the ring back; waits until nothing of the process is left. False if it was
  // killed.
  bool end();
  Pid pid() const { return helper_.pid(); }
  // The process has ended, or was given up.
  bool is_lost() const { return lost_.has_value(); }

 private:
  explicit MoverProcess(HelperProcess helper) : helper_(std::move(helper)) {}
  Result<CopyReport> copy(Direction direction, std::vector<Segment> segments, Content& content,
                          Stop& stop, Clock::time_point deadline);
  Result<void> send_segments(std::vector<Segment> segments, Stop& stop);
  Result<void> send_files(std::vector<UniqueFd> files, Stop& stop);
  // One batch of descriptors, which the process has taken then.
  Result<void> send_batch(std::span<const std::byte> message, std::span<const UniqueFd> descriptors,
                          Stop& stop);
  // The next message, or what went wrong with the process, which has ended then.
  Result<Channel::Message> answer(Stop& stop, std::chrono::milliseconds timeout,
                                  const Pulse* pulse = nullptr);
  // Of what it does while it holds nothing of others, so that there is nothing to wait for once it
  // has to stop: what went wrong, be it with the process or because of `stop`, or what it says.
  Result<Channel::Message> answer_at_once(Stop& stop);
  tl::unexpected<Error> lost(std::string message);
  Result<void> check_prepared() const;
  // Whether a copy that does nothing for `silence_` is given up.
  enum class Silence { kMayBe, kEndsIt };
  // The rest of a copy that was asked for.
  Result<CopyReport> serve(Content& content, Stop& stop, Silence silence);
  // While the process copies: serves `content` over each of `sockets`, and waits for the end.
  Result<CopyReport> serve(std::vector<UniqueFd> sockets, Content& content, Stop& stop,
                           Silence silence);

  HelperProcess helper_;
  HostMapping ring_;
  std::vector<SpareRoom> keep_;  // for the next copy out
  std::vector<UniqueFd> hold_;   // for the next copy in
  std::chrono::milliseconds silence_ = MoverOptions().silence;
  std::optional<Error> lost_;
  bool was_silent_ = false;
  enum class Stage { kIdle, kStarted, kPrepared };
  Stage stage_ = Stage::kIdle;
};

}  // namespace stasis::direct
