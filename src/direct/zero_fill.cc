#include "direct/zero_fill.h"

#include <algorithm>
#include <atomic>

#include <fmt/format.h>

#include "base/threads.h"
#include "direct/gpu_digest.h"

namespace stasis::direct {
namespace {

constexpr std::uint64_t kAtOnce = 512;

// Some chunks of a part that lie one behind the other.
struct Question {
  std::size_t part = 0;
  std::uint64_t content = 0;
  std::uint64_t first = 0;  // its number in the part
  std::uint64_t count = 0;
};

void add_questions(std::vector<Question>& questions, std::size_t part,
                   std::span<const ChunkRun> runs, std::uint64_t chunk_bytes,
                   std::uint64_t at_once) {
  std::uint64_t number = 0;
  for (const ChunkRun& run : runs) {
    for (std::uint64_t at = 0; at < run.count; at += at_once) {
      questions.push_back(
          {part, run.content + at * chunk_bytes, number + at, std::min(at_once, run.count - at)});
    }
    number += run.count;
  }
}

// Neighbours at once.
cuda::CUresult queue_zeros(const DeviceCalls& calls, const ZeroPart& part,
                           std::span<const ChunkRun> runs, std::uint64_t chunk_bytes,
                           std::span<const char> gone) {
  std::uint64_t number = 0;
  for (const ChunkRun& run : runs) {
    for (std::uint64_t i = 0; i < run.count;) {
      std::uint64_t end = i;
      while (end < run.count && gone[number + end] != 0)
        ++end;
      if (end > i) {
        const auto code = calls.fill(part.base + run.mapped + i * chunk_bytes, 0,
                                     (end - i) * chunk_bytes, part.stream);
        if (code != cuda::CUDA_SUCCESS) return code;
      }
      i = end + 1;
    }
    number += run.count;
  }
  return cuda::CUDA_SUCCESS;
}

}  // namespace

std::vector<std::vector<Stretch>> fill_zeros(const DeviceCalls& calls,
                                             std::span<const ZeroPart> parts,
                                             std::uint64_t chunk_bytes,
                                             std::span<const std::span<std::byte>> buffers,
                                             const std::function<Content&(unsigned)>& content,
                                             Stop& stop) {
  std::vector<std::vector<ChunkRun>> runs;
  std::vector<std::vector<char>> gone;
  std::vector<Question> questions;
  const std::uint64_t at_once = std::min<std::uint64_t>(kAtOnce, buffers.front().size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    runs.push_back(chunk_runs(parts[i].stretches, chunk_bytes));
    add_questions(questions, i, runs.back(), chunk_bytes, at_once);
    std::uint64_t count = 0;
    for (const ChunkRun& run : runs.back())
      count += run.count;
    gone.emplace_back(count);
  }
  std::atomic<std::size_t> next{0};
  (void)on_threads(static_cast<unsigned>(buffers.size()), [&](unsigned thread) {
    for (std::size_t i = next++; i < questions.size() && stop.go_on(); i = next++) {
      const Question& ask = questions[i];
      const auto flags = buffers[thread].first(ask.count);
      if (!stop.ok(content(thread).zeros(ask.content, flags))) return;
      for (std::uint64_t k = 0; k < ask.count; ++k)
        gone[ask.part][ask.first + k] = flags[k] != std::byte{0};
    }
  });
  std::vector<std::vector<Stretch>> left;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    left.push_back(without_chunks(parts[i].stretches, runs[i], chunk_bytes, gone[i]));
    if (stop.stopped() || !stop.ok(parts[i].device->make_current())) continue;
    const auto code = queue_zeros(calls, parts[i], runs[i], chunk_bytes, gone[i]);
    if (code != cuda::CUDA_SUCCESS)
      stop.fail(calls.error(code, "cuMemsetD8Async",
                            fmt::format("clear memory of GPU {}", parts[i].device->ordinal())));
  }
  return left;
}

}  // namespace stasis::direct
