// Which process of the workload `sharing` has made which piece of GPU memory, who has imported it
// and how, and what of that changes from time to time. All of it follows from a seed, so that every
// process knows it without being told.
//
// Only what CUDA allows: a piece is mapped whole, a handle of CUDA IPC is not opened by its maker,
// and what is open by CUDA IPC is not freed (that is undefined there).
//
// A plain value. No CUDA here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace stasis::workloads {

enum class PieceKind : std::uint8_t {
  kDescriptor,  // cuMemCreate, exported as a descriptor
  kHost,        // the same, of the host's memory
  kIpc,         // cuMemAlloc of so much that an agent serves it, by CUDA IPC
  kSmall,       // of so little that the driver does
};

struct ImportPlan {
  static constexpr int kFromOwner = -1;

  std::uint32_t process = 0;
  // Where it gets the descriptor: or the number of the import that passes its own on.
  int from = kFromOwner;
  std::uint32_t maps = 1;  // by CUDA IPC: how often it is opened
  bool twice = false;      // imported a second time, for the last of its maps
  bool keeps_handle = false;
  bool keeps_descriptor = false;
  bool for_all = false;           // access for all devices, and of the host's memory for the CPU
  bool last_for_reading = false;  // the last of several maps
};

struct PiecePlan {
  PieceKind kind = PieceKind::kDescriptor;
  std::uint32_t owner = 0;
  std::uint32_t device = 0;  // not of what is cuMemAlloc's, which is on its owner's
  std::uint64_t bytes = 0;
  // The owner's; by descriptor only.
  bool mapped = true;
  bool keeps_handle = true;
  bool keeps_descriptor = false;
  std::vector<ImportPlan> imports;
  // The owner has neither handle nor map any more.
  bool freed = false;
  std::uint64_t content = 0;  // the seed of what is in it

  bool by_descriptor() const { return kind == PieceKind::kDescriptor || kind == PieceKind::kHost; }
  // The processes that can write into it, in order.
  std::vector<std::uint32_t> writers() const;
  // By how many others the descriptor comes to it when the piece is made.
  int depth(std::size_t import) const;
};

struct GraphChange {
  enum class Kind : std::uint8_t {
    kRenew,        // everything is given up and made anew, by another owner perhaps
    kReimport,     // `import` is given up and made anew
    kOwnerUnmaps,  // the handle keeps it
    kOwnerMaps,
    kOwnerReleases,  // the map keeps it
    kOwnerRetains,   // takes a handle by the address
    kOwnerFrees,     // the imports keep it
  };
  Kind kind = Kind::kRenew;
  std::size_t piece = 0;
  std::size_t import = 0;
  // Of kReimport: as ImportPlan::from; its own number if it has kept the descriptor.
  int from = ImportPlan::kFromOwner;
};

struct GraphShape {
  std::uint64_t seed = 0;
  std::uint32_t processes = 2;
  std::uint32_t devices = 1;
  std::uint32_t pieces = 4;
  std::uint32_t imports = 6;  // of all pieces together
  std::string kinds = "dhi";  // of which kinds the pieces are: descriptor, host, ipc, small
  bool owners_free = false;   // while others have it open
};

class SharingGraph {
 public:
  static constexpr std::uint32_t kMostPieces = 16;
  static constexpr std::uint32_t kMostImports = 8;  // of one piece
  static constexpr int kMostDepth = 3;

  explicit SharingGraph(GraphShape shape);

  std::vector<PiecePlan>& pieces() { return pieces_; }
  const std::vector<PiecePlan>& pieces() const { return pieces_; }
  // What changes before that round; `pieces()` is as after it. At most one change of each piece.
  std::vector<GraphChange> change(std::uint64_t round);

 private:
  class Dice;
  void draw_piece(PiecePlan& piece, Dice& dice) const;
  void draw_import(PiecePlan& piece, Dice& dice) const;
  bool draw_change(GraphChange& change, Dice& dice);
  bool draw_change_of_owner(GraphChange& change, Dice& dice);

  GraphShape shape_;
  std::vector<PiecePlan> pieces_;
};

}  // namespace stasis::workloads
