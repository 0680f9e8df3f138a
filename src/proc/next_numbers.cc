#include "proc/next_numbers.h"

#include <fcntl.h>

#include <charconv>
#include <string>
#include <system_error>

#include "base/fd.h"

namespace stasis::proc {
namespace {

constexpr const char* kLast = "/proc/sys/kernel/ns_last_pid";
constexpr const char* kLimit = "/proc/sys/kernel/pid_max";
// More than a restore and what runs beside it on a busy machine take.
constexpr int kEnough = 8192;

// How many numbers are given after `last` before the first of `kept`.
int room_after(int last, const std::set<int>& kept, int limit) {
  const auto next = kept.upper_bound(last);
  if (next != kept.end()) return *next - last - 1;
  const auto first = kept.lower_bound(kLowestNumber);
  const int after_wrap = first == kept.end() ? limit : *first;
  return limit - 1 - last + after_wrap - kLowestNumber;
}

std::optional<int> number_in(const char* path) {
  const auto text = read_file(AT_FDCWD, path, 64);
  if (!text) return std::nullopt;
  int number = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  if (error != std::errc()) return std::nullopt;
  return number;
}

}  // namespace

std::optional<int> number_to_go_on_after(const std::set<int>& kept, int newest, int limit) {
  int most = room_after(newest, kept, limit);
  if (most >= kEnough) return std::nullopt;
  std::optional<int> best;
  for (const int number : kept) {
    const int room = room_after(number, kept, limit);
    if (number >= limit || room <= most) continue;
    most = room;
    best = number;
  }
  return best;
}

Result<void> go_on_after(int number) {
  STASIS_TRY_ASSIGN(const auto file, open_file(AT_FDCWD, kLast, O_WRONLY));
  const std::string text = std::to_string(number);
  return write_all(file.get(), text.data(), text.size(), kLast);
}

void keep_free(const std::set<int>& kept) {
  const auto newest = number_in(kLast);
  const auto limit = number_in(kLimit);
  if (!newest || !limit) return;
  if (const auto number = number_to_go_on_after(kept, *newest, *limit)) (void)go_on_after(*number);
}

}  // namespace stasis::proc
