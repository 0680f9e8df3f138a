#include "attach/c_library.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>

namespace stasis::attach {
namespace {

// A descriptor of a field for debuggers: its size in bits, how many there are, where it lies.
using Descriptor = std::array<std::uint32_t, 3>;

constexpr std::uint64_t kSmallestThread = 1024;
constexpr std::uint64_t kLargestThread = 16384;
constexpr std::uint64_t kLargestLinkMap = 4096;
constexpr std::uint64_t kLargestStaticSize = std::uint64_t{1} << 20;
constexpr std::uint64_t kMostLibraries = 4096;
// Of the mappings of a library's file before the one that is looked for.
constexpr int kMostPieces = 256;
// A list that was forged can take hours.
constexpr std::chrono::seconds kListTimeout{2};
constexpr int kListTries = 100;
constexpr std::chrono::milliseconds kListPause{1};
constexpr std::uint64_t kMostCapacity = 8192;
// For what is loaded while the thread lives; glibc's own surplus is 1,664 bytes by default.
constexpr std::uint64_t kSurplus = std::uint64_t{64} << 10;

// Of link.h, as every debugger knows it.
struct LinkMap {
  std::uint64_t address;
  std::uint64_t name;
  std::uint64_t dynamic;
  std::uint64_t next;
  std::uint64_t previous;
};

tl::unexpected<Error> unknown(std::string_view what) {
  return fail(ErrorCode::kNotSupported,
              fmt::format("its C library is unknown to the tool: {}", what));
}

bool is_c_library(std::string_view name) {
  return name == "libc.so.6" || (name.starts_with("libc-2.") && name.ends_with(".so"));
}
bool is_loader(std::string_view name) {
  return name == "ld-linux-x86-64.so.2" || (name.starts_with("ld-2.") && name.ends_with(".so"));
}

// Its loader and C library are one file, of the loader's name or below a folder of its own.
bool has_musl(const std::vector<proc::Mapping>& mappings) {
  return std::any_of(mappings.begin(), mappings.end(), [](const proc::Mapping& one) {
    const std::string_view name = file_name(one);
    return name.starts_with("ld-musl-") || name.starts_with("libc.musl-") ||
           one.path.find("-linux-musl/libc.so") != std::string::npos;
  });
}

// All code of files is of one: of a program that no loader has loaded anything for.
bool is_one_file(const std::vector<proc::Mapping>& mappings) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> files;  // device, inode
  for (const proc::Mapping& one : mappings)
    if (one.inode != 0 && one.permissions.size() > 2 && one.permissions[2] == 'x')
      files.insert({one.device, one.inode});
  return files.size() == 1;
}

// Of the library that has `address`: the nearest page before it at which its file begins, as one
// may be loaded twice.
Result<ElfImage> image_around(const MemoryReader& memory,
                              const std::vector<proc::Mapping>& mappings, std::uint64_t address) {
  const auto after =
      std::upper_bound(mappings.begin(), mappings.end(), address,
                       [](std::uint64_t at, const proc::Mapping& one) { return at < one.start; });
  const auto last = std::make_reverse_iterator(after);
  int pieces = 0;
  for (auto one = last; one != mappings.rend() && pieces < kMostPieces; ++one) {
    if (one->inode != last->inode || one->device != last->device || one->path != last->path)
      continue;
    ++pieces;
    auto image = ElfImage::read(memory, one->start);
    if (image && image->dynamic() == address) return image;
  }
  return unknown("a library's first page is not mapped");
}

// Its field of that size, or nothing.
std::optional<std::uint64_t> field(const Library& library, std::string_view name,
                                   std::uint32_t bits) {
  const auto descriptor = library.image().value<Descriptor>(name);
  if (!descriptor || (*descriptor)[0] != bits) return std::nullopt;
  return (*descriptor)[2];
}

}  // namespace

Result<CLibrary> CLibrary::read(const proc::AddressSpace& space,
                                const std::vector<proc::Mapping>& mappings) {
  STASIS_TRY_ASSIGN(const auto libraries, find_libraries(space, mappings, is_c_library));
  STASIS_TRY_ASSIGN(const auto loaders, find_libraries(space, mappings, is_loader));
  if (libraries.size() != 1 || loaders.size() != 1) {
    if (libraries.empty() && has_musl(mappings)) return unknown("it is musl");
    if (libraries.empty() && is_one_file(mappings)) return unknown("it is a static program");
    return unknown(
        fmt::format("{} glibc and {} of its loader are mapped", libraries.size(), loaders.size()));
  }
  const Library& library = libraries.front();
  CLibrary out;
  STASIS_TRY(out.read_descriptors(library));
  STASIS_TRY(out.read_loader(space, library, loaders.front()));
  return out;
}

