#include "driver/library.h"

#include <dlfcn.h>
#include <link.h>

namespace stasis {

tl::expected<Library, std::string> Library::load(const std::string& name) {
  // RTLD_LOCAL: the simulated driver must not stand in for symbols of anything else.
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    return tl::unexpected<std::string>(why != nullptr ? why : "unknown error");
  }
  std::string path = name;
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 && map != nullptr &&
      map->l_name != nullptr && *map->l_name != '\0') {
    path = map->l_name;
  }
  return Library(handle, std::move(path));
}

void* Library::symbol(const char* name) const { return ::dlsym(handle_, name); }

}  // namespace stasis
