// Numbers that another process may write at any time. Thread-safe.
#pragma once

#include <type_traits>

namespace stasis::direct {

// Reads once, whatever the compiler would do: the other side may write at any time.
template <class T>
T once(const T& place) {
  T value;
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  __atomic_load(&place, &value, __ATOMIC_RELAXED);
  return value;
}

}  // namespace stasis::direct
