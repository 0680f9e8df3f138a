// Processes that share GPU memory in every way there is, and write into each other's in turns.
// Which has what of whom follows from the seed (sharing_graph.h), and changes every few rounds.
//
// In every round one of those who have a piece checks all of it and gives it other content; all who
// have it then look at a part of it, each through all of its maps.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/fd.h"
#include "tests/workloads/gpu.h"
#include "tests/workloads/sharing_graph.h"
#include "tests/workloads/spawn.h"

namespace stasis::workloads {
namespace {

using programs::die;

constexpr std::size_t kMostProcesses = 16;
constexpr std::uint64_t kSpan = 4096;  // words that each looks at

// Where a descriptor or a handle of CUDA IPC can be had.
struct Offer {
  pid_t process;
  int descriptor;
  cuda::CUipcMemHandle handle;
};

// What the processes share besides: a file of memory, which an image has the content of.
struct Table {
  std::atomic<std::uint64_t> arrived;
  // By the round: no process begins the one after the next before all have read it.
  std::array<std::array<std::atomic<bool>, kMostProcesses>, 2> wants_to_stop;
  // The owner's, and behind it those of the imports.
  std::array<std::array<Offer, 1 + SharingGraph::kMostImports>, SharingGraph::kMostPieces> offers;
};

// Of an inherited descriptor of it.
Table* table_of(int file) {
  void* memory = ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) die(1, std::string("mmap: ") + std::strerror(errno));
  ::close(file);
  return static_cast<Table*>(memory);
}

// As PyTorch gets the descriptors of its expandable segments.
UniqueFd take_descriptor(const Offer& offer) {
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, offer.process, 0)));
  UniqueFd taken(static_cast<int>(::syscall(SYS_pidfd_getfd, process.get(), offer.descriptor, 0)));
  if (!taken.valid() && (errno == EPERM || errno == ENOSYS))
    programs::die_absent(std::string("pidfd_getfd: ") + std::strerror(errno));
  if (!taken.valid()) die(1, std::string("pidfd_getfd: ") + std::strerror(errno));
  return taken;
}

// A mapped piece. By CUDA IPC: one opening.
struct Map {
  cuda::CUdeviceptr at = 0;
  bool writable = true;
};

// What a process has of one piece, as its owner or by one import.
struct Holding {
  cuda::CUmemGenericAllocationHandle handle = 0;  // 0: none
  UniqueFd descriptor;
  std::vector<Map> maps;
};

class Sharer {
 public:
  explicit Sharer(Run& run)
      : run_(run),
        rank_(run.options().rank),
        table_(table_of(std::stoi(run.options().meeting))),
        gpu_(Gpu::primary(initialised_driver(run.options()), gpu_of(run.options()))),
        graph_(shape_of(run)),
        stream_(gpu_.stream()),
        checker_(gpu_, SharingGraph::kMostPieces),
        owned_(graph_.pieces().size()),
        imported_(graph_.pieces().size()) {
    std::vector<GraphChange> all;
    for (std::size_t piece = 0; piece < owned_.size(); ++piece) {
      all.push_back({GraphChange::Kind::kRenew, piece, 0, ImportPlan::kFromOwner});
      imported_[piece].resize(SharingGraph::kMostImports);
    }
    make_anew(all, graph_.pieces());
  }

  // True if all want to stop after this round.
  bool round() {
    const auto every = run_.options().renew_every;
    if (every != 0 && run_.round() % every == 0) change();
    write();
    table_->wants_to_stop[run_.round() % 2][rank_] = Run::stop_requested();
    meet();
    const auto& wishes = table_->wants_to_stop[run_.round() % 2];
    const bool last =
        std::any_of(wishes.begin(), wishes.end(), [](const auto& one) { return one.load(); });
    read();
    meet();
    return last;
  }

 private:
  static int gpu_of(const Options& options) {
    return static_cast<int>(options.rank) % device_count(initialised_driver(options));
  }

  static GraphShape shape_of(const Run& run) {
    const Options& options = run.options();
    GraphShape shape;
    shape.seed = options.seed;
    shape.processes = options.ranks;
    shape.devices = static_cast<std::uint32_t>(device_count(initialised_driver(options)));
    shape.pieces = options.pieces;
    shape.imports = options.imports;
    shape.kinds = options.piece_kinds;
    shape.owners_free = options.owners_free;
    return shape;
  }

  void meet() {
    ++met_;
    ++table_->arrived;
    while (table_->arrived < met_ * run_.options().ranks) {
      const timespec pause{0, 200000};
      ::nanosleep(&pause, nullptr);
    }
  }

