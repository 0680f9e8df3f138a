#include "direct/plan.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include <fmt/format.h>

namespace stasis::direct {
namespace {

// No device has a smaller granularity; the driver refuses anything else later, with less of a
// reason.
constexpr std::uint64_t kSmallestGranule = 64 << 10;
constexpr std::uint64_t kSmallestBuffer = std::uint64_t{1} << 20;
constexpr std::uint64_t kSmallestForOne = std::uint64_t{64} << 10;
constexpr std::uint64_t kSmallestLoad = std::uint64_t{2} << 20;
constexpr unsigned kLoadsPerThread = 4;

}  // namespace

void append_stretch(std::vector<Stretch>& stretches, const Stretch& next) {
  if (!stretches.empty() && stretches.back().content + stretches.back().bytes == next.content) {
    stretches.back().bytes += next.bytes;
  } else {
    stretches.push_back(next);
  }
}

std::vector<Stretch> first_of(std::span<const Stretch> stretches, std::uint64_t bytes) {
  std::vector<Stretch> out;
  for (const Stretch& stretch : stretches) {
    if (stretch.mapped >= bytes) break;
    out.push_back(stretch);
    out.back().bytes = std::min(stretch.bytes, bytes - stretch.mapped);
  }
  return out;
}

std::vector<Stretch> rest_of(std::span<const Stretch> stretches, std::uint64_t bytes) {
  std::vector<Stretch> out;
  for (Stretch stretch : stretches) {
    const std::uint64_t gone =
        bytes > stretch.mapped ? std::min(stretch.bytes, bytes - stretch.mapped) : 0;
    stretch.mapped += gone;
    stretch.content += gone;
    stretch.bytes -= gone;
    if (stretch.bytes > 0) out.push_back(stretch);
  }
  return out;
}

std::vector<Load> loads_of(std::span<const Stretch> stretches, std::uint64_t load_bytes) {
  std::vector<Load> loads;
  for (const Stretch& stretch : stretches) {
    for (std::uint64_t done = 0; done < stretch.bytes;) {
      if (loads.empty() || loads.back().bytes == load_bytes) {
        loads.push_back({stretch.mapped + done, 0, {}});
      }
      Load& load = loads.back();
      const std::uint64_t part = std::min(stretch.bytes - done, load_bytes - load.bytes);
      load.parts.push_back({load.bytes, stretch.content + done, part});
      load.bytes += part;
      done += part;
    }
  }
  return loads;
}

std::vector<Load> loads_of_each(std::span<const Stretch> stretches, std::uint64_t load_bytes) {
  std::vector<Load> all;
  for (std::size_t begin = 0; begin < stretches.size();) {
    std::size_t end = begin + 1;
    while (end < stretches.size() &&
           stretches[end - 1].mapped + stretches[end - 1].bytes == stretches[end].mapped)
      ++end;
    auto loads = loads_of(stretches.subspan(begin, end - begin), load_bytes);
    std::move(loads.begin(), loads.end(), std::back_inserter(all));
    begin = end;
  }
  return all;
}

std::uint64_t load_size(std::uint64_t total, unsigned threads, std::uint64_t buffer_bytes) {
  const std::uint64_t fair = total / (std::uint64_t{std::max(1U, threads)} * kLoadsPerThread);
  const std::uint64_t whole = (fair + kSmallestLoad - 1) / kSmallestLoad * kSmallestLoad;
  return std::min(std::max(whole, kSmallestLoad), buffer_bytes);
}

Result<void> sort_and_check(std::vector<Segment>& segments) {
  std::sort(segments.begin(), segments.end(),
            [](const Segment& a, const Segment& b) { return a.offset < b.offset; });
  std::uint64_t end = 0;
  for (const Segment& segment : segments) {
    if (!segment.handle.valid()) {
      return fail(ErrorCode::kUsage, fmt::format("no descriptor for the {} bytes of GPU memory at "
                                                 "offset {}",
                                                 segment.bytes, segment.offset));
    }
    if (segment.bytes == 0 || segment.bytes % kSmallestGranule != 0) {
      return fail(ErrorCode::kUsage,
                  fmt::format("{} bytes cannot be an allocation of GPU memory", segment.bytes));
    }
    if (segment.bytes > std::numeric_limits<std::uint64_t>::max() - segment.offset) {
      return fail(ErrorCode::kUsage, fmt::format("{} bytes of content at offset {} do not exist",
                                                 segment.bytes, segment.offset));
    }
    if (segment.offset < end) {
      return fail(ErrorCode::kUsage,
                  fmt::format("two pieces of GPU memory have the same content, at offset {}",
                              segment.offset));
    }
    end = segment.offset + segment.bytes;
  }
  return {};
}

Result<RingShares> share_ring(std::uint64_t chunk_bytes, unsigned chunks, unsigned gpus,
                              unsigned threads) {
  RingShares shares;
  const unsigned wanted = 2 * std::max(1U, threads) * std::max(1U, gpus);
  while (chunks * shares.buffers_per_chunk < wanted &&
         chunk_bytes / (shares.buffers_per_chunk * 2) >= kSmallestBuffer) {
    shares.buffers_per_chunk *= 2;
  }
  while (chunks * shares.buffers_per_chunk < 2 * gpus &&
         chunk_bytes / (shares.buffers_per_chunk * 2) >= kSmallestForOne) {
    shares.buffers_per_chunk *= 2;
  }
  shares.buffer_bytes = chunk_bytes / shares.buffers_per_chunk / kPage * kPage;
  const unsigned buffers = chunks * shares.buffers_per_chunk;
  shares.threads = std::min(std::max(1U, threads), buffers / (2 * std::max(1U, gpus)));
  if (shares.threads == 0 || shares.buffer_bytes == 0) {
    return fail(ErrorCode::kUsage,
                fmt::format("a ring of {} x {} bytes is too small to copy for {} GPUs", chunks,
                            chunk_bytes, gpus),
                "allow at least 2 MiB for each GPU");
  }
  return shares;
}

}  // namespace stasis::direct
