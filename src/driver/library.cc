#include "driver/library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>

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

Result<DriverLibrary> load_driver_library(const std::string& name) {
  const char* from_environment = std::getenv("STASIS_LIBCUDA");
  std::string file = name;
  if (file.empty() && from_environment != nullptr) file = from_environment;
  const bool named = !file.empty();
  if (!named) file = "libcuda.so.1";
  auto library = Library::load(file);
  if (!library) {
    return fail(ErrorCode::kDriverMissing, "cannot load the CUDA driver: " + library.error(),
                named
                    ? "check the file that STASIS_LIBCUDA names"
                    : "install the NVIDIA driver (570 or newer), or set STASIS_LIBCUDA to its "
                      "libcuda.so.1; in a container, start it with the NVIDIA runtime; to try "
                      "Stasis without a GPU, install the package stasis-simulator (in the source: "
                      "`tools/demo`)");
  }
  return DriverLibrary{std::move(*library), named};
}

void* Library::symbol(const char* name) const { return ::dlsym(handle_, name); }

}  // namespace stasis
