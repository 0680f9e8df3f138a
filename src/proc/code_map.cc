#include "proc/code_map.h"

#include <algorithm>
#include <string_view>

#include "proc/procfs.h"

namespace stasis::proc {
namespace {

// How far up the stack the caller of a library function is looked for. Its own frames are small.
constexpr std::size_t kStackWords = 512;
constexpr std::size_t kPageWords = 4096 / 8;

bool starts_with_any(std::string_view name, std::initializer_list<std::string_view> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(), [&](std::string_view prefix) {
    return name.substr(0, prefix.size()) == prefix;
  });
}

}  // namespace

CodeMap::CodeMap(const AddressSpace& space) : space_(&space) {
  const auto mappings = ProcFs().mappings(space.pid());
  if (!mappings) return;
  for (const Mapping& mapping : *mappings) {
    if (mapping.permissions.size() < 3 || mapping.permissions[2] != 'x') continue;
    Range range{mapping.start, mapping.end, Module::kProgram};
    const std::string_view path = mapping.path;
    const std::string_view name = path.substr(path.rfind('/') + 1);
    // libnvidia-* are parts of the driver that libcuda loads.
    if (starts_with_any(name, {"libcuda.so", "libnvidia-"})) {
      range.module = Module::kDriver;
    } else if (starts_with_any(
                   name, {"libc.so", "libc-2", "libpthread", "libdl.", "libdl-", "librt.", "librt-",
                          "libm.so", "libm-2", "ld-linux", "ld-2", "libstdc++", "libgcc_s",
                          "libasan", "libtsan", "libubsan", "[vdso]"})) {
      range.module = Module::kLibrary;
    }
    ranges_.push_back(range);
  }
}

CodeMap::Module CodeMap::module_at(std::uint64_t address) const {
  const auto after = std::upper_bound(
      ranges_.begin(), ranges_.end(), address,
      [](std::uint64_t wanted, const Range& range) { return wanted < range.start; });
  if (after == ranges_.begin()) return Module::kNone;
  const Range& range = *std::prev(after);
  return address < range.end ? range.module : Module::kNone;
}

// Does the instruction before `address` call something? The forms of CALL (Intel SDM, volume 2):
// e8 with 4 bytes, or ff /2 with a byte that says how its operand is found.
bool CodeMap::follows_a_call(std::uint64_t address) const {
  std::array<std::uint8_t, 8> before{};
  if (!space_->read(address - before.size(), before.data(), before.size())) return false;
  if (before[3] == 0xe8) return true;
  for (const std::size_t length : {2U, 3U, 4U, 6U, 7U}) {
    const std::size_t at = before.size() - length;
    if (before[at] == 0xff && ((before[at + 1] >> 3) & 7) == 2) return true;
  }
  return false;
}

Site CodeMap::site(std::uint64_t instruction, std::uint64_t stack, bool in_system_call) const {
  const Module here = module_at(instruction);
  if (here == Module::kDriver) return Site::kDriver;
  if (here != Module::kLibrary) return Site::kProgram;
  const Site program = in_system_call ? Site::kProgram : Site::kLibrary;
  std::array<std::uint64_t, kStackWords> words{};
  // The stack may end within this distance; what is there of it is enough.
  std::size_t count = kStackWords;
  while (count > 0 && !space_->read(stack, words.data(), count * 8))
    count = count > kPageWords / 8 ? count / 2 : 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Module module = module_at(words[i]);
    if (module == Module::kNone || module == Module::kLibrary) continue;
    if (!follows_a_call(words[i])) continue;
    return module == Module::kDriver ? Site::kDriver : program;
  }
  return program;
}

}  // namespace stasis::proc
