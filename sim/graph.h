// Graphs: work that a stream was given while it was captured, to be launched again and again.
//
// A copy from or to the host holds the memory that it names: if plain device memory (cuMemAlloc)
// lies at that address no more, or another has come there, the launch ends the context with 719, as
// with driver 580.159.04 (an H100, measured). Kernels, fills and copies within the device take
// whatever lies there, and so does any node of memory of cuMemCreate.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "sim/memory.h"

namespace stasis::sim {

struct Graph {
  struct Operand {
    Address at = 0;
    std::uint64_t id = 0;  // of the allocation
  };
  std::vector<std::function<void()>> nodes;
  std::vector<Operand> operands;

  void note_operand(const Memory& memory, Address at) {
    Allocation a;
    if (memory.find(at, 1, a) && a.kind == Kind::kDevice && !a.pool) operands.push_back({at, a.id});
  }
  bool is_whole(const Memory& memory) const {
    for (const Operand& operand : operands) {
      Allocation a;
      if (!memory.find(operand.at, 1, a) || a.id != operand.id) return false;
    }
    return true;
  }
};

}  // namespace stasis::sim
