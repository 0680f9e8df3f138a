// Where managed memory lies, as driver 580.159.04 places it (seen on an H100).
//
// The driver takes areas of whole 32 MiB, aligned so, by one mmap() of 32 MiB less a page more than
// it needs, and gives what is too much back by munmap(). In an area, what has 2 MiB or more begins
// at a multiple of 2 MiB; smaller memory shares units of 2 MiB, by pages. Each unit or larger piece
// is a mapping of its own of the driver's file. What is freed becomes a mapping of nothing again,
// and an area in which nothing is left is given back. All of it by the C library's mmap() and
// munmap(), so that a library before this one can answer in their place.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <map>

#include "abi/cuda_abi.h"

namespace stasis::sim {

class ManagedAreas {
 public:
  static constexpr std::uint64_t kArea = std::uint64_t{32} << 20;
  static constexpr std::uint64_t kUnit = std::uint64_t{2} << 20;

  // Memory that reads as zeros. 0 if there is none to be had.
  std::uint64_t allocate(std::uint64_t bytes);
  void free(std::uint64_t address, std::uint64_t bytes);

  // What the program has said of a part of an allocation, and what all of a part has in common: an
  // ordinal or kDeviceCpu, of READ_MOSTLY 1 or 0; kDeviceInvalid where it was not said, or differs.
  void note(std::uint64_t address, std::uint64_t bytes, cuda::CUmem_range_attribute attribute,
            int value);
  int noted(std::uint64_t address, std::uint64_t bytes,
            cuda::CUmem_range_attribute attribute) const;

 private:
  // A mapping of the driver's file: one piece, or a unit that small pieces share.
  struct Block {
    std::uint64_t bytes = 0;
    bool shared = false;
    std::map<std::uint64_t, std::uint64_t> pieces;  // of a shared one: address -> bytes
  };
  struct Area {
    std::uint64_t bytes = 0;
    std::map<std::uint64_t, Block> blocks;  // by address
  };

  std::uint64_t in_shared_unit(std::uint64_t bytes);
  // In an area that has room for it, or in a new one: its address, or 0.
  std::uint64_t new_block(std::uint64_t bytes, bool shared);

  std::map<std::uint64_t, Area> areas_;  // by address
  // By attribute and address: from there on, up to the next one.
  using Notes = std::map<std::uint64_t, int>;
  std::map<cuda::CUmem_range_attribute, Notes> notes_;
};

}  // namespace stasis::sim
