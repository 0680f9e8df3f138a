#include "direct/mover_process.h"

#include <algorithm>
#include <numeric>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include "abi/fd_table.h"
#include "base/fault_point.h"
#include "base/scope_guard.h"
#include "base/threads.h"
#include "base/trace.h"
#include "direct/mover_protocol.h"
#include "direct/mover_server.h"
#include "direct/plan.h"

namespace stasis::direct {
namespace {

namespace pr = protocol;
using std::chrono::milliseconds;

// The poll interval of the interrupt.
constexpr milliseconds kAskAgain{20};
// How long the mover may take to end its work once it was told to: longer than it waits for the GPU
// itself.
constexpr milliseconds kStopTimeout{10000};
// How long it may take to end once either side has closed the connection: the driver takes its time
// to clean up, 0.1 s for one GPU of a machine that has nothing else to do.
constexpr int kEndTimeoutMs = 3000;
constexpr int kLetEndTimeoutMs = 10000;

CopyReport report_of(const pr::Done& done) {
  return {done.bytes, Seconds(done.seconds), Seconds(done.map_seconds), done.left_out};
}

std::int64_t ns_of(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

Result<void> serve_piece(Content& content, const pr::Piece& piece, std::span<std::byte> bytes) {
  switch (piece.what) {
    case pr::PieceOf::kRead:
      return content.read(piece.content_offset, bytes);
    case pr::PieceOf::kWrite:
      return content.write(piece.content_offset, bytes);
    case pr::PieceOf::kDigests:
      return content.deduplicate(piece.content_offset, bytes);
    case pr::PieceOf::kZeros:
      return content.zeros(piece.content_offset, bytes);
  }
  return fail(ErrorCode::kInternal, "the mover's process sent a malformed message");
}

// One thread's: until the copying thread closes its end.
void serve_content(const Channel& channel, std::span<std::byte> ring, Content& content, Stop& stop,
                   Pulse& pulse) {
  for (;;) {
    auto message = channel.receive(-1);
    if (!message || !*message) return;
    ++pulse.being_served;
    const ScopeGuard served([&] {
      ++pulse.beats;
      --pulse.being_served;
    });
    const auto piece = (*message)->as<pr::Piece>();
    if (!piece || piece->ring_offset > ring.size() ||
        piece->bytes > ring.size() - piece->ring_offset) {
      return stop.fail(
          Error{ErrorCode::kInternal, "the mover's process sent a malformed message", {}});
    }
    const auto bytes = ring.subspan(piece->ring_offset, piece->bytes);
    const bool ok = stop.go_on() && stop.ok(serve_piece(content, *piece, bytes));
    if (!channel.send_value(pr::PieceDone{.ok = ok ? 1U : 0U})) return;
  }
}

}  // namespace

Result<MoverProcess> MoverProcess::start(const std::string& cache) {
  // For the descriptors that agents export, on their way to the mover.
  make_descriptor_room(4 * Channel::kMostDescriptors);
  STASIS_TRY_ASSIGN(auto helper, HelperProcess::start(kMoverName, [&cache](const Channel& owner) {
                      serve_mover(owner, cache);
                    }));
  set_fault_mover(helper.pid());
  return MoverProcess(std::move(helper));
}

Result<MoverProcess> MoverProcess::start_program(const std::string& program,
                                                 std::span<const std::string> arguments) {
  STASIS_TRY_ASSIGN(auto helper, HelperProcess::start_program(program, arguments));
  set_fault_mover(helper.pid());
  return MoverProcess(std::move(helper));
}

bool MoverProcess::end() {
  // A mover that is lost may hang. Any other closes its contexts (mover_server.h).
  if (lost_)
    (void)helper_.end();
  else
    (void)helper_.let_end(kLetEndTimeoutMs);
  const bool by_itself = helper_.how_it_ended() == "ended with status 0";
  ring_ = HostMapping();
  if (!lost_) lost_ = Error{ErrorCode::kInternal, "the mover's process was ended before", {}};
  return by_itself;
}

Result<void> MoverProcess::check_prepared() const {
  if (lost_) return fail(*lost_);
  if (stage_ == Stage::kPrepared) return {};
  return fail(ErrorCode::kInternal, "the mover is asked to work before it is prepared");
}

tl::unexpected<Error> MoverProcess::lost(std::string message) {
  ring_ = HostMapping();
  lost_ = Error{ErrorCode::kNoAnswer, std::move(message),
                "the kernel's log may say why; --path driver goes without that process"};
  return fail(*lost_);
}

Result<Channel::Message> MoverProcess::answer(Stop& stop, milliseconds timeout,
                                              const Pulse* pulse) {
  std::optional<Clock::time_point> given_up;
  // Counted in looks and not in time, so that being stopped for a while is no silence.
  milliseconds silent{0};
  std::uint64_t beats = 0;
  for (;;) {
    auto message = helper_.channel().receive(static_cast<int>(kAskAgain.count()));
    if (!message && message.error().code == ErrorCode::kProcessGone) {
      (void)helper_.end_after(kEndTimeoutMs);
      const std::string& how = helper_.how_it_ended();
      return lost("the mover process " +
                  (how.empty() ? std::string("closed its connection") : how));
    }
    if (!message) {
      (void)helper_.end();
      return lost("the mover process was ended: " + message.error().message);
    }
    if (*message) return std::move(**message);
    if (pulse != nullptr && silence_.count() != 0) {
      const auto now = pulse->beats.load();
      silent = now != beats || pulse->being_served != 0 ? milliseconds(0) : silent + kAskAgain;
      beats = now;
      if (silent >= silence_) {
        (void)helper_.end();
        was_silent_ = true;
        return lost(
            fmt::format("the mover process did nothing for {} and was ended: the GPU does not "
                        "end a copy, or the driver hangs",
                        format_seconds(silence_)));
      }
    }
    if (!stop.go_on() && !given_up) given_up = Clock::now() + timeout;
    if (!given_up || Clock::now() < *given_up) continue;
    const bool gone = helper_.end();
    return lost(fmt::format("the mover process did not stop and was {} ({})",
                            gone ? "ended" : "left behind, stuck in the kernel",
                            stop.result().error().message));
  }
}

Result<Channel::Message> MoverProcess::answer_at_once(Stop& stop) {
  auto message = answer(stop, milliseconds(0));
  if (message) return message;
  auto why = stop.result();
  return fail(why ? std::move(message.error()) : std::move(why.error()));
}

Result<void> MoverProcess::start_driver(const MoverOptions& options, const Interrupt& interrupt,
                                        Clock::time_point deadline) {
  if (lost_) return fail(*lost_);
  if (stage_ != Stage::kIdle) return {};
  silence_ = options.silence;
  set_fault_mover(helper_.pid());  // if it was not the last to be started
  const Span span(TraceKind::kMover, "start");
  Stop stop(interrupt, deadline, "preparing to copy GPU memory");
  // Why it cannot be sent, the answer tells: the process has ended.
  (void)helper_.channel().send_value(pr::Start{.threads = options.threads,
                                               .ring_bytes = options.ring_bytes,
                                               .buffer_bytes = options.buffer_bytes});
  STASIS_TRY_ASSIGN(auto message, answer_at_once(stop));
  if (auto error = pr::error_of(message.bytes)) return fail(std::move(*error));
  const auto done = message.as<pr::Done>();
  if (!done || message.descriptors.size() != 1) {
    (void)helper_.end();
    return lost("the mover process sent a malformed message");
  }
  // All pages are there: this only enters them in our page tables, while the target still runs.
  auto ring = HostMapping::make(message.descriptors.front(), done->bytes, default_threads(1));
  if (!ring) {
    (void)helper_.end();
    lost_ = ring.error();
    return fail(std::move(ring.error()));
  }
  ring_ = std::move(*ring);
  stage_ = Stage::kStarted;
  return {};
}

Result<void> MoverProcess::prepare(const MoverOptions& options, std::span<const GpuUuid> gpus,
                                   const Interrupt& interrupt, Clock::time_point deadline) {
  STASIS_TRY(start_driver(options, interrupt, deadline));
  if (stage_ == Stage::kPrepared) return {};
  const Span span(TraceKind::kMover, "prepare");
  Stop stop(interrupt, deadline, "preparing to copy GPU memory");
  (void)helper_.channel().send(pr::with_items(pr::Open{.deadline_ns = ns_of(deadline)}, gpus));
  STASIS_TRY_ASSIGN(auto message, answer_at_once(stop));
  if (auto error = pr::error_of(message.bytes)) {
    ring_ = HostMapping();
    stage_ = Stage::kIdle;
    return fail(std::move(*error));
  }
  stage_ = Stage::kPrepared;
  return {};
}

Result<void> MoverProcess::prepare_digests(const Interrupt& interrupt, Clock::time_point deadline) {
  STASIS_TRY(check_prepared());
  const Span span(TraceKind::kMover, "prepare digests");
  Stop stop(interrupt, deadline, "preparing digests on the GPU");
  (void)helper_.channel().send_value(pr::Digests{.deadline_ns = ns_of(deadline)});
  STASIS_TRY_ASSIGN(auto message, answer_at_once(stop));
  auto error = pr::error_of(message.bytes);
  if (!error) return {};
  // Its context may be good for nothing.
  if (error->code != ErrorCode::kNotSupported && error->code != ErrorCode::kOutOfGpuMemory) {
    end();
    lost_ = *error;
  }
  return fail(std::move(*error));
}

Result<void> MoverProcess::send_segments(std::vector<Segment> segments, Stop& stop) {
  for (std::size_t i = 0; i < segments.size(); i += Channel::kMostDescriptors) {
    const std::size_t end = std::min(segments.size(), i + Channel::kMostDescriptors);
    std::vector<pr::Place> places;
    std::vector<UniqueFd> descriptors;
    for (std::size_t j = i; j < end; ++j) {
      places.push_back({segments[j].bytes, segments[j].offset});
      descriptors.push_back(std::move(segments[j].handle));
    }
    STASIS_TRY(send_batch(pr::with_items(pr::Segments{}, std::span<const pr::Place>(places)),
                          descriptors, stop));
  }
  return {};
}

Result<void> MoverProcess::send_files(std::vector<UniqueFd> files, Stop& stop) {
  const pr::Hold hold;
  for (std::size_t i = 0; i < files.size(); i += Channel::kMostDescriptors) {
    const std::size_t count = std::min(files.size() - i, Channel::kMostDescriptors);
    STASIS_TRY(
        send_batch(std::as_bytes(std::span(&hold, 1)), std::span(files).subspan(i, count), stop));
  }
  return {};
}

Result<void> MoverProcess::send_batch(std::span<const std::byte> message,
                                      std::span<const UniqueFd> descriptors, Stop& stop) {
  auto sent = helper_.channel().send(message, descriptors);
  if (!sent && sent.error().code != ErrorCode::kProcessGone) {
    (void)helper_.end();
    lost_ = sent.error();
    return sent;
  }
  // One batch at a time: the kernel limits how many descriptors are on their way.
  STASIS_TRY(answer(stop, kStopTimeout));
  return {};
}

Result<CopyReport> MoverProcess::serve(std::vector<UniqueFd> sockets, Content& content, Stop& stop,
                                       Silence silence) {
  // This keeps it until the threads have ended: losing the process must not take it away from them.
  HostMapping ring = std::move(ring_);
  std::vector<Channel> channels;
  for (UniqueFd& socket : sockets)
    channels.emplace_back(std::move(socket));
  Pulse pulse;
  std::vector<std::thread> threads;
  for (Channel& channel : channels) {
    try {
      threads.emplace_back([&] { serve_content(channel, ring.bytes(), content, stop, pulse); });
    } catch (const std::system_error& error) {
      stop.fail(Error{ErrorCode::kOutOfHostMemory,
                      fmt::format("cannot start a thread to copy with: {}", error.what()),
                      "raise the limit of processes (ulimit -u)"});
      channel.close();  // its copying thread fails, and so do all
    }
  }
  // The channels close on the other side then, and the threads end, unless the process is stuck in
  // the kernel.
  auto message = answer(stop, kStopTimeout, silence == Silence::kEndsIt ? &pulse : nullptr);
  if (!message) {
    for (const Channel& channel : channels)
      channel.shut_down();
  }
  for (std::thread& thread : threads)
    thread.join();
  if (!lost_) ring_ = std::move(ring);
  if (!message) return fail(std::move(message.error()));
  if (auto error = pr::error_of(message->bytes)) {
    if (error->code == ErrorCode::kNoAnswer) {
      // A copy that does not end: only the end of its process lets the memory go.
      (void)helper_.end();
      ring_ = HostMapping();
      lost_ = *error;
      return fail(std::move(*error));
    }
    auto why = stop.result();
    return fail(why ? std::move(*error) : std::move(why.error()));
  }
  const auto done = message->as<pr::Done>();
  if (!done) {
    (void)helper_.end();
    return lost("the mover process sent a malformed message");
  }
  return report_of(*done);
}

Result<CopyReport> MoverProcess::copy(Direction direction, std::vector<Segment> segments,
                                      Content& content, Stop& stop, Clock::time_point deadline) {
  const bool out = direction == Direction::kOut;
  const auto room = std::exchange(keep_, {});
  auto hold = out ? std::vector<UniqueFd>() : std::exchange(hold_, {});
  STASIS_TRY(check_prepared());
  STASIS_TRY(sort_and_check(segments));
  if (segments.empty()) return CopyReport{};
  Span span(TraceKind::kMover, out ? "copy out" : "copy in");
  span.set_bytes(std::accumulate(
      segments.begin(), segments.end(), std::uint64_t{0},
      [](std::uint64_t sum, const Segment& segment) { return sum + segment.bytes; }));
  auto sent = send_files(std::move(hold), stop);
  if (sent) sent = send_segments(std::move(segments), stop);
  STASIS_TRY(std::move(sent));
  const pr::Copy ask{.out = out ? 1U : 0U,
                     .deadline_ns = ns_of(deadline),
                     .digest_chunk = out ? content.digest_chunk() : 0,
                     .zero_chunk = out ? 0 : content.zero_chunk()};
  (void)helper_.channel().send(pr::with_items(ask, std::span<const SpareRoom>(room)));
  auto report = serve(content, stop, Silence::kEndsIt);
  // The bytes that went over the bus.
  if (report) span.set_bytes(report->bytes - report->left_out);
  return report;
}

Result<CopyReport> MoverProcess::prefetch(const std::vector<PrefetchRequest>& requests,
                                          Content& content, const Interrupt& interrupt,
                                          Clock::time_point deadline) {
  STASIS_TRY(check_prepared());
  std::vector<pr::PrefetchPart> parts;
  for (const PrefetchRequest& one : requests) {
    for (const PrefetchRequest::Part& part : one.parts) {
      // The beginning is enough.
      if (parts.size() == pr::kMostPrefetchParts) break;
      parts.push_back({one.gpu, one.room, part.offset, part.bytes});
    }
  }
  Span span(TraceKind::kMover, "prefetch");
  Stop stop(interrupt, deadline, "prefetching GPU memory");
  const pr::PrefetchOf ask{.deadline_ns = ns_of(deadline)};
  (void)helper_.channel().send(pr::with_items(ask, std::span<const pr::PrefetchPart>(parts)));
  // Beside the driver's restore, which may hold the driver up for long; and the operation does not
  // wait for it.
  auto report = serve(content, stop, Silence::kMayBe);
  if (report) span.set_bytes(report->bytes);
  return report;
}

Result<CopyReport> MoverProcess::serve(Content& content, Stop& stop, Silence silence) {
  const Pulse none;  // nothing is asked for while the memory is imported and mapped
  STASIS_TRY_ASSIGN(auto message,
                    answer(stop, kStopTimeout, silence == Silence::kEndsIt ? &none : nullptr));
  if (auto error = pr::error_of(message.bytes)) return fail(std::move(*error));
  // Nothing was to be copied.
  if (const auto done = message.as<pr::Done>()) return report_of(*done);
  if (!message.as<pr::Begin>()) {
    (void)helper_.end();
    return lost("the mover process sent a malformed message");
  }
  return serve(std::move(message.descriptors), content, stop, silence);
}

Result<CopyReport> MoverProcess::copy_out(std::vector<Segment> segments, Content& content,
                                          const Interrupt& interrupt, Clock::time_point deadline) {
  Stop stop(interrupt, deadline, "copying GPU memory out");
  return copy(Direction::kOut, std::move(segments), content, stop, deadline);
}

Result<CopyReport> MoverProcess::copy_in(std::vector<Segment> segments, Content& content,
                                         const Interrupt& interrupt, Clock::time_point deadline) {
  Stop stop(interrupt, deadline, "copying GPU memory back");
  return copy(Direction::kIn, std::move(segments), content, stop, deadline);
}

}  // namespace stasis::direct
