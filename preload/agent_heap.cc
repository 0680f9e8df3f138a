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

// What all commands need before the agent makes its reserve (host_reserve.h) is some hundred bytes.
constexpr std::size_t kLast = std::size_t{256} << 10;
alignas(std::max_align_t) constinit std::array<std::byte, kLast> g_last{};
constinit std::atomic<std::size_t> g_used{0};

bool is_of_last(const void* at) {
  const auto* const byte = static_cast<const std::byte*>(at);
  return byte >= g_last.data() && byte < g_last.data() + g_last.size();
}

// Never given out twice: the program is about to fail at its own allocations.
void* take_of_last(std::size_t size) {
  constexpr std::size_t kAlignment = alignof(std::max_align_t);
  if (size > kLast) return nullptr;
  const std::size_t whole = (size + kAlignment - 1) / kAlignment * kAlignment;
  const std::size_t begin = g_used.fetch_add(whole);
  return begin + whole <= kLast ? g_last.data() + begin : nullptr;
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
  if (!is_of_last(at)) std::free(at);  // NOLINT(cppcoreguidelines-no-malloc)
}

void operator delete[](void* at) noexcept { ::operator delete(at); }
void operator delete(void* at, std::size_t) noexcept { ::operator delete(at); }
void operator delete[](void* at, std::size_t) noexcept { ::operator delete(at); }
