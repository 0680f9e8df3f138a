// Where the agent's own objects live: the program's heap, and a last piece of memory where that
// gives nothing. A program at its limit of memory (RLIMIT_AS, RLIMIT_DATA) is answered like any
// other: an allocation that cannot be told from here as failed would end it.
//
// The library has the C++ library to itself, so these serve nothing but the agent. Any thread.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

// Pieces of up to so many bytes are given out again: a program that is at its limit may allocate
// and free GPU memory all the time, and each takes some.
constexpr std::size_t kLargestAgain = 1024;
constexpr std::size_t kAlignment = alignof(std::max_align_t);

struct alignas(kAlignment) Head {
  std::size_t bytes;  // of the piece behind it
  Head* next;         // while it is free
};

constexpr std::size_t kLast = std::size_t{256} << 10;
alignas(kAlignment) constinit std::array<std::byte, kLast> g_last{};
constinit std::atomic<std::size_t> g_used{0};
constinit std::array<Head*, kLargestAgain / kAlignment + 1> g_free{};  // by size
constinit std::atomic_flag g_is_changing;

// Not for ever: a child may have been forked while another thread was at it.
bool lock_free_pieces() {
  constexpr int kTries = 1000;
  for (int i = 0; i < kTries; ++i)
    if (!g_is_changing.test_and_set(std::memory_order_acquire)) return true;
  return false;
}
void unlock_free_pieces() { g_is_changing.clear(std::memory_order_release); }

bool is_of_last(const void* at) {
  const auto* const byte = static_cast<const std::byte*>(at);
  return byte >= g_last.data() && byte < g_last.data() + g_last.size();
}

void* take_again(std::size_t bytes) {
  if (bytes > kLargestAgain || !lock_free_pieces()) return nullptr;
  Head*& first = g_free[bytes / kAlignment];
  Head* const head = first;
  if (head != nullptr) first = head->next;
  unlock_free_pieces();
  return head != nullptr ? head + 1 : nullptr;
}

void* take_of_last(std::size_t size) {
  if (size > kLast) return nullptr;
  const std::size_t bytes = (size + kAlignment - 1) / kAlignment * kAlignment;
  if (void* const at = take_again(bytes)) return at;
  const std::size_t begin = g_used.fetch_add(sizeof(Head) + bytes);
  if (begin + sizeof(Head) + bytes > kLast) return nullptr;
  auto* const head = new (g_last.data() + begin) Head{bytes, nullptr};
  return head + 1;
}

void give_to_last(void* at) {
  Head* const head = static_cast<Head*>(at) - 1;
  if (head->bytes > kLargestAgain || !lock_free_pieces()) return;
  Head*& first = g_free[head->bytes / kAlignment];
  head->next = first;
  first = head;
  unlock_free_pieces();
}

}  // namespace

void* operator new(std::size_t size) {
  if (size == 0) size = 1;
  for (;;) {
    if (void* const at = std::malloc(size)) return at;  // NOLINT(cppcoreguidelines-no-malloc)
    const std::new_handler handler = std::get_new_handler();
    if (handler == nullptr) break;
    handler();
  }
  if (void* const at = take_of_last(size)) return at;
  std::abort();
}

void* operator new[](std::size_t size) { return ::operator new(size); }

void operator delete(void* at) noexcept {
  if (is_of_last(at)) return give_to_last(at);
  std::free(at);  // NOLINT(cppcoreguidelines-no-malloc)
}

void operator delete[](void* at) noexcept { ::operator delete(at); }
void operator delete(void* at, std::size_t) noexcept { ::operator delete(at); }
void operator delete[](void* at, std::size_t) noexcept { ::operator delete(at); }