  static std::string name_of(std::size_t piece) { return "piece " + std::to_string(piece); }

  // --- A round

  // The maps of a piece that this process has.
  std::vector<Map> maps_of(std::size_t piece) const {
    std::vector<Map> all = owned_[piece].maps;
    for (const Holding& import : imported_[piece])
      all.insert(all.end(), import.maps.begin(), import.maps.end());
    return all;
  }

  void write() {
    checker_.begin(stream_);
    for (std::size_t i = 0; i < graph_.pieces().size(); ++i) {
      PiecePlan& piece = graph_.pieces()[i];
      const auto writers = piece.writers();
      if (writers.empty()) continue;
      const std::uint64_t content = run_.seed(run_.round(), 100 + i);
      if (writers[(run_.round() + i) % writers.size()] == rank_) {
        auto maps = maps_of(i);
        std::erase_if(maps, [](const Map& one) { return !one.writable; });
        Buffer buffer{name_of(i), maps[run_.round() % maps.size()].at,
                      piece.bytes / sizeof(std::uint64_t), piece.content};
        checker_.advance(stream_, buffer, content);
      }
      piece.content = content;
    }
    checker_.verify(stream_, run_);
  }

  void read() const {
    for (std::size_t i = 0; i < graph_.pieces().size(); ++i) {
      const PiecePlan& piece = graph_.pieces()[i];
      const std::uint64_t words = piece.bytes / sizeof(std::uint64_t);
      const std::uint64_t span = std::min(words, kSpan);
      std::uint64_t number = run_.round() * 7;
      for (const Map& map : maps_of(i)) {
        const std::uint64_t first = number++ % (words / span) * span;
        const Buffer buffer{name_of(i) + ", as mapped", map.at, words, piece.content};
        verify_span(gpu_, run_, buffer, first, span);
      }
    }
  }

  // --- The graph

  void change() {
    // What each had before.
    const std::vector<PiecePlan> before = graph_.pieces();
    const auto changes = graph_.change(run_.round());
    for (const GraphChange& one : changes) {
      if (one.kind == GraphChange::Kind::kRenew) leave(one.piece, before[one.piece]);
      if (one.kind == GraphChange::Kind::kReimport) leave_import(one, before[one.piece]);
      change_of_owner(one, before[one.piece]);
    }
    meet();
    make_anew(changes, before);
  }

  // Makes the pieces that are new and takes all imports again. By turns: who offers something, and
  // who takes it.
  void make_anew(const std::vector<GraphChange>& changes, const std::vector<PiecePlan>& before) {
    for (const GraphChange& one : changes) {
      PiecePlan& piece = graph_.pieces()[one.piece];
      if (one.kind == GraphChange::Kind::kRenew) {
        if (before[one.piece].owner == rank_) free_own(one.piece, before[one.piece]);
        piece.content = run_.seed(run_.round(), 5000 + one.piece);
        if (piece.owner == rank_) create(one.piece, piece);
      }
      const bool asked = one.kind == GraphChange::Kind::kReimport && piece.owner == rank_ &&
                         one.from == ImportPlan::kFromOwner;
      if (asked && piece.by_descriptor()) offer_own(one.piece);
    }
    for (int depth = 0; depth < SharingGraph::kMostDepth; ++depth) {
      meet();
      for (const GraphChange& one : changes) {
        const PiecePlan& piece = graph_.pieces()[one.piece];
        if (one.kind == GraphChange::Kind::kReimport && depth == 0)
          import(one.piece, one.import, one.from);
        if (one.kind != GraphChange::Kind::kRenew) continue;
        for (std::size_t i = 0; i < piece.imports.size(); ++i)
          if (piece.depth(i) == depth) import(one.piece, i, piece.imports[i].from);
      }
    }
    meet();
    for (const GraphChange& one : changes)
      drop_descriptors(one.piece);
  }

  // Those which are not to be kept, when all have them.
  void drop_descriptors(std::size_t number) {
    const PiecePlan& piece = graph_.pieces()[number];
    if (piece.owner == rank_ && !piece.keeps_descriptor) owned_[number].descriptor.reset();
    for (std::size_t i = 0; i < piece.imports.size(); ++i)
      if (!piece.imports[i].keeps_descriptor) imported_[number][i].descriptor.reset();
  }

  void leave(std::size_t piece, const PiecePlan& before) {
    for (Holding& import : imported_[piece]) {
      give_up(import, before);
      import.descriptor.reset();
    }
  }

  void leave_import(const GraphChange& change, const PiecePlan& before) {
    if (before.imports[change.import].process == rank_)
      give_up(imported_[change.piece][change.import], before);
  }

