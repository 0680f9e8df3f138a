// libFuzzer's way into the reader of CRIU's list of files; built with clang and STASIS_FUZZ=ON.
//
// The input is two bytes for the length of files.img, that file, and remap-fpath.img.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>

#include "criu/criu_addresses.h"
#include "criu/criu_files.h"

namespace {

using namespace stasis;  // NOLINT(google-build-using-namespace): a program, not a header

struct Folder {
  std::string path = "/dev/shm/stasis-fuzz-XXXXXX";
  UniqueFd dir;

  Folder() {
    if (::mkdtemp(path.data()) == nullptr) std::abort();
    dir = UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }

  void write(const char* name, const std::uint8_t* data, std::size_t size) const {
    auto file = open_file(dir.get(), name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (!file || !write_all(file->get(), reinterpret_cast<const char*>(data), size, name))
      std::abort();
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folder folder;
  if (size < 2) return 0;
  const std::size_t first = std::min(data[0] + std::size_t{256} * data[1], size - 2);
  folder.write("files.img", data + 2, first);
  folder.write("remap-fpath.img", data + 2 + first, size - 2 - first);
  std::map<std::string, std::string> names;
  for (const NeededFile& file : needed_files(folder.dir)) {
    if (file.path.empty() || file.path.front() != '/') std::abort();
    if (file.of_criu) names[file.path] = file.path + ".renamed";
  }
  if (const auto opened = OpenedFiles::read(folder.dir)) (void)opened->of(folder.dir, 1);
  // By any of the addresses, each of which some input has.
  for (const char* text : {"10.0.0.1=10.0.0.2", "fd00::1=fd00::2"})
    (void)files_with_addresses(std::string(reinterpret_cast<const char*>(data + 2), first),
                               {parse_address_pair(text).value()});
  if (!put_listeners_first(folder.dir)) std::abort();
  if (!rename_link_remaps(folder.dir, names)) return 0;
  // What was renamed is found by its new name, and nothing else has changed.
  for (const NeededFile& file : needed_files(folder.dir)) {
    if (file.of_criu && names.contains(file.path)) std::abort();
  }
  return 0;
}
