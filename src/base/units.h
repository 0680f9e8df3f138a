// Amounts and times as people read them.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace stasis {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// "0 B", "17.3 MiB": binary units, three digits.
std::string format_bytes(std::uint64_t bytes);
// "12 ms", "1.35 s".
std::string format_seconds(Seconds seconds);
// How long ago, roughly: "12 s", "5 min", "3 h 20 min", "2 d 3 h". Nothing negative.
std::string format_age(std::chrono::seconds age);
// "2.61 GB/s": decimal units, as bus speeds are given.
std::string format_rate(std::uint64_t bytes, Seconds seconds);

inline Seconds since(Clock::time_point start) { return Clock::now() - start; }

}  // namespace stasis
