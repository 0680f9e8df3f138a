#include "direct/mover_server.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "abi/fd_table.h"
#include "base/fd.h"
#include "base/interrupt.h"
#include "direct/mover.h"
#include "direct/mover_protocol.h"

namespace stasis::direct {
namespace {

namespace pr = protocol;

constexpr int kDescriptorRoom = 4096;

Clock::time_point time_of(std::int64_t ns) {
  return Clock::time_point(
      std::chrono::duration_cast<Clock::duration>(std::chrono::nanoseconds(ns)));
}

// The owner's Content, as one copying thread uses it.
class OwnersContent final : public Content {
 public:
  OwnersContent(const Ring& ring, Channel channel) : ring_(&ring), channel_(std::move(channel)) {}

  Result<void> write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    return ask(pr::PieceOf::kWrite, offset, bytes);
  }
  Result<void> read(std::uint64_t offset, std::span<std::byte> bytes) override {
    return ask(pr::PieceOf::kRead, offset, bytes);
  }
  Result<void> deduplicate(std::uint64_t offset, std::span<std::byte> digests) override {
    return ask(pr::PieceOf::kDigests, offset, digests);
  }
  Result<void> zeros(std::uint64_t offset, std::span<std::byte> flags) override {
    return ask(pr::PieceOf::kZeros, offset, flags);
  }

 private:
  Result<void> ask(pr::PieceOf what, std::uint64_t offset, std::span<const std::byte> bytes) const {
    const pr::Piece piece{.what = what,
                          .ring_offset = ring_->offset_of(bytes.data()),
                          .content_offset = offset,
                          .bytes = bytes.size()};
    STASIS_TRY(channel_.send_value(piece));
    STASIS_TRY_ASSIGN(auto answer, channel_.receive(-1));
    const auto done = answer ? answer->as<pr::PieceDone>() : std::nullopt;
    // The owner knows the reason itself.
    if (!done || done->ok == 0) return fail(ErrorCode::kInternal, "the content was refused");
    return {};
  }

  const Ring* ring_;
  Channel channel_;
};

// Where memory runs out the kernel kills this process and not the program, which may be larger and
// of the same memory cgroup: no program is lost with the mover.
void be_killed_first() {
  constexpr std::string_view kMost = "1000";
  const char* path = "/proc/self/oom_score_adj";
  if (auto file = open_file(AT_FDCWD, path, O_WRONLY))
    (void)write_all(file->get(), kMost.data(), kMost.size(), path);
}

class Server {
 public:
  explicit Server(const Channel& owner) : owner_(&owner) {}

  // False: the owner is gone, or has broken the protocol.
  bool serve_one() {
    auto message = owner_->receive(-1);
    if (!message || !*message) return false;
    const auto kind = pr::kind_of((*message)->bytes);
    if (kind == pr::Kind::kStart) return start(**message);
    if (kind == pr::Kind::kOpen) return open(**message);
    if (kind == pr::Kind::kSegments) return segments(**message);
    if (kind == pr::Kind::kHold) return hold(**message);
    if (kind == pr::Kind::kDigests) return digests(**message);
    if (kind == pr::Kind::kCopy) return copy(**message);
    if (kind == pr::Kind::kPrefetch) return prefetch(**message);
    return false;
  }

 private:
  bool say(const Error& error) const { return owner_->send(pr::failed(error)).has_value(); }
  bool say(const pr::Done& done, std::span<const UniqueFd> descriptors = {}) const {
    return owner_->send_value(done, descriptors).has_value();
  }

  bool start(const Channel::Message& message) {
    const auto ask = message.as<pr::Start>();
    if (!ask || mover_) return false;
    const MoverOptions options{
        .threads = ask->threads, .ring_bytes = ask->ring_bytes, .buffer_bytes = ask->buffer_bytes};
    auto mover = Mover::start(options);
    if (!mover) return say(mover.error());
    mover_.emplace(std::move(*mover));
    const Ring& ring = mover_->ring();
    UniqueFd file(::dup(ring.file().get()));
    return say(pr::Done{.bytes = ring.chunk_bytes() * ring.chunks()}, std::span(&file, 1));
  }

  bool open(const Channel::Message& message) {
    pr::Open ask;
    std::vector<GpuUuid> gpus;
    if (!pr::take_items(message.bytes, ask, gpus) || !mover_ || opened_) return false;
    auto opened = mover_->open(gpus, never_, time_of(ask.deadline_ns));
    opened_ = opened.has_value();
    // An owner that does without a mover has use for that memory, and no context may be left.
    if (!opened) mover_.reset();
    return opened ? say(pr::Done{}) : say(opened.error());
  }

  bool segments(Channel::Message& message) {
    pr::Segments ask;
    std::vector<pr::Place> places;
    if (!pr::take_items(message.bytes, ask, places)) return false;
    if (places.size() != message.descriptors.size()) return false;
    for (std::size_t i = 0; i < places.size(); ++i) {
      segments_.push_back({std::move(message.descriptors[i]), places[i].bytes, places[i].offset});
    }
    return say(pr::Done{});
  }

