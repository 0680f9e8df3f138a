// Where small memory of cuMemAlloc lies: in units of physical memory that several pieces share, as
// the driver's own do (2 MiB each, pieces side by side at multiples of 512 bytes), so that it can
// leave, and can be opened by another process (cuIpcGetMemHandle), as large memory can. Of one
// context. Asks the driver nothing, so that a test can try every order of events.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "abi/cuda_abi.h"

namespace stasis::preload {

class SmallMemory {
 public:
  static constexpr std::size_t kAlignment = 512;
  // What a piece takes of its unit.
  static constexpr std::size_t room_for(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // All of it is free behind a piece of `first` bytes at its beginning.
  void add(cuda::CUdeviceptr unit, std::size_t size, std::size_t first = 0);
  // What is in it is not to be given back.
  void remove(cuda::CUdeviceptr unit);
  // A place for `bytes`, more than 0, in one unit: the smallest that is large enough, the first of
  // these. 0 if there is none.
  cuda::CUdeviceptr take(std::size_t bytes);
  // What take() or add() has given for as many bytes. True if nothing in its unit is in use any
  // more.
  bool give(cuda::CUdeviceptr address, std::size_t bytes);
  bool has_units() const { return !units_.empty(); }

 private:
  using Places = std::map<cuda::CUdeviceptr, std::size_t>;
  void enter(cuda::CUdeviceptr address, std::size_t size);
  Places::iterator leave(Places::iterator place);

  Places units_;
  // What is free: neighbours in the same unit are one.
  Places free_;
  std::set<std::pair<std::size_t, cuda::CUdeviceptr>> by_size_;
};

}  // namespace stasis::preload
