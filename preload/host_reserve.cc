#include "host_reserve.h"

#include <sys/mman.h>

#include <atomic>
#include <new>

namespace stasis::preload {
namespace {

std::atomic<void*> g_reserve{nullptr};

void use_reserve() {
  if (void* reserve = g_reserve.exchange(nullptr))
    ::munmap(reserve, kReserve);
  else
    std::set_new_handler(nullptr);
}

}  // namespace

bool make_reserve() {
  std::set_new_handler(&use_reserve);
  if (g_reserve.load() != nullptr) return true;
  void* at = ::mmap(nullptr, kReserve, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return false;
  g_reserve.store(at);
  return true;
}

bool has_reserve() { return g_reserve.load() != nullptr; }

void give_reserve_back() {
  if (void* reserve = g_reserve.exchange(nullptr)) ::munmap(reserve, kReserve);
}

}  // namespace stasis::preload