  // But the descriptor.
  void give_up(Holding& holding, const PiecePlan& piece) {
    const auto& cuda = gpu_.cuda();
    for (const Map& map : holding.maps) {
      if (piece.by_descriptor())
        unmap(map, piece);
      else
        cuda.cuIpcCloseMemHandle(map.at);
    }
    holding.maps.clear();
    if (holding.handle != 0) cuda.cuMemRelease(holding.handle);
    holding.handle = 0;
  }

  void free_own(std::size_t number, const PiecePlan& piece) {
    Holding& own = owned_[number];
    if (piece.by_descriptor()) {
      give_up(own, piece);
    } else {
      for (const Map& map : own.maps)
        gpu_.cuda().cuMemFree_v2(map.at);
      own.maps.clear();
    }
    own.descriptor.reset();
  }

  void change_of_owner(const GraphChange& change, const PiecePlan& piece) {
    Holding& own = owned_[change.piece];
    if (piece.owner != rank_) return;
    switch (change.kind) {
      case GraphChange::Kind::kOwnerUnmaps:
        unmap(own.maps.front(), piece);
        own.maps.clear();
        break;
      case GraphChange::Kind::kOwnerMaps:
        own.maps.push_back(map(own.handle, piece, true, true));
        break;
      case GraphChange::Kind::kOwnerReleases:
        gpu_.cuda().cuMemRelease(own.handle);
        own.handle = 0;
        break;
      case GraphChange::Kind::kOwnerRetains:
        own.handle = retained(own);
        break;
      case GraphChange::Kind::kOwnerFrees:
        free_own(change.piece, piece);
        break;
      default:
        break;
    }
  }

  cuda::CUmemGenericAllocationHandle retained(const Holding& holding) const {
    cuda::CUmemGenericAllocationHandle handle = 0;
    gpu_.cuda().cuMemRetainAllocationHandle(&handle,
                                            reinterpret_cast<void*>(holding.maps.front().at));
    return handle;
  }

  void create(std::size_t number, const PiecePlan& piece) {
    const auto& cuda = gpu_.cuda();
    Holding& own = owned_[number];
    Map first;
    if (piece.by_descriptor()) {
      cuda::CUmemAllocationProp prop{};
      prop.type = cuda::CU_MEM_ALLOCATION_TYPE_PINNED;
      prop.requestedHandleTypes = cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
      prop.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, static_cast<int>(piece.device)};
      if (piece.kind == PieceKind::kHost) prop.location = {cuda::CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
      const auto made = cuda.cuMemCreate.raw(&own.handle, piece.bytes, &prop, 0);
      if (made != cuda::CUDA_SUCCESS)
        programs::die_absent("cuMemCreate: " + programs::describe(made));
      first = map(own.handle, piece, true, true);
    } else {
      first.at = gpu_.allocate(piece.bytes);
    }
    own.maps.push_back(first);
    gpu_.kernels().fill(stream_, first.at, piece.bytes / sizeof(std::uint64_t), piece.content);
    cuda.cuStreamSynchronize(stream_);
    offer_own(number);
    if (!piece.by_descriptor()) return;
    if (!piece.mapped) {
      unmap(first, piece);
      own.maps.clear();
    }
    if (!piece.keeps_handle) {
      cuda.cuMemRelease(own.handle);
      own.handle = 0;
    }
  }