Result<void> CLibrary::read_descriptors(const Library& library) {
  const std::array<std::pair<std::string_view, std::uint64_t*>, 6> functions{
      {{"pthread_create", &create_},
       {"pthread_attr_init", &attr_init_},
       {"pthread_attr_setdetachstate", &attr_detach_},
       {"dlopen", &dlopen_},
       {"dlsym", &dlsym_},
       {"dlerror", &dlerror_}}};
  for (const auto& [name, at] : functions) {
    const auto found = library.function(name);
    if (!found)
      return unknown(
          fmt::format("{} has no {} (glibc 2.34 and newer have it)", library.path(), name));
    *at = *found;
  }
  const auto size = library.image().value<std::uint32_t>("_thread_db_sizeof_pthread");
  const auto tid = field(library, "_thread_db_pthread_tid", 32);
  const auto vector = field(library, "_thread_db_pthread_dtvp", 64);
  const auto distance = field(library, "_thread_db_link_map_l_tls_offset", 64);
  if (!size || *size < kSmallestThread || *size > kLargestThread || *size % 8 != 0)
    return unknown("it does not say how large a thread's descriptor is");
  if (!tid || *tid % 4 != 0 || *tid < kTcbHead || *tid + 4 > *size)
    return unknown("it does not say where a thread has its number");
  if (!vector || *vector != kTcbThreadVector)
    return unknown("it does not say where a thread has its storage");
  if (!distance || *distance % 8 != 0 || *distance < sizeof(LinkMap) || *distance > kLargestLinkMap)
    return unknown("it does not say where a library's storage lies");
  const auto alone = library.image().value<std::uint8_t>("__libc_single_threaded");
  if (!alone) return unknown("it does not say whether there are several threads");
  // Then it takes no locks.
  if (*alone != 0)
    return fail(ErrorCode::kNotSupported, "it has one thread, which its C library relies on");
  thread_size_ = *size;
  tid_offset_ = *tid;
  map_offset_ = *distance;
  return {};
}

Result<void> CLibrary::read_loader(const proc::AddressSpace& space, const Library& library,
                                   const Library& loader) {
  std::uint64_t deepest = 0;
  if (const auto offset = loader.image().value<std::int64_t>("__rseq_offset")) {
    const bool fits = *offset < 0 ? *offset >= -static_cast<std::int64_t>(kLargestStaticSize)
                                  : *offset + kRseqSize <= static_cast<std::int64_t>(thread_size_);
    const bool apart = *offset < 0 || *offset >= static_cast<std::int64_t>(kTcbHead);
    if (!fits || !apart || *offset % 32 != 0)
      return unknown("its restartable sequences lie elsewhere");
    rseq_offset_ = *offset;
    if (*offset < 0) deepest = static_cast<std::uint64_t>(-*offset);
  }
  // The program may be loading a library: what was read twice alike was not being changed.
  std::optional<Loaded> before;
  Error last{ErrorCode::kBusy, "it loads libraries all the time", "try again"};
  const auto deadline = Clock::now() + kListTimeout;
  for (int tries = 0; tries < kListTries && Clock::now() < deadline; ++tries) {
    auto now = read_list(space, library, loader, deadline);
    if (now && before && *now == *before) {
      deepest = std::max(deepest, now->deepest);
      static_size_ = (deepest + kSurplus + kPage - 1) / kPage * kPage;
      loaded_ = std::move(*now);
      return {};
    }
    if (now) {
      before = std::move(*now);
      continue;
    }
    before.reset();
    last = std::move(now.error());
    std::this_thread::sleep_for(kListPause);
  }
  return fail(std::move(last));
}

