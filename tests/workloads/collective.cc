// Ranks that sum over all of them, round after round, as a training job does: none gets on before
// all have come to the same round. The sum is part of the device's work: a host function in the
// stream waits for the others. So a rank that is locked holds up the others on their GPUs, and
// locking one after the other waits for ever.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>

#include "base/fd.h"
#include "tests/workloads/gpu.h"
#include "tests/workloads/spawn.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kDefaultWords = 1u << 16;
constexpr std::size_t kMostRanks = 64;

// What the ranks share: a file, so that it is theirs also after exec and in an image.
struct Meeting {
  // How many have come to any round. Nobody comes to a round before all have left the one before
  // the last, so two sets of places do.
  std::atomic<std::uint64_t> arrived;
  std::array<std::array<std::atomic<std::uint64_t>, kMostRanks>, 2> values;
  std::array<std::array<std::atomic<bool>, kMostRanks>, 2> wants_to_stop;
};

Meeting* meeting_at(const std::string& path, int flags) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0600);
  if (file < 0 || ::ftruncate(file, sizeof(Meeting)) != 0) {
    programs::die(1, path + ": " + std::strerror(errno));
  }
  void* memory = ::mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (memory == MAP_FAILED) programs::die(1, path + ": " + std::strerror(errno));
  return static_cast<Meeting*>(memory);
}

// As NCCL's ranks do, which is how they are told from outside.
void listen_like_nccl(std::uint32_t rank) {
  const std::string name =
      "tmp/nccl-socket-" + std::to_string(rank) + "-" + std::to_string(::getpid());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket < 0 || ::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    programs::die(1, name + ": " + std::strerror(errno));
  }
}

class Rank {
 public:
  explicit Rank(Run& run)
      : run_(run),
        rank_(run.options().rank),
        ranks_(run.options().ranks),
        meeting_(meeting_at(run.options().meeting, 0)),
        gpu_(Gpu::primary(initialised_driver(run.options()), 0)),
        stream_(gpu_.stream()),
        checker_(gpu_, 1),
        buffer_{"rank " + std::to_string(rank_), 0, kDefaultWords, seed_of(0, rank_)} {
    buffer_.words = run.size_or(kDefaultWords * sizeof(std::uint64_t)) / sizeof(std::uint64_t);
    buffer_.data = gpu_.allocate(buffer_.bytes());
    sum_ = gpu_.allocate(sizeof(std::uint64_t));
    void* pinned = nullptr;
    gpu_.cuda().cuMemAllocHost_v2(&pinned, 3 * sizeof(std::uint64_t));
    mine_ = static_cast<std::uint64_t*>(pinned);
    total_ = mine_ + 1;
    answer_ = mine_ + 2;
    gpu_.kernels().fill(stream_, buffer_.data, buffer_.words, buffer_.seed);
    gpu_.cuda().cuStreamSynchronize(stream_);
  }

  // True if all want to stop after this round.
  bool round() {
    const auto& cuda = gpu_.cuda();
    const std::uint64_t number = run_.round();
    checker_.begin(stream_);
    checker_.advance(stream_, buffer_, seed_of(number, rank_));
    cuda.cuMemcpyDtoHAsync_v2(mine_, buffer_.data, sizeof(std::uint64_t), stream_);
    cuda.cuLaunchHostFunc(stream_, sum_up, this);
    cuda.cuMemcpyHtoDAsync_v2(sum_, total_, sizeof(std::uint64_t), stream_);
    cuda.cuMemcpyDtoHAsync_v2(answer_, sum_, sizeof(std::uint64_t), stream_);
    checker_.verify(stream_, run_);
    cuda.cuStreamSynchronize(stream_);
    std::uint64_t wanted = 0;
    for (std::uint32_t i = 0; i < ranks_; ++i)
      wanted += word(0, seed_of(number, i));
    if (*answer_ != wanted) run_.mismatch(buffer_.name + ": the sum over all ranks is wrong");
    return all_stop_;
  }

 private:
  // All ranks have the same base seed.
  std::uint64_t seed_of(std::uint64_t round, std::uint32_t rank) const {
    return run_.seed(round, 100 + rank);
  }

  static void sum_up(void* self) { static_cast<Rank*>(self)->meet(); }

  void meet() {
    const std::uint64_t number = run_.round();
    auto& values = meeting_->values[number % 2];
    auto& stops = meeting_->wants_to_stop[number % 2];
    values[rank_] = *mine_;
    stops[rank_] = Run::stop_requested();
    ++meeting_->arrived;
    while (meeting_->arrived < number * ranks_) {
      const timespec pause{0, 50000};
      ::nanosleep(&pause, nullptr);
    }
    *total_ = 0;
    all_stop_ = false;
    for (std::uint32_t i = 0; i < ranks_; ++i) {
      *total_ += values[i];
      all_stop_ = all_stop_ || stops[i];
    }
  }

  Run& run_;
  std::uint32_t rank_;
  std::uint32_t ranks_;
  Meeting* meeting_;
  Gpu gpu_;
  cuda::CUstream stream_;
  Checker checker_;
  Buffer buffer_;
  cuda::CUdeviceptr sum_ = 0;
  std::uint64_t* mine_ = nullptr;    // pinned, as are
  std::uint64_t* total_ = nullptr;   //
  std::uint64_t* answer_ = nullptr;  //
  bool all_stop_ = false;            // written by the host function, read after the stream is done
};

}  // namespace

void run_collective(Run& run) {
  const Options& options = run.options();
  const std::string file = options.status + ".meeting";
  ::munmap(meeting_at(file, O_CREAT | O_TRUNC), sizeof(Meeting));
  std::vector<std::vector<std::string>> ranks;
  for (std::uint32_t i = 0; i < options.children; ++i) {
    ranks.push_back({"rank", "--meeting", file, "--rank", std::to_string(i), "--ranks",
                     std::to_string(options.children), "--seed", std::to_string(run.seed(0))});
    if (options.like_nccl) ranks.back().emplace_back("--like-nccl");
  }
  supervise(run, ranks);
}

void run_rank(Run& run) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // it would wait for the others for ever
  if (run.options().like_nccl) listen_like_nccl(run.options().rank);
  Rank rank(run);
  for (bool last = false; !last;) {
    run.begin();
    last = rank.round();
    run.finish();
  }
}

}  // namespace stasis::workloads
