// A process whose device memory is moved: it makes segments on the simulated GPUs, fills them with
// a pattern, exports them, and knows whether all is as it was. Killed and collected on every path
// out.
//
// Only for tests, whose process never calls the driver itself: a forked child would have none.
#pragma once

#include <sys/mman.h>

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "abi/cuda_abi.h"
#include "base/channel.h"
#include "direct/content.h"
#include "direct/device_calls.h"
#include "driver/library.h"
#include "tests/fakes/child.h"

namespace stasis::direct {

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct Shape {
  int gpu = 0;
  std::uint64_t bytes = 0;
  std::uint64_t offset = 0;
};

// Mixed sizes, in turn on two GPUs, with a hole in the content behind every third.
inline std::vector<Shape> mixed_shapes() {
  std::vector<Shape> out;
  std::uint64_t offset = 0;
  int i = 0;
  for (const std::uint64_t mib : {2U, 6U, 2U, 20U, 4U, 2U, 8U, 2U, 2U, 2U, 10U, 4U}) {
    out.push_back({i % 2, mib * kMiB, offset});
    offset += mib * kMiB + (i % 3 == 2 ? 3 * kMiB : 0);
    ++i;
  }
  return out;
}

inline std::uint64_t content_size(const std::vector<Shape>& shapes) {
  return shapes.empty() ? 0 : shapes.back().offset + shapes.back().bytes;
}

class Target {
 public:
  explicit Target(std::vector<Shape> shapes)
      : shapes_(std::move(shapes)), ends_(connected()), child_([this] { run(ends_->second); }) {
    ends_->second.close();
    EXPECT_EQ(answer(), 1U) << "the target could not make its memory";
  }

  Pid pid() const { return child_.pid(); }
  const std::vector<Shape>& shapes() const { return shapes_; }
  void kill() { child_.become_zombie(); }

  std::vector<Segment> exported() const {
    std::vector<Segment> out;
    EXPECT_TRUE(ends_->first.send_value('e'));
    while (out.size() < shapes_.size()) {
      auto message = ends_->first.receive(10000);
      if (!message || !*message) {
        ADD_FAILURE() << "the target does not export";
        break;
      }
      for (UniqueFd& fd : (*message)->descriptors)
        out.push_back({std::move(fd), shapes_[out.size()].bytes, shapes_[out.size()].offset});
    }
    return out;
  }
  bool verify() const { return ask('v') == 1; }
  bool scramble() const { return ask('s') == 1; }
  // What suspending and resuming do: all is freed; all is made again, with other content.
  // The first answers what both GPUs have in use then.
  std::uint64_t release() const { return ask('r'); }
  bool make_again() const { return ask('m') == 1; }
  // Bytes that both GPUs have in use.
  std::uint64_t in_use() const { return ask('i'); }
  GpuUuid gpu(int ordinal) const {
    EXPECT_TRUE(ends_->first.send_value(ordinal == 0 ? 'a' : 'b'));
    auto message = ends_->first.receive(30000);
    if (!message || !*message) return {};
    return (*message)->as<GpuUuid>().value_or(GpuUuid{});
  }
  // An address of so much private memory.
  std::uint64_t host_memory() const { return ask('h'); }

 private:
  using Handle = cuda::CUmemGenericAllocationHandle;
  struct Made {
    Handle handle = 0;
    cuda::CUdeviceptr at = 0;
  };
  struct Driver {
    DeviceCalls calls;
    cuda::fn::cuMemCreate* create = nullptr;
    cuda::fn::cuMemExportToShareableHandle* export_handle = nullptr;
    cuda::fn::cuMemGetInfo_v2* info = nullptr;
    std::array<cuda::CUcontext, 2> contexts{};
    std::vector<Made> made;
  };

  static std::unique_ptr<std::pair<Channel, Channel>> connected() {
    auto ends = Channel::pair();
    EXPECT_TRUE(ends);
    return std::make_unique<std::pair<Channel, Channel>>(std::move(*ends));
  }
  std::uint64_t ask(char command) const {
    EXPECT_TRUE(ends_->first.send_value(command));
    return answer();
  }
  std::uint64_t answer() const {
    auto message = ends_->first.receive(30000);
    if (!message || !*message) return ~std::uint64_t{0};
    return (*message)->as<std::uint64_t>().value_or(~std::uint64_t{0});
  }

  // --- In the target

