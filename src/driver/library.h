// A shared library loaded at run time, and typed access to its functions. Owns the handle and never
// closes it: the driver starts threads that would lose their code.
#pragma once

#include <string>

#include "base/result.h"

namespace stasis {

class Library {
 public:
  // The dynamic linker's own message if it cannot be loaded.
  static tl::expected<Library, std::string> load(const std::string& name);

  // nullptr if the library has no such symbol.
  template <class Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(symbol(name));
  }
  void* symbol(const char* name) const;
  // The file behind it, for messages; the name it was loaded by if that is unknown.
  const std::string& path() const { return path_; }

 private:
  explicit Library(void* handle, std::string path) : handle_(handle), path_(std::move(path)) {}
  void* handle_;
  std::string path_;
};

// The CUDA driver's library: `name` if not empty, else what the environment's STASIS_LIBCUDA names,
// else "libcuda.so.1".
struct DriverLibrary {
  Library library;
  bool named = false;  // by the caller or the environment, so that NVML is looked for beside it
};
// kDriverMissing, with its remedy.
Result<DriverLibrary> load_driver_library(const std::string& name = {});

}  // namespace stasis
