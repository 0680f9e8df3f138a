#include "direct/ring.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include <fmt/format.h>

#include "base/threads.h"
#include "base/units.h"

namespace stasis::direct {
namespace {

constexpr std::size_t kTouchStep = std::size_t{16} << 20;

// Since Linux 5.14, unknown to older headers.
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE

bool populate(std::span<std::byte> bytes) {
  const auto done = TEMP_FAILURE_RETRY(::madvise(bytes.data(), bytes.size(), kPopulateWrite));
  if (done == 0) return true;
  if (errno != EINVAL) return false;
  for (std::size_t at = 0; at < bytes.size(); at += kPage)
    *const_cast<volatile std::byte*>(&bytes[at]) = std::byte{0};
  return true;
}

}  // namespace

Result<HostMapping> HostMapping::make(const UniqueFd& file, std::size_t bytes, unsigned threads) {
  const int flags = file.valid() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* got = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file.get(), 0);
  const auto refused = [&](int number) {
    Error error =
        errno_error("cannot get " + format_bytes(bytes) + " of memory to copy through", number);
    error.code = ErrorCode::kOutOfHostMemory;
    error.remedy =
        "free host memory, raise the limit (ulimit -v), or take less of it (--ring 8M); --path "
        "driver needs none";
    return stasis::fail(std::move(error));
  };
  if (got == MAP_FAILED) return refused(errno);
  HostMapping mapping({static_cast<std::byte*>(got), bytes});
  // Only advice: where the kernel has no huge pages, small ones do. For shared memory it counts if
  // /sys/kernel/mm/transparent_hugepage/shmem_enabled says "advise".
  (void)::madvise(got, bytes, MADV_HUGEPAGE);
  // A forked child of ours must not keep it, nor copy it.
  (void)::madvise(got, bytes, MADV_DONTFORK);
  std::atomic<std::size_t> next{0};
  std::atomic<int> error{0};
  (void)on_threads(threads, [&](unsigned) {
    for (;;) {
      const std::size_t at = next.fetch_add(kTouchStep);
      if (at >= bytes || error != 0) return;
      if (!populate(mapping.bytes().subspan(at, std::min(kTouchStep, bytes - at)))) error = errno;
    }
  });
  if (error != 0) return refused(error);
  return mapping;
}

HostMapping& HostMapping::operator=(HostMapping&& other) noexcept {
  if (this != &other) {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

HostMapping::~HostMapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

Result<Ring> Ring::make(std::size_t chunk_bytes, unsigned chunks, unsigned threads) {
  Ring ring;
  ring.chunk_bytes_ = chunk_bytes;
  ring.count_ = chunks;
  const std::size_t bytes = chunk_bytes * chunks;
  ring.file_ = UniqueFd(::memfd_create("stasis-ring", MFD_CLOEXEC));
  if (!ring.file_.valid() || ::ftruncate(ring.file_.get(), static_cast<off_t>(bytes)) != 0)
    return stasis::fail(errno_error("cannot create memory to share", errno));
  STASIS_TRY_ASSIGN(auto memory, HostMapping::make(ring.file_, bytes, threads));
  ring.memory_ = std::move(memory);
  return ring;
}

Result<void> Ring::pin(const DeviceCalls& calls, cuda::CUcontext context, unsigned threads,
                       Stop& stop) {
  calls_ = &calls;
  context_ = context;
  std::atomic<unsigned> next{0};
  std::mutex mutex;
  const auto out_of_memory = [&](cuda::CUresult code, const char* call) {
    Error error = calls.error(
        code, call, fmt::format("pin {} of host memory", format_bytes(chunk_bytes_ * count_)));
    if (error.code == ErrorCode::kOutOfGpuMemory) {
      error.code = ErrorCode::kOutOfHostMemory;
      error.remedy =
          "free host memory, raise the limit (ulimit -v), or take less of it (--ring 8M); --path "
          "driver needs none";
    }
    stop.fail(std::move(error));
  };
  (void)on_threads(threads, [&](unsigned) {
    if (auto code = calls.set_context(context); code != cuda::CUDA_SUCCESS) {
      return stop.fail(calls.error(code, "cuCtxSetCurrent", "use a GPU"));
    }
    while (stop.go_on()) {
      const unsigned index = next.fetch_add(1);
      if (index >= count_) return;
      std::byte* at = memory_.bytes().data() + std::size_t{index} * chunk_bytes_;
      const auto code = calls.register_host(at, chunk_bytes_, cuda::kMemHostRegisterPortable);
      if (code != cuda::CUDA_SUCCESS) return out_of_memory(code, "cuMemHostRegister");
      const std::scoped_lock lock(mutex);
      chunks_.emplace_back(at, chunk_bytes_);
    }
  });
  auto done = stop.result();
  if (!done) unpin();
  return done;
}

void Ring::unpin() {
  if (chunks_.empty()) return;
  (void)calls_->set_context(context_);
  for (const std::span<std::byte>& chunk : std::exchange(chunks_, {}))
    (void)calls_->unregister_host(chunk.data());
}

}  // namespace stasis::direct