  void offer_own(std::size_t number) {
    const auto& cuda = gpu_.cuda();
    Holding& own = owned_[number];
    Offer& offer = table_->offers[number][0];
    offer.process = ::getpid();
    if (!graph_.pieces()[number].by_descriptor()) {
      cuda.cuIpcGetMemHandle(&offer.handle, own.maps.front().at);
      return;
    }
    if (!own.descriptor.valid()) {
      const bool borrowed = own.handle == 0;
      const auto handle = borrowed ? retained(own) : own.handle;
      int made = -1;
      cuda.cuMemExportToShareableHandle(&made, handle,
                                        cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
      own.descriptor = UniqueFd(made);
      if (borrowed) cuda.cuMemRelease(handle);
    }
    offer.descriptor = own.descriptor.get();
  }

  void import(std::size_t number, std::size_t which, int from) {
    const PiecePlan& piece = graph_.pieces()[number];
    const ImportPlan& plan = piece.imports[which];
    if (plan.process != rank_) return;
    Holding& holding = imported_[number][which];
    auto& offers = table_->offers[number];
    if (!piece.by_descriptor()) {
      for (std::uint32_t i = 0; i < plan.maps; ++i) {
        Map opened;
        gpu_.cuda().cuIpcOpenMemHandle_v2(&opened.at, offers[0].handle,
                                          cuda::kIpcMemLazyEnablePeerAccess);
        holding.maps.push_back(opened);
      }
      return;
    }
    if (!holding.descriptor.valid())
      holding.descriptor = take_descriptor(offers[static_cast<std::size_t>(1 + from)]);
    offers[1 + which].process = ::getpid();
    offers[1 + which].descriptor = holding.descriptor.get();
    const auto& cuda = gpu_.cuda();
    holding.handle = imported(holding);
    for (std::uint32_t i = 0; i < plan.maps; ++i) {
      const bool last = i + 1 == plan.maps;
      const auto handle = last && plan.twice ? imported(holding) : holding.handle;
      holding.maps.push_back(map(handle, piece, plan.for_all, !(last && plan.last_for_reading)));
      if (handle != holding.handle) cuda.cuMemRelease(handle);
    }
    if (plan.keeps_handle) return;
    cuda.cuMemRelease(holding.handle);
    holding.handle = 0;
  }

  cuda::CUmemGenericAllocationHandle imported(const Holding& holding) const {
    cuda::CUmemGenericAllocationHandle handle = 0;
    gpu_.cuda().cuMemImportFromShareableHandle(
        &handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(holding.descriptor.get())),
        cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    return handle;
  }

  // For this process's device, or for all, and of the host's memory for the CPU too.
  Map map(cuda::CUmemGenericAllocationHandle handle, const PiecePlan& piece, bool for_all,
          bool writable) const {
    const auto& cuda = gpu_.cuda();
    Map made{0, writable};
    cuda.cuMemAddressReserve(&made.at, piece.bytes, 0, 0, 0);
    cuda.cuMemMap(made.at, piece.bytes, 0, handle, 0);
    const auto flags =
        writable ? cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE : cuda::CU_MEM_ACCESS_FLAGS_PROT_READ;
    std::vector<cuda::CUmemAccessDesc> access;
    access.push_back({{cuda::CU_MEM_LOCATION_TYPE_DEVICE, gpu_.ordinal()}, flags});
    for (int i = 0; for_all && i < device_count(cuda); ++i)
      if (i != gpu_.ordinal()) access.push_back({{cuda::CU_MEM_LOCATION_TYPE_DEVICE, i}, flags});
    if (for_all && piece.kind == PieceKind::kHost)
      access.push_back({{cuda::CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}, flags});
    cuda.cuMemSetAccess(made.at, piece.bytes, access.data(), access.size());
    return made;
  }

  void unmap(const Map& map, const PiecePlan& piece) const {
    gpu_.cuda().cuMemUnmap(map.at, piece.bytes);
    gpu_.cuda().cuMemAddressFree(map.at, piece.bytes);
  }

  Run& run_;
  std::uint32_t rank_;
  Table* table_;
  Gpu gpu_;
  SharingGraph graph_;
  cuda::CUstream stream_;
  Checker checker_;
  std::vector<Holding> owned_;                  // by piece
  std::vector<std::vector<Holding>> imported_;  // by piece and import
  std::uint64_t met_ = 0;
};

}  // namespace

void run_sharing(Run& run) {
  const Options& options = run.options();
  if (options.children > kMostProcesses)
    die(2, "at most " + std::to_string(kMostProcesses) + " processes");
  if (options.piece_kinds.find_first_not_of("dhis") != std::string::npos ||
      options.piece_kinds.empty())
    die(2, "--piece-kinds: of the letters d, h, i and s");
  // Without MFD_CLOEXEC: the children inherit it.
  const int file = static_cast<int>(::syscall(SYS_memfd_create, "sharing", 0));
  if (file < 0 || ::ftruncate(file, sizeof(Table)) != 0)
    die(1, std::string("memfd_create: ") + std::strerror(errno));
  std::vector<std::vector<std::string>> all;
  for (std::uint32_t i = 0; i < options.children; ++i) {
    all.push_back({"sharer", "--meeting", std::to_string(file), "--rank", std::to_string(i),
                   "--ranks", std::to_string(options.children), "--seed",
                   std::to_string(options.seed), "--pieces", std::to_string(options.pieces),
                   "--imports", std::to_string(options.imports), "--renew-every",
                   std::to_string(options.renew_every), "--piece-kinds", options.piece_kinds});
    if (options.owners_free) all.back().emplace_back("--owners-free");
  }
  supervise(run, all);
}

void run_sharer(Run& run) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // it would wait for the others for ever
  Sharer sharer(run);
  for (bool last = false; !last;) {
    run.begin();
    last = sharer.round();
    run.finish();
  }
}

}  // namespace stasis::workloads