  static void must(cuda::CUresult code) {
    if (code != cuda::CUDA_SUCCESS) ::_exit(3);
  }
  // Simulated device memory can be read and written through its address. By pointers, and with no
  // call for a word: this is not optimised, and tests wait for it.
  static std::uint64_t* words(const Made& made) {
    return reinterpret_cast<std::uint64_t*>(made.at);
  }
  static constexpr std::uint64_t kStep = 0xbf58476d1ce4e5b9;  // from word to word
  static std::uint64_t first_word(std::size_t segment) {
    return (segment + 1) * 0x9e3779b97f4a7c15;
  }
  void make(Driver& driver) const {
    for (const Shape& shape : shapes_) {
      cuda::CUmemAllocationProp prop{};
      prop.type = cuda::CU_MEM_ALLOCATION_TYPE_PINNED;
      prop.requestedHandleTypes = cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
      prop.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, shape.gpu};
      Made made;
      must(driver.create(&made.handle, shape.bytes, &prop, 0));
      must(driver.calls.reserve(&made.at, shape.bytes, 0, 0, 0));
      must(driver.calls.map(made.at, shape.bytes, 0, made.handle, 0));
      cuda::CUmemAccessDesc access{};
      access.location = prop.location;
      access.flags = cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      must(driver.calls.set_access(made.at, shape.bytes, &access, 1));
      driver.made.push_back(made);
    }
  }
  void fill(const Driver& driver, bool right) const {
    for (std::size_t s = 0; s < shapes_.size(); ++s) {
      std::uint64_t* to = words(driver.made[s]);
      const std::uint64_t* const end = to + shapes_[s].bytes / 8;
      for (std::uint64_t word = first_word(s); to < end; word += kStep)
        *to++ = right ? word : ~word;
    }
  }
  bool right(const Driver& driver) const {
    for (std::size_t s = 0; s < shapes_.size(); ++s) {
      const std::uint64_t* from = words(driver.made[s]);
      const std::uint64_t* const end = from + shapes_[s].bytes / 8;
      for (std::uint64_t word = first_word(s); from < end; word += kStep)
        if (*from++ != word) return false;
    }
    return true;
  }
  void release(Driver& driver) const {
    for (std::size_t s = 0; s < shapes_.size(); ++s) {
      must(driver.calls.unmap(driver.made[s].at, shapes_[s].bytes));
      must(driver.calls.unreserve(driver.made[s].at, shapes_[s].bytes));
      must(driver.calls.release(driver.made[s].handle));
    }
    driver.made.clear();
  }
  static std::uint64_t in_use(const Driver& driver) {
    std::uint64_t sum = 0;
    for (const cuda::CUcontext context : driver.contexts) {
      std::size_t free = 0;
      std::size_t total = 0;
      must(driver.calls.set_context(context));
      must(driver.info(&free, &total));
      sum += total - free;
    }
    return sum;
  }
  static void send_uuid(const Driver& driver, const Channel& owner, int ordinal) {
    cuda::CUuuid raw{};
    must(driver.calls.uuid(&raw, ordinal));
    GpuUuid uuid;
    std::memcpy(uuid.bytes.data(), raw.bytes, uuid.bytes.size());
    if (!owner.send_value(uuid)) ::_exit(4);
  }
  void send_exports(const Driver& driver, const Channel& owner) const {
    for (std::size_t i = 0; i < driver.made.size();) {
      std::vector<UniqueFd> batch;
      for (; i < driver.made.size() && batch.size() < Channel::kMostDescriptors; ++i) {
        int fd = -1;
        must(driver.export_handle(&fd, driver.made[i].handle,
                                  cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        batch.emplace_back(fd);
      }
      if (!owner.send_value('d', batch)) ::_exit(4);
    }
  }

  void run(const Channel& owner) const {
    auto calls = DeviceCalls::load();
    auto library = load_driver_library();
    if (!calls || !library) ::_exit(2);
    Driver driver;
    driver.calls = *calls;
    driver.create = library->library.function<cuda::fn::cuMemCreate>("cuMemCreate");
    driver.export_handle = library->library.function<cuda::fn::cuMemExportToShareableHandle>(
        "cuMemExportToShareableHandle");
    driver.info = library->library.function<cuda::fn::cuMemGetInfo_v2>("cuMemGetInfo_v2");
    must(driver.calls.init(0));
    for (int gpu = 0; gpu < 2; ++gpu)
      must(driver.calls.retain_context(&driver.contexts[static_cast<std::size_t>(gpu)], gpu));
    must(driver.calls.set_context(driver.contexts[0]));
    make(driver);
    fill(driver, true);
    void* host = nullptr;
    std::uint64_t reply = 1;
    for (;;) {
      if (reply != ~std::uint64_t{0} && !owner.send_value(reply)) ::_exit(0);
      auto message = owner.receive(-1);
      if (!message || !*message) ::_exit(0);
      reply = 1;
      switch ((*message)->as<char>().value_or('?')) {
        case 'i':
          reply = in_use(driver);
          break;
        case 'a':
          send_uuid(driver, owner, 0);
          reply = ~std::uint64_t{0};
          break;
        case 'b':
          send_uuid(driver, owner, 1);
          reply = ~std::uint64_t{0};
          break;
        case 'e':
          send_exports(driver, owner);
          reply = ~std::uint64_t{0};
          break;
        case 's':
          fill(driver, false);
          break;
        case 'v':
          reply = right(driver) ? 1 : 0;
          break;
        case 'r':
          release(driver);
          reply = in_use(driver);
          break;
        case 'm':
          make(driver);
          fill(driver, false);
          break;
        case 'h':
          host = ::mmap(nullptr, content_size(shapes_), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
          reply = reinterpret_cast<std::uint64_t>(host);
          break;
        default:
          ::_exit(5);
      }
    }
  }

  std::vector<Shape> shapes_;
  std::unique_ptr<std::pair<Channel, Channel>> ends_;
  fakes::Child child_;
};

}  // namespace stasis::direct
