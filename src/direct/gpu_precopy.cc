#include "direct/gpu_precopy.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/scope_guard.h"
#include "base/units.h"

namespace stasis {

using direct::AgentClient;

namespace {

// How long a program that frees memory waits until the tool has seen it.
constexpr std::chrono::milliseconds kPoll{1};
// Of less, it does not matter what was copied in vain.
constexpr std::uint64_t kPrecopyTold = 64ULL << 20;

constexpr const char* kCopiedLater = "the rest is copied while the job stands still";

// Nothing of the image or the program, which another mover would meet as well.
bool is_of_mover_alone(ErrorCode code) {
  return code == ErrorCode::kNoAnswer || code == ErrorCode::kDriverError;
}

// Stores chunks under their digests; where they are is not known before the programs stand still.
class Store final : public direct::Content {
 public:
  explicit Store(ImageContent& image) : image_(image) {}

  Result<void> write(std::uint64_t, std::span<const std::byte> bytes) override {
    return image_.precopy(bytes.first(bytes.size() - bytes.size() % image_.digest_chunk()));
  }
  Result<void> read(std::uint64_t, std::span<std::byte>) override {
    return fail(ErrorCode::kInternal, "what is pre-copied is not read");
  }
  std::uint64_t digest_chunk() const override { return image_.digest_chunk(); }
  Result<void> deduplicate(std::uint64_t, std::span<std::byte> digests) override {
    image_.mark_known(digests);
    return {};
  }

 private:
  ImageContent& image_;
};

}  // namespace

bool is_worth_precopying(const Environment& env, const IntoImage& image, std::uint64_t bytes) {
  // What a base has is told by digests when the programs stand still, and the rest is little.
  if (!image.precopy || image.options.base != nullptr || bytes < image.precopy->least) return false;
  struct statvfs room {};
  if (::fstatvfs(image.image_dir.get(), &room) != 0) return false;
  const std::uint64_t needed = std::max(image.precopy->image_bytes, bytes) + bytes;
  const std::uint64_t free_bytes = room.f_bavail * room.f_frsize;
  if (free_bytes >= needed) return true;
  env.tell(
      fmt::format("the GPU memory is copied while the job stands still: to pre-copy it takes {} "
                  "of room for the image, and {} are free",
                  format_bytes(needed), format_bytes(free_bytes)));
  return false;
}

std::chrono::milliseconds precopy_time(std::uint64_t bytes) {
  const char* const given = std::getenv("STASIS_PRECOPY_MS");
  int milliseconds = 0;
  if (given != nullptr &&
      std::from_chars(given, given + std::strlen(given), milliseconds).ec == std::errc{})
    return std::chrono::milliseconds(milliseconds);
  return kSlowDisk * direct::copy_time(bytes);
}

Result<std::optional<GpuPrecopy>> GpuPrecopy::begin(AgentSet& agents) {
  GpuPrecopy precopy(agents);
  for (AgentClient& agent : agents) {
    if (!agent.begin_precopy()) return std::optional<GpuPrecopy>();
    STASIS_TRY_ASSIGN(auto taken, take_checked(agent, false, nullptr));
    append(precopy.segments_, std::move(taken), precopy.bytes_);
    precopy.bytes_ += agent.bytes();
  }
  return std::optional<GpuPrecopy>(std::move(precopy));
}

GpuPrecopy::GpuPrecopy(GpuPrecopy&& other) noexcept
    : agents_(std::exchange(other.agents_, nullptr)),
      segments_(std::move(other.segments_)),
      bytes_(other.bytes_) {}

GpuPrecopy::~GpuPrecopy() { end(); }

void GpuPrecopy::end() {
  segments_.clear();
  if (agents_ == nullptr) return;
  for (AgentClient& agent : *agents_)
    agent.end_precopy();
  agents_ = nullptr;
}

Result<void> GpuPrecopy::run(const Environment& env, MoverLease& mover, ImageContent& image) {
  Interrupt stop;
  bool frees = false;
  std::jthread watch([&](const std::stop_token& done) {
    while (!done.stop_requested()) {
      frees = frees || std::any_of(agents_->begin(), agents_->end(), [](const AgentClient& agent) {
                return agent.wants_its_memory() || !agent.pidfd().alive();
              });
      if (frees || !env.interrupt.check()) return stop.request(SIGTERM);
      std::this_thread::sleep_for(kPoll);
    }
  });
  Store store(image);
  const auto time = precopy_time(bytes_);
  auto copied = mover->copy_out(std::move(segments_), store, stop, Clock::now() + time);
  watch.request_stop();
  watch.join();
  const bool any_ended =
      std::any_of(agents_->begin(), agents_->end(),
                  [](const AgentClient& agent) { return !agent.pidfd().alive(); });
  end();
  STASIS_TRY(env.interrupt.check());
  if (copied || any_ended) return {};
  if (copied.error().code == ErrorCode::kTimeout) {
    env.tell(fmt::format("the GPU memory is not pre-copied after {:g} s: {}", Seconds(time).count(),
                         kCopiedLater));
    return {};
  }
  // A GPU at which one mover has hung is left to the driver: another would hang as long.
  if (is_of_mover_alone(copied.error().code) && !mover->was_silent()) {
    env.tell(fmt::format("the GPU memory could not be pre-copied ({}): {}",
                         copied.error().to_string(), kCopiedLater));
    STASIS_TRY(mover.replace(env));
    return mover.prepare_digests(env);
  }
  if (!frees) return fail(of_mover(std::move(copied.error()), true));
  env.tell(
      fmt::format("the program has freed GPU memory while that was pre-copied: {}", kCopiedLater));
  return {};
}

void tell_of_changes(const Environment& env, const ImageContent& image) {
  const std::uint64_t before = image.stored_before_bytes();
  const std::uint64_t same = std::min(image.precopied_bytes(), before);
  if (before - same <= before / 4 * 3 || before < kPrecopyTold) return;
  env.tell(
      fmt::format("the job changes its GPU memory as fast as it is pre-copied ({} of {} "
                  "meanwhile): that was copied while the job stood still",
                  format_bytes(before - same), format_bytes(before)));
}

}  // namespace stasis
