// The library's own memory for `new`, apart from the program's malloc.
//
// Why: the restore thread must be able to checkpoint and restore while every other thread of the
// process is stopped by a debugger at an arbitrary instruction; CRIU does exactly that. A thread
// may be stopped inside malloc with its lock held, and then malloc on the restore thread never
// returns.
//
// Inside THIS heap hardly a thread can be stopped: once the process is locked, only the few
// functions that pass all the same (queries) use it. For those few, the restore thread does not
// wait for the lock but takes a mapping of its own, and leaks what it cannot give back.
//
// The operators are hidden symbols (version script), so the program keeps its own.
#include "sim/private_heap.h"

#include <pthread.h>
#include <sys/mman.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <new>

namespace {

constexpr std::size_t kHeader = 16;          // keeps results 16-aligned and holds the class
constexpr std::size_t kChunk = 1 << 20;      // asked of the kernel at once
constexpr std::size_t kLargest = 256 << 10;  // beyond this each block is a mapping of its own
constexpr std::uint64_t kMapped = 0xffff;    // marks such a block, in place of a class

struct FreeBlock {
  FreeBlock* next;
};

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
thread_local bool may_wait = true;

bool take_lock() {
  if (may_wait) return pthread_mutex_lock(&mutex) == 0;
  return pthread_mutex_trylock(&mutex) == 0;
}
FreeBlock* free_blocks[20];
char* chunk;
std::size_t chunk_left;

void* map(std::size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

void* allocate_mapping(std::size_t bytes) {
  bytes = (bytes + 4095) & ~std::size_t{4095};
  auto* head = static_cast<std::uint64_t*>(map(bytes));
  if (!head) return nullptr;
  head[0] = kMapped;
  head[1] = bytes;
  return head + 2;
}

void* allocate(std::size_t bytes) {
  bytes += kHeader;
  if (bytes > kLargest) return allocate_mapping(bytes);
  const std::size_t size = std::bit_ceil(bytes < 32 ? 32 : bytes);
  const int cls = std::countr_zero(size);
  if (!take_lock()) return allocate_mapping(bytes);
  std::uint64_t* head = reinterpret_cast<std::uint64_t*>(free_blocks[cls]);
  if (head) {
    free_blocks[cls] = free_blocks[cls]->next;
  } else {
    if (chunk_left < size) {  // the rest of the old chunk is given up
      chunk = static_cast<char*>(map(kChunk));
      chunk_left = chunk ? kChunk : 0;
    }
    if (chunk) {
      head = reinterpret_cast<std::uint64_t*>(chunk);
      chunk += size;
      chunk_left -= size;
    }
  }
  pthread_mutex_unlock(&mutex);
  if (!head) return nullptr;
  head[0] = static_cast<std::uint64_t>(cls);
  return head + 2;
}

void release(void* p) {
  if (!p) return;
  auto* head = static_cast<std::uint64_t*>(p) - 2;
  if (head[0] == kMapped) {
    munmap(head, head[1]);
    return;
  }
  const auto cls = head[0];
  auto* block = reinterpret_cast<FreeBlock*>(head);
  if (!take_lock()) return;
  block->next = free_blocks[cls];
  free_blocks[cls] = block;
  pthread_mutex_unlock(&mutex);
}

}  // namespace

namespace stasis::sim {
void never_wait_for_the_heap() { may_wait = false; }
}  // namespace stasis::sim

void* operator new(std::size_t bytes) {
  if (void* p = allocate(bytes)) return p;
  throw std::bad_alloc();
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, std::size_t) noexcept { release(p); }
void operator delete[](void* p, std::size_t) noexcept { release(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { release(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { release(p); }