Result<CLibrary::Loaded> CLibrary::read_list(const proc::AddressSpace& space,
                                             const Library& library, const Library& loader,
                                             Clock::time_point deadline) const {
  // struct r_debug of link.h: a version, the first library, a breakpoint's place, a state.
  using Debug = std::array<std::uint64_t, 4>;
  constexpr std::size_t kFirst = 1;
  constexpr std::size_t kState = 3;
  const auto memory = reader_of(space);
  STASIS_TRY_ASSIGN(const auto mappings, proc::ProcFs().mappings(space.pid()));
  const auto debug = loader.image().value<Debug>("_r_debug");
  if (!debug) return unknown("its loader does not say which libraries there are");
  const auto changing = [&] {
    return fail(ErrorCode::kBusy, "it is loading libraries", "try again");
  };
  if (static_cast<std::uint32_t>((*debug)[kState]) != 0) return changing();
  Loaded out;
  bool seen_c_library = false;
  bool seen_loader = false;
  std::uint64_t bytes = 0;
  std::uint64_t at = (*debug)[kFirst];
  for (std::uint64_t count = 0; at != 0; ++count) {
    LinkMap map{};
    std::uint64_t distance = 0;
    if (count == kMostLibraries || !memory(at, &map, sizeof map) ||
        !memory(at + map_offset_, &distance, sizeof distance))
      return unknown("its list of libraries has no end");
    if (Clock::now() >= deadline) return unknown("its list of libraries takes too long to read");
    at = map.next;
    if (map.dynamic == library.image().dynamic()) seen_c_library = true;
    auto image = image_around(memory, mappings, map.dynamic);
    // What dlopen() has loaded comes behind the loader, and may go again.
    if (!seen_loader && image) out.kept.push_back({image->base(), image->end()});
    if (map.dynamic == loader.image().dynamic()) seen_loader = true;
    // The program, and what is loaded before the C library, is asked first.
    if (!seen_c_library && image && image->function("calloc")) out.malloc_is_replaced = true;
    // 0: it has none; -1 and -2: each thread gets its own when it first asks.
    if (distance == 0 || distance >= ~std::uint64_t{0} - 1) continue;
    if (distance > kLargestStaticSize) return unknown("a library's storage lies nowhere");
    out.deepest = std::max(out.deepest, distance);
    if (!image || !image->thread_image()) return unknown("a library's storage has no image");
    const auto& own = *image->thread_image();
    if (own.memory_size > distance) return unknown("a library's storage has no room");
    // No two lie in the same place.
    bytes += own.file_size;
    if (bytes > kLargestStaticSize) return unknown("the libraries' storage has no room");
    StaticThreadStorage storage{distance, std::vector<std::byte>(own.file_size)};
    if (!storage.image.empty() && !memory(own.address, storage.image.data(), storage.image.size()))
      return unknown("a library's storage cannot be read");
    out.storage.push_back(std::move(storage));
  }
  if (!seen_c_library || !seen_loader)
    return unknown("it is not in its loader's list of libraries");
  if (loader.image().value<Debug>("_r_debug") != debug) return changing();
  return out;
}

bool CLibrary::keeps(const proc::Mapping& mapping) const {
  return std::any_of(loaded_.kept.begin(), loaded_.kept.end(), [&](const Library::Range& range) {
    return range.start <= mapping.start && mapping.end <= (range.end + kPage - 1) / kPage * kPage;
  });
}

Result<CLibrary::RealThread> CLibrary::check(const MemoryReader& memory,
                                             std::uint64_t thread_pointer, int inner_tid) const {
  std::array<std::uint64_t, kTcbHead / 8> head{};
  std::int32_t tid = 0;
  if (thread_pointer % 16 != 0 || thread_pointer >= kLastAddress ||
      !memory(thread_pointer, head.data(), sizeof head) ||
      !memory(thread_pointer + tid_offset_, &tid, sizeof tid))
    return unknown("a thread has no descriptor");
  if (head[kTcbSelf / 8] != thread_pointer || head[kTcbThread / 8] != thread_pointer)
    return unknown("a thread's descriptor does not name itself");
  if (tid != inner_tid)
    return unknown(
        fmt::format("a thread's descriptor has the number {} and not {}", tid, inner_tid));
  RealThread out;
  out.stack_guard = head[kTcbStackGuard / 8];
  out.pointer_guard = head[kTcbPointerGuard / 8];
  // The vector: two words for each library, after two for the generation; before that its length.
  const std::uint64_t vector = head[kTcbThreadVector / 8];
  std::array<std::uint64_t, 3> counts{};
  if (vector % 8 != 0 || vector < kPage || vector >= kLastAddress ||
      !memory(vector - 16, counts.data(), sizeof counts))
    return unknown("a thread has no vector of its storage");
  out.capacity = counts[0];
  out.generation = counts[2];
  if (out.capacity == 0 || out.capacity > kMostCapacity || out.generation > (1ULL << 40))
    return unknown("a thread's vector of its storage makes no sense");
  if (rseq_offset_) {
    std::array<std::uint32_t, 2> rseq{};
    const std::uint64_t at = thread_pointer + static_cast<std::uint64_t>(*rseq_offset_);
    if (!memory(at, rseq.data(), sizeof rseq)) return unknown("a thread has no sequences");
    out.rseq_processor = rseq[1];
  }
  return out;
}

}  // namespace stasis::attach
