// libFuzzer's way into the reader of a job's shared memory; built with clang and STASIS_FUZZ=ON.
//
// The input is two bytes for the length of an index, that index, and the content. Root sees more of
// it: others may give nothing away, and come to no directory that is closed to them.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <string_view>

#include "job/shared_memory.h"

namespace {

using namespace stasis;  // NOLINT(google-build-using-namespace): a program, not a header
namespace fs = std::filesystem;

constexpr const char* kIndex = "stasis-shm-index.json";
constexpr const char* kContent = "stasis-shm-content.img";

struct Folder {
  std::string path = "/dev/shm/stasis-fuzz-XXXXXX";
  UniqueFd image;
  UniqueFd again;

  Folder() {
    if (::mkdtemp(path.data()) == nullptr) std::abort();
    for (const char* name : {"image", "again", "to"})
      fs::create_directory(path + "/" + name);
    image = UniqueFd(::open((path + "/image").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    again = UniqueFd(::open((path + "/again").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { fs::remove_all(path); }

  std::string to() const { return path + "/to"; }
  void write(const std::string& name, std::string_view text) const {
    std::ofstream(path + "/image/" + name, std::ios::binary) << text;
  }
  std::string read(const std::string& name) const {
    std::ifstream file(path + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void clear_again() const {
    for (const char* name : {kIndex, kContent})
      (void)::unlinkat(again.get(), name, 0);
  }
  // Nothing was made beside the directory.
  bool is_as_it_was() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(path))
      names.insert(entry.path().filename());
    return names == std::set<std::string>{"again", "image", "to"};
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Folder folder;
  if (size < 2) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 2, size - 2);
  const std::size_t length = std::min<std::size_t>(data[0] + 256U * data[1], input.size());
  folder.write(kIndex, input.substr(0, length));
  folder.write(kContent, input.substr(length));
  const bool done = job::restore_shared_memory(folder.to(), folder.image).has_value();
  if (!folder.is_as_it_was()) std::abort();
  if (!done) return 0;
  // What was put back is saved, and what was saved is put back as the same.
  folder.clear_again();
  if (!job::save_shared_memory(folder.to(), folder.again)) return 0;
  const std::string index = folder.read(std::string("again/") + kIndex);
  const std::string content = folder.read(std::string("again/") + kContent);
  if (!job::restore_shared_memory(folder.to(), folder.again)) std::abort();
  folder.clear_again();
  if (!job::save_shared_memory(folder.to(), folder.again)) std::abort();
  if (folder.read(std::string("again/") + kIndex) != index) std::abort();
  if (folder.read(std::string("again/") + kContent) != content) std::abort();
  return 0;
}
