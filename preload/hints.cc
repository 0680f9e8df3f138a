#include "hints.h"

#include <algorithm>
#include <iterator>

#include "pages.h"

namespace stasis::preload {

using namespace cuda;  // NOLINT(google-build-using-namespace)

namespace {

// A program may bring small parts to a device, each time others: the oldest are forgotten.
constexpr std::size_t kMostPrefetches = 512;

// The driver takes all pages that a range touches.
CUdeviceptr first_page(const Hint& hint) { return hint.address / kPage * kPage; }
CUdeviceptr behind_pages(const Hint& hint) {
  return (hint.address + hint.size + kPage - 1) / kPage * kPage;
}

// A CUmemLocation as a number: its type in the lower half.
std::uint64_t place_of(const Hint& hint) {
  if (hint.is_location) return hint.location;
  const auto device = static_cast<CUdevice>(hint.location);
  if (device == kDeviceCpu) return CU_MEM_LOCATION_TYPE_HOST;
  return CU_MEM_LOCATION_TYPE_DEVICE | std::uint64_t{static_cast<std::uint32_t>(device)} << 32;
}

}  // namespace

Hints::Lane Hints::lane_of(const Hint& hint) {
  if (hint.kind != Hint::Kind::kAdvice) return {hint.kind, 0, 0};
  // Each advice is said and taken back by neighbours: 1 and 2, 3 and 4, 5 and 6.
  const unsigned advice = (hint.what + 1) / 2;
  const bool by_place = advice == CU_MEM_ADVISE_UNSET_ACCESSED_BY / 2;
  return {hint.kind, advice, by_place ? place_of(hint) : 0};
}

// What is known of the pages goes, and what it says of others stays in its place.
void Hints::make_room(Places& places, CUdeviceptr begin, CUdeviceptr end) {
  auto at = places.upper_bound(begin);
  if (at != places.begin() && behind_pages(*std::prev(at)->second) > begin) at = std::prev(at);
  while (at != places.end() && at->first < end) {
    const auto known = at->second;
    const auto known_begin = at->first;
    at = places.erase(at);
    if (behind_pages(*known) > end) {
      Hint rest = *known;
      rest.size = rest.address + rest.size - end;
      rest.address = end;
      places.emplace(end, said_.insert(std::next(known), rest));
    }
    if (known_begin < begin) {
      known->size = begin - known->address;
      places.emplace(known_begin, known);
    } else {
      said_.erase(known);
    }
  }
}

void Hints::drop(Said::iterator hint) {
  const auto lane = lanes_.find(lane_of(*hint));
  lane->second.erase(first_page(*hint));
  if (lane->second.empty()) lanes_.erase(lane);
  said_.erase(hint);
}

void Hints::drop_oldest_prefetch() {
  const auto oldest = std::find_if(said_.begin(), said_.end(), [](const Hint& hint) {
    return hint.kind == Hint::Kind::kPrefetch;
  });
  if (oldest != said_.end()) drop(oldest);
}

void Hints::add(const Hint& hint) {
  auto& places = lanes_[lane_of(hint)];
  make_room(places, first_page(hint), behind_pages(hint));
  places.emplace(first_page(hint), said_.insert(said_.end(), hint));
  if (hint.kind == Hint::Kind::kPrefetch && places.size() > kMostPrefetches) drop_oldest_prefetch();
}

}  // namespace stasis::preload
