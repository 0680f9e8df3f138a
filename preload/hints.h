// What the program has said of a piece of managed memory, to be said again when the memory is
// allocated again: advice, prefetches, attachments to streams. Not for two threads at once.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>

#include "driver_calls.h"

namespace stasis::preload {

struct Hint {
  enum class Kind { kAdvice, kPrefetch, kAttach };
  Kind kind = Kind::kAdvice;
  cuda::CUdeviceptr address = 0;
  std::size_t size = 0;
  unsigned what = 0;           // the advice, or the flags of the call
  std::uint64_t location = 0;  // as it was given
  bool is_location = false;    // a CUmemLocation; otherwise a device's ordinal
  cuda::CUstream stream = nullptr;
  cuda::CUcontext context = nullptr;  // the stream's
};

// In the order in which they were said. What a later one takes the place of is left out, page by
// page. A program may say something of each page, so adding takes no look at all of them.
class Hints {
 public:
  Hints() = default;
  Hints(Hints&&) = default;
  Hints& operator=(Hints&&) = default;

  void add(const Hint& hint);
  // Those of which `is_meant` is true.
  template <class IsMeant>
  void forget(IsMeant is_meant) {
    for (auto at = said_.begin(); at != said_.end();) {
      const auto next = std::next(at);
      if (is_meant(*at)) drop(at);
      at = next;
    }
  }

  auto begin() const { return said_.begin(); }
  auto end() const { return said_.end(); }

 private:
  using Said = std::list<Hint>;
  // Hints of which a later one takes an earlier one's place.
  struct Lane {
    Hint::Kind kind = Hint::Kind::kAdvice;
    unsigned advice = 0;
    std::uint64_t location = 0;
    auto operator<=>(const Lane&) const = default;
  };
  using Places = std::map<cuda::CUdeviceptr, Said::iterator>;

  static Lane lane_of(const Hint& hint);
  void make_room(Places& places, cuda::CUdeviceptr begin, cuda::CUdeviceptr end);
  void drop(Said::iterator hint);
  void drop_oldest_prefetch();

  Said said_;
  // By the first page of each; those of one lane do not overlap.
  std::map<Lane, Places> lanes_;
};

}  // namespace stasis::preload
