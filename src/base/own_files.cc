#include "base/own_files.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <system_error>
#include <vector>

namespace stasis {
namespace {

// The folders of the library, or of the program, that this code is in: where it is, and where the
// link is that it was loaded by.
std::vector<std::string> own_folders() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&own_file), &info) == 0 || info.dli_fname == nullptr)
    return {"."};
  const auto* const head = static_cast<const Elf64_Ehdr*>(info.dli_fbase);
  const auto base = reinterpret_cast<std::uintptr_t>(head);
  // A program is known by the name that it was called by.
  std::error_code failed;
  if (base + head->e_phoff == ::getauxval(AT_PHDR))
    return {std::filesystem::read_symlink("/proc/self/exe", failed).parent_path().string()};
  const std::filesystem::path library(info.dli_fname);
  const std::filesystem::path real = std::filesystem::canonical(library, failed);
  if (failed) return {library.parent_path().string()};
  return {real.parent_path().string(), library.parent_path().string()};
}

// By the first of these ways from there on which it can be reached.
std::string find_from_here(std::initializer_list<const char*> ways, const std::string& name,
                           int access) {
  std::string path;
  for (const std::string& folder : own_folders()) {
    for (const char* way : ways) {
      path = std::filesystem::path(folder + way + name).lexically_normal().string();
      if (::access(path.c_str(), access) == 0) return path;
    }
  }
  return path;
}

}  // namespace

std::string own_file(const std::string& name) {
  return find_from_here({"/stasis/", "/../stasis/", "/../lib/stasis/"}, name, R_OK);
}

std::string own_program(const std::string& name) {
  return find_from_here({"/../../bin/", "/../../../bin/"}, name, X_OK);
}

}  // namespace stasis
