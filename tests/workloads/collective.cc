// Ranks that sum over all of them, round after round, as a training job does: none gets on before
// all have come to the same round. The sum is part of the device's work: a host function in the
// stream waits for the others. So a rank that is locked holds up the others on their GPUs, and
// locking one after the other waits for ever.
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>

#include "base/fd.h"
#include "tests/workloads/gpu.h"
#include "tests/workloads/meeting.h"
#include "tests/workloads/spawn.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kDefaultWords = 1u << 16;

// As NCCL's ranks do, which is how they are told from outside. With a random number, as NCCL's have
// one: the name is the whole network namespace's, and process numbers repeat in others.
void listen_like_nccl(std::uint32_t rank) {
  std::uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random) programs::die(1, "no random number");
  const std::string name = "tmp/nccl-socket-" + std::to_string(rank) + "-" + std::to_string(random);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket < 0 || ::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    programs::die(1, name + ": " + std::strerror(errno));
  }
}

// Memory that each rank has made and all have mapped, as NCCL's buffers: each writes into its own
// place in that of every other. Twice, by the round: a rank may be one round ahead.
class Exchange {
 public:
  Exchange(const Gpu& gpu, const Options& options, std::uint64_t words)
      : gpu_(gpu), rank_(options.rank), ranks_(options.ranks), words_(words) {
    prop_.type = cuda::CU_MEM_ALLOCATION_TYPE_PINNED;
    prop_.requestedHandleTypes = cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop_.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, gpu.ordinal()};
    if (options.of_host) prop_.location = {cuda::CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
    std::size_t granularity = 0;
    gpu.cuda().cuMemGetAllocationGranularity(&granularity, &prop_,
                                             cuda::CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    bytes_ = 2 * std::uint64_t{ranks_} * words_ * sizeof(std::uint64_t);
    bytes_ = (bytes_ + granularity - 1) / granularity * granularity;
    places_.resize(ranks_);
    cuda::CUmemGenericAllocationHandle own = 0;
    gpu.cuda().cuMemCreate(&own, bytes_, &prop_, 0);
    map(rank_, own);
    meet(options, own);
  }

  void write(cuda::CUstream stream, std::uint32_t to, std::uint64_t round, std::uint64_t seed) {
    gpu_.kernels().fill(stream, place(to, rank_, round), words_, seed);
  }
  Buffer written(std::uint32_t from, std::uint64_t round, std::uint64_t seed) const {
    return {"what rank " + std::to_string(from) + " has written", place(rank_, from, round), words_,
            seed};
  }

 private:
  cuda::CUdeviceptr place(std::uint32_t in, std::uint32_t of, std::uint64_t round) const {
    return places_[in] + (round % 2 * ranks_ + of) * words_ * sizeof(std::uint64_t);
  }

  void map(std::uint32_t rank, cuda::CUmemGenericAllocationHandle handle) {
    const auto& cuda = gpu_.cuda();
    cuda.cuMemAddressReserve(&places_[rank], bytes_, 0, 0, 0);
    cuda.cuMemMap(places_[rank], bytes_, 0, handle, 0);
    const cuda::CUmemAccessDesc access{{cuda::CU_MEM_LOCATION_TYPE_DEVICE, gpu_.ordinal()},
                                       cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    cuda.cuMemSetAccess(places_[rank], bytes_, &access, 1);
  }

  // Each sends a descriptor of its own to all others.
  void meet(const Options& options, cuda::CUmemGenericAllocationHandle own) {
    const int socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const auto mine = address_of(options, rank_);
    if (::bind(socket, reinterpret_cast<const sockaddr*>(&mine), sizeof mine) != 0)
      programs::die(1, std::string("bind: ") + std::strerror(errno));
    for (std::uint32_t to = 0; to < ranks_; ++to) {
      if (to == rank_) continue;
      int fd = -1;
      gpu_.cuda().cuMemExportToShareableHandle(&fd, own,
                                               cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
      send(socket, address_of(options, to), fd);
      ::close(fd);
    }
    for (std::uint32_t got = 1; got < ranks_; ++got) {
      std::uint32_t from = 0;
      const int fd = receive(socket, from);
      cuda::CUmemGenericAllocationHandle handle = 0;
      gpu_.cuda().cuMemImportFromShareableHandle(
          &handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
          cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
      ::close(fd);
      map(from, handle);
      // As NCCL does: the mapping keeps it.
      gpu_.cuda().cuMemRelease(handle);
    }
    ::close(socket);
  }

  static sockaddr_un address_of(const Options& options, std::uint32_t rank) {
    const std::string name = "stasis-exchange-" +
                             std::to_string(std::hash<std::string>()(options.meeting)) + "-" +
                             std::to_string(rank);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    return address;
  }

  struct Control {
    alignas(cmsghdr) char bytes[CMSG_SPACE(sizeof(int))] = {};
  };

  void send(int socket, const sockaddr_un& to, int fd) const {
    std::uint32_t rank = rank_;
    iovec content{&rank, sizeof rank};
    Control control;
    msghdr message{};
    message.msg_name = const_cast<sockaddr_un*>(&to);
    message.msg_namelen = sizeof to;
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    auto* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    // The other may not be there yet.
    while (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
      if (errno != ECONNREFUSED && errno != EINTR)
        programs::die(1, std::string("sendmsg: ") + std::strerror(errno));
      const timespec pause{0, 1000000};
      ::nanosleep(&pause, nullptr);
    }
  }

  static int receive(int socket, std::uint32_t& from) {
    iovec content{&from, sizeof from};
    Control control;
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    int fd = -1;
    while (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) < 0) {
      if (errno != EINTR) programs::die(1, std::string("recvmsg: ") + std::strerror(errno));
    }
    if (const auto* header = CMSG_FIRSTHDR(&message))
      std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
  }

  const Gpu& gpu_;
  std::uint32_t rank_;
  std::uint32_t ranks_;
  std::uint64_t words_;
  cuda::CUmemAllocationProp prop_{};
  std::uint64_t bytes_ = 0;
  std::vector<cuda::CUdeviceptr> places_;
};

class Rank {
 public:
  explicit Rank(Run& run)
      : run_(run),
        rank_(run.options().rank),
        ranks_(run.options().ranks),
        meeting_(Meeting::open(run.options().meeting, rank_, ranks_,
                               run.options().talk ? run.options().status + ".talk" : "")),
        gpu_(Gpu::primary(initialised_driver(run.options()), gpu_of(run.options()))),
        stream_(gpu_.stream()),
        checker_(gpu_, 1 + kMostRanks),
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
    if (run.options().sharing) exchange_.emplace(gpu_, run.options(), buffer_.words);
  }

  // True if all want to stop after this round.
  bool round() {
    const auto& cuda = gpu_.cuda();
    const std::uint64_t number = run_.round();
    if (rank_ != 0) run_.pause_ahead();
    checker_.begin(stream_);
    checker_.advance(stream_, buffer_, seed_of(number, rank_));
    if (exchange_) {
      for (std::uint32_t to = 0; to < ranks_; ++to)
        exchange_->write(stream_, to, number, seed_between(number, rank_, to));
    }
    cuda.cuMemcpyDtoHAsync_v2(mine_, buffer_.data, sizeof(std::uint64_t), stream_);
    cuda.cuLaunchHostFunc(stream_, sum_up, this);
    cuda.cuMemcpyHtoDAsync_v2(sum_, total_, sizeof(std::uint64_t), stream_);
    cuda.cuMemcpyDtoHAsync_v2(answer_, sum_, sizeof(std::uint64_t), stream_);
    // What all have written by now.
    for (std::uint32_t from = 0; exchange_ && from < ranks_; ++from) {
      const std::uint64_t seed = seed_between(number, from, rank_);
      Buffer written = exchange_->written(from, number, seed);
      checker_.advance(stream_, written, seed);
    }
    if (rank_ == 0) run_.pause_ahead();
    checker_.verify(stream_, run_);
    cuda.cuStreamSynchronize(stream_);
    std::uint64_t wanted = 0;
    for (std::uint32_t i = 0; i < ranks_; ++i)
      wanted += word(0, seed_of(number, i));
    if (*answer_ != wanted) run_.mismatch(buffer_.name + ": the sum over all ranks is wrong");
    return all_stop_;
  }

 private:
  static int gpu_of(const Options& options) {
    if (!options.sharing) return 0;
    return static_cast<int>(options.rank) % device_count(initialised_driver(options));
  }

  std::uint64_t seed_between(std::uint64_t round, std::uint32_t from, std::uint32_t to) const {
    return run_.seed(round, 1000 + from * kMostRanks + to);
  }

  // All ranks have the same base seed.
  std::uint64_t seed_of(std::uint64_t round, std::uint32_t rank) const {
    return run_.seed(round, 100 + rank);
  }

  static void sum_up(void* self) { static_cast<Rank*>(self)->meet(); }

  void meet() {
    const auto outcome = meeting_->meet(run_.round(), *mine_, Run::stop_requested());
    *total_ = outcome.total;
    all_stop_ = outcome.stop;
  }

  Run& run_;
  std::uint32_t rank_;
  std::uint32_t ranks_;
  std::unique_ptr<Meeting> meeting_;
  Gpu gpu_;
  cuda::CUstream stream_;
  Checker checker_;
  Buffer buffer_;
  cuda::CUdeviceptr sum_ = 0;
  std::uint64_t* mine_ = nullptr;    // pinned, as are
  std::uint64_t* total_ = nullptr;   //
  std::uint64_t* answer_ = nullptr;  //
  std::optional<Exchange> exchange_;
  bool all_stop_ = false;  // written by the host function, read after the stream is done
};

}  // namespace

void run_collective(Run& run) {
  const Options& options = run.options();
  // The ranks' sockets are named after it: what runs in another folder must not meet them.
  const std::string file = std::filesystem::absolute(options.status).string() + ".meeting";
  make_meeting(file);
  std::vector<std::vector<std::string>> ranks;
  for (std::uint32_t i = 0; i < options.children; ++i) {
    ranks.push_back({"rank", "--meeting", file, "--rank", std::to_string(i), "--ranks",
                     std::to_string(options.children), "--seed", std::to_string(run.seed(0))});
    if (options.ahead_ms > 0) {
      ranks.back().emplace_back("--ahead-ms");
      ranks.back().push_back(std::to_string(options.ahead_ms));
    }
    if (options.like_nccl) ranks.back().emplace_back("--like-nccl");
    if (options.sharing) ranks.back().emplace_back("--sharing");
    if (options.of_host) ranks.back().emplace_back("--of-host");
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
