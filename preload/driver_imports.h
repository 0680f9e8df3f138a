// Functions that a library which is loaded already has from others, by the table in which the
// loader has entered their addresses.
#pragma once

#include <cstdint>
#include <span>

namespace stasis::preload {

struct Import {
  const char* name;
  std::uintptr_t function;
};

// From now on the library in which `code` lies calls these functions instead of those of their
// names. Threads may be in it meanwhile: each address is one word, written at once. False, and
// nothing is changed, if the library has none of them or its table cannot be written.
bool replace_imports(const void* code, std::span<const Import> imports);

}  // namespace stasis::preload
