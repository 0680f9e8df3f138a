// What the driver maps, where the agent has it done otherwise: by standing in for mmap() and
// munmap(), which the driver calls like any library.
//
// Host memory in which the driver keeps what it saves of a process. Driver 580.159.04 takes it at a
// checkpoint by mmap() with MAP_POPULATE: the kernel clears one page of 4 KiB after the other
// before anything is saved. In huge pages, which the driver does not ask for, and touched as the
// content comes, a checkpoint of 4 GiB takes 1.1 s instead of 2.0, and one of an empty context 0.13
// s instead of 0.18 (docs/results/2026-11-22-standstill-2.md).
//
// Addresses for managed memory, which the driver takes wherever the kernel gives it some.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stasis::preload {

// Whose requests are meant: the library in which `function` is. Before the program can use it.
void note_driver_library(const void* function);
// The same of one that was loaded before the agent, whose calls do not come here by themselves.
// False if they cannot be made to.
bool stand_in_for_driver_library(const void* function);

// While it lives, the next area that the driver asks for in this thread, of no access and of
// `bytes` or more, is [address, address + bytes): at an address where nothing is, and aligned as
// the driver wants it. What the driver gives back of what it has asked for too much stays as it is.
class SteeredMapping {
 public:
  SteeredMapping(std::uintptr_t address, std::size_t bytes);
  ~SteeredMapping();
  SteeredMapping(const SteeredMapping&) = delete;
  SteeredMapping& operator=(const SteeredMapping&) = delete;
  // Whether the driver was given that area.
  bool used() const { return used_; }

  // For mmap() and munmap().
  bool is_meant(const void* address, std::size_t bytes, int protection, int fd) const;
  void* map(std::size_t bytes, int flags);
  bool is_beyond(const void* address) const;

 private:
  std::uintptr_t address_;
  std::size_t bytes_;
  std::size_t asked_ = 0;  // by the driver, which had more room than this wants
  bool used_ = false;
};

// While it lives, what the driver gives back of [address, address + bytes) in this thread stays
// taken, so that nothing else comes to lie there: until the driver asks for that very place again.
class KeptAddresses {
 public:
  KeptAddresses(std::uintptr_t address, std::size_t bytes);
  ~KeptAddresses();
  KeptAddresses(const KeptAddresses&) = delete;
  KeptAddresses& operator=(const KeptAddresses&) = delete;
  // Whether the driver has given all of it back.
  bool all() const { return kept_ == bytes_; }
  // From now on they are to be had.
  void let_go();

  // For munmap() and mmap().
  bool touches(const void* address, std::size_t bytes) const;
  bool holds(const void* address, std::size_t bytes) const;
  void keep(void* address, std::size_t bytes);
  void give(const void* address, std::size_t bytes);

 private:
  std::uintptr_t address_;
  std::size_t bytes_;
  std::size_t kept_ = 0;
  // What the driver has asked for again: it is not ours to unmap.
  std::uintptr_t given_ = 0;
  std::size_t given_bytes_ = 0;
};

}  // namespace stasis::preload
