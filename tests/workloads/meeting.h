// Where the ranks of a collective meet in each round: a file that they map, or TCP connections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace stasis::workloads {

inline constexpr std::size_t kMostRanks = 64;

class Meeting {
 public:
  struct Outcome {
    std::uint64_t total = 0;
    bool stop = false;  // any of them wants to
  };

  // `where`: a file, or tcp:ADDRESS:PORT, where rank 0 listens and the others connect to, for as
  // long as it takes. `talk`: by TCP, children of rank 0 and of each other send each other
  // numbers besides, all the time, and verify what comes; a file for each of them, of that name and
  // a number, says how many came. Empty: they do not. Ends the program if anything fails.
  static std::unique_ptr<Meeting> open(const std::string& where, std::uint32_t rank,
                                       std::uint32_t ranks, const std::string& talk);
  Meeting() = default;
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  virtual ~Meeting() = default;

  // Waits until all have come to that round; the first is 1. One thread at a time.
  virtual Outcome meet(std::uint64_t round, std::uint64_t value, bool stop) = 0;
};

// Makes the file that open() is to find.
void make_meeting(const std::string& file);

}  // namespace stasis::workloads