  bool hold(Channel::Message& message) {
    if (!mover_) return false;
    std::vector<UniqueFd> files = std::move(message.descriptors);
    // Should this process be killed, the GPUs are closed first, and what they do has ended then:
    // the kernel closes descriptors in the order of their numbers. Where such a number may not be
    // had (`ulimit -n`), it is held all the same.
    for (UniqueFd& file : files) {
      UniqueFd late(::fcntl(file.get(), F_DUPFD_CLOEXEC, kDescriptorRoom / 2));
      if (late.valid()) file = std::move(late);
    }
    mover_->hold(std::move(files));
    return say(pr::Done{});
  }

  bool digests(const Channel::Message& message) {
    const auto ask = message.as<pr::Digests>();
    if (!ask || !opened_) return false;
    auto ready = mover_->prepare_digests(never_, time_of(ask->deadline_ns));
    return ready ? say(pr::Done{}) : say(ready.error());
  }

  bool copy(const Channel::Message& message) {
    pr::Copy ask;
    std::vector<SpareRoom> room;
    if (!pr::take_items(message.bytes, ask, room) || !opened_) return false;
    std::vector<OwnersContent> contents;
    auto served_by = served(contents);
    served_by.digest_chunk = ask.digest_chunk;
    served_by.zero_chunk = ask.zero_chunk;
    mover_->keep(std::move(room));
    const auto direction = ask.out != 0 ? Direction::kOut : Direction::kIn;
    auto report = mover_->copy(direction, std::exchange(segments_, {}), served_by, never_,
                               time_of(ask.deadline_ns));
    const bool said = say(report);
    // The owner need not wait for it.
    if (direction == Direction::kIn) mover_->drop_prefetched();
    return said;
  }

  bool prefetch(const Channel::Message& message) {
    pr::PrefetchOf ask;
    std::vector<pr::PrefetchPart> parts;
    if (!pr::take_items(message.bytes, ask, parts) || !opened_) return false;
    std::vector<PrefetchRequest> requests;
    for (const pr::PrefetchPart& part : parts) {
      if (requests.empty() || requests.back().gpu != part.gpu)
        requests.push_back({part.gpu, part.room, {}});
      requests.back().parts.push_back({part.offset, part.bytes});
    }
    std::vector<OwnersContent> contents;
    return say(mover_->prefetch(requests, served(contents), never_, time_of(ask.deadline_ns)));
  }

  Mover::Contents served(std::vector<OwnersContent>& contents) const {
    return {[this, &contents](unsigned threads) { return begin(threads, contents); },
            [&contents](unsigned i) -> Content& { return contents[i]; }, 0, 0};
  }
  bool say(const Result<CopyReport>& report) const {
    if (!report) return say(report.error());
    return say(pr::Done{.bytes = report->bytes,
                        .seconds = report->seconds.count(),
                        .map_seconds = report->map_seconds.count(),
                        .left_out = report->left_out});
  }

  Result<void> begin(unsigned threads, std::vector<OwnersContent>& contents) const {
    if (threads > Channel::kMostDescriptors) {
      return fail(ErrorCode::kUsage, std::to_string(threads) + " threads are too many to copy with",
                  "take at most " + std::to_string(Channel::kMostDescriptors) + " for all GPUs");
    }
    std::vector<UniqueFd> theirs;
    for (unsigned i = 0; i < threads; ++i) {
      STASIS_TRY_ASSIGN(auto ends, Channel::pair());
      contents.emplace_back(mover_->ring(), std::move(ends.first));
      theirs.push_back(ends.second.take());
    }
    return owner_->send_value(pr::Begin{}, theirs);
  }

  const Channel* owner_;
  Interrupt never_;  // the owner looks at its own, and refuses content
  std::optional<Mover> mover_;
  bool opened_ = false;
  std::vector<Segment> segments_;
};

// By default what the driver compiles is in the home directory, which may be far away.
void keep_compiled_code_in(const std::string& directory) {
  (void)::setenv("CUDA_CACHE_DISABLE", directory.empty() ? "1" : "0", 1);
  (void)::setenv("CUDA_CACHE_PATH", directory.c_str(), 1);
  (void)::setenv("CUDA_CACHE_MAXSIZE", "16777216", 1);
}

// An owner that is killed is seen at the channel, so that the contexts are closed. Only where the
// driver hangs does the process end without. One that was not to end with its owner's thread
// (HelperProcess::start_program()) has nothing to outlive.
void outlive_owner_for_a_moment() {
  constexpr unsigned kMomentSeconds = 10;
  int signal_number = 0;
  if (::prctl(PR_GET_PDEATHSIG, &signal_number) != 0 || signal_number == 0) return;
  ::signal(SIGALRM, SIG_DFL);
  struct sigaction action {};
  action.sa_handler = [](int) { ::alarm(kMomentSeconds); };
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR1, &action, nullptr);
  ::prctl(PR_SET_PDEATHSIG, SIGUSR1);
}

}  // namespace

void serve_mover(const Channel& owner, const std::string& cache) {
  outlive_owner_for_a_moment();
  be_killed_first();
  see_every_gpu();
  keep_compiled_code_in(cache);
  // Channels to the GPU are most of what a context costs, and the driver makes 20 where four will
  // do (docs/results/2026-11-23-acceptance.md).
  (void)::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  // A job may have thousands of allocations, each a descriptor.
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &limit);
  }
  make_descriptor_room(kDescriptorRoom);
  {
    Server server(owner);
    while (server.serve_one()) {
    }
  }
  ::_exit(0);
}

}  // namespace stasis::direct
