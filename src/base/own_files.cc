#include "base/own_files.h"

#include <dlfcn.h>
#include <elf.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <system_error>

namespace stasis {
namespace {

// The folder of the library, or of the program, that this code is in.
std::string own_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&own_file), &info) == 0 || info.dli_fname == nullptr)
    return ".";
  const auto* const head = static_cast<const Elf64_Ehdr*>(info.dli_fbase);
  const auto base = reinterpret_cast<std::uintptr_t>(head);
  // A program is known by the name that it was called by.
  std::error_code failed;
  if (base + head->e_phoff == ::getauxval(AT_PHDR))
    return std::filesystem::read_symlink("/proc/self/exe", failed).parent_path().string();
  return std::filesystem::path(info.dli_fname).parent_path().string();
}

// By the first of these ways from there on which it can be reached.
std::string find_from_here(std::initializer_list<const char*> ways, const std::string& name,
                           int access) {
  const std::string folder = own_folder();
  std::string path;
  for (const char* way : ways) {
    path = folder;
    path += way;
    path += name;
    if (::access(path.c_str(), access) == 0) break;
  }
  return std::filesystem::path(path).lexically_normal().string();
}

}  // namespace

std::string own_file(const std::string& name) {
  return find_from_here({"/stasis/", "/../stasis/", "/../lib/stasis/"}, name, R_OK);
}

std::string own_program(const std::string& name) {
  return find_from_here({"/../../bin/", "/../../../bin/"}, name, X_OK);
}

}  // namespace stasis
