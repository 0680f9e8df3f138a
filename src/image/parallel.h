// Runs numbered pieces of work on all processors, with progress told on the caller's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "base/interrupt.h"
#include "base/progress.h"
#include "base/result.h"

namespace stasis {

// Calls work(i) for i in [0, count), each once, from at most one thread per processor; the pieces
// are begun in order. work returns the bytes it has done, which add up to `total` for `progress`.
// The first error, or an interrupt (looked at between pieces), stops the rest and is returned once
// all threads are joined. `progress` is called on this thread only.
Result<void> run_parallel(std::size_t count, std::uint64_t total, std::string_view phase,
                          Progress& progress, const Interrupt& interrupt,
                          const std::function<Result<std::uint64_t>(std::size_t)>& work);

}  // namespace stasis
