#include "tests/workloads/sharing_graph.h"

#include <algorithm>
#include <utility>

#include "tests/workloads/kernels.h"

namespace stasis::workloads {
namespace {

constexpr std::uint64_t kGranule = 2u << 20;

}  // namespace

class SharingGraph::Dice {
 public:
  explicit Dice(std::uint64_t seed) : seed_(seed) {}
  std::uint32_t below(std::uint32_t count) {
    return static_cast<std::uint32_t>((word(next_++, seed_) >> 32) % count);
  }
  bool one_in(std::uint32_t count) { return below(count) == 0; }

 private:
  std::uint64_t seed_;
  std::uint64_t next_ = 0;
};

std::vector<std::uint32_t> PiecePlan::writers() const {
  std::vector<std::uint32_t> all;
  if (!freed && (mapped || !by_descriptor())) all.push_back(owner);
  for (const ImportPlan& import : imports)
    all.push_back(import.process);
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

int PiecePlan::depth(std::size_t import) const {
  const int from = imports[import].from;
  return from < 0 ? 0 : 1 + depth(static_cast<std::size_t>(from));
}

SharingGraph::SharingGraph(GraphShape shape) : shape_(std::move(shape)) {
  shape_.pieces = std::clamp(shape_.pieces, 1U, kMostPieces);
  Dice dice(word(1, shape_.seed));
  pieces_.resize(shape_.pieces);
  for (PiecePlan& piece : pieces_)
    draw_piece(piece, dice);
  for (std::uint32_t i = 0; i < shape_.imports; ++i)
    draw_import(pieces_[dice.below(shape_.pieces)], dice);
}

void SharingGraph::draw_piece(PiecePlan& piece, Dice& dice) const {
  piece = PiecePlan{};
  piece.owner = dice.below(shape_.processes);
  piece.device = dice.below(shape_.devices);
  const char kind = shape_.kinds[dice.below(static_cast<std::uint32_t>(shape_.kinds.size()))];
  piece.bytes = kGranule * (1 + dice.below(2));
  switch (kind) {
    case 'h':
      piece.kind = PieceKind::kHost;
      break;
    case 'i':
      piece.kind = PieceKind::kIpc;
      piece.bytes += 4096 * dice.below(3);
      break;
    case 's':
      piece.kind = PieceKind::kSmall;
      piece.bytes = 8192 * (1 + dice.below(8));
      break;
    default:
      break;
  }
  if (!piece.by_descriptor()) return;
  switch (dice.below(4)) {
    case 0:
      piece.mapped = false;
      break;
    case 1:
      piece.keeps_handle = false;
      break;
    default:
      break;
  }
  piece.keeps_descriptor = dice.one_in(4);
}

void SharingGraph::draw_import(PiecePlan& piece, Dice& dice) const {
  if (piece.imports.size() == kMostImports) return;
  ImportPlan import;
  import.process = dice.below(shape_.processes);
  // The maker of a piece cannot open it by CUDA IPC, and the simulated driver lets only a process
  // on the same GPU do so.
  if (!piece.by_descriptor() && import.process == piece.owner)
    import.process = (import.process + 1) % shape_.processes;
  import.maps = 1 + dice.below(3);
  if (piece.by_descriptor()) {
    const auto others = static_cast<std::uint32_t>(piece.imports.size());
    if (others > 0 && dice.one_in(2)) {
      const std::uint32_t from = dice.below(others);
      if (piece.depth(from) + 1 < kMostDepth) import.from = static_cast<int>(from);
    }
    import.twice = import.maps > 1 && dice.one_in(3);
    import.keeps_handle = dice.one_in(2);
    import.keeps_descriptor = dice.one_in(3);
    import.for_all = dice.one_in(2);
    import.last_for_reading = import.maps > 1 && dice.one_in(3);
  }
  piece.imports.push_back(import);
}

std::vector<GraphChange> SharingGraph::change(std::uint64_t round) {
  Dice dice(word(round, word(2, shape_.seed)));
  std::vector<GraphChange> changes;
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    GraphChange change;
    change.piece = i;
    if (dice.one_in(2) && draw_change(change, dice)) changes.push_back(change);
  }
  return changes;
}

bool SharingGraph::draw_change(GraphChange& change, Dice& dice) {
  PiecePlan& piece = pieces_[change.piece];
  // The driver opens such no more once its owner was restored (ADR 46).
  if (piece.kind == PieceKind::kSmall) return false;
  const std::uint32_t way = dice.below(4);
  if (way == 0) {
    const auto imports = static_cast<std::uint32_t>(piece.imports.size());
    change.kind = GraphChange::Kind::kRenew;
    draw_piece(piece, dice);
    if (piece.kind == PieceKind::kSmall) piece.kind = PieceKind::kIpc, piece.bytes = kGranule;
    for (std::uint32_t i = 0; i < imports; ++i)
      draw_import(piece, dice);
    return true;
  }
  if (way <= 2 && !piece.imports.empty()) {
    change.kind = GraphChange::Kind::kReimport;
    change.import = dice.below(static_cast<std::uint32_t>(piece.imports.size()));
    for (std::size_t i = 0; i < piece.imports.size(); ++i)
      if (piece.imports[i].keeps_descriptor) change.from = static_cast<int>(i);
    // Of a piece that its owner has freed nothing can be had from others any more.
    return !piece.freed;
  }
  return piece.by_descriptor() && !piece.freed && draw_change_of_owner(change, dice);
}

bool SharingGraph::draw_change_of_owner(GraphChange& change, Dice& dice) {
  PiecePlan& piece = pieces_[change.piece];
  if (shape_.owners_free && !piece.imports.empty() && dice.one_in(2)) {
    change.kind = GraphChange::Kind::kOwnerFrees;
    piece.freed = true;
    return true;
  }
  if (!piece.mapped) {
    change.kind = GraphChange::Kind::kOwnerMaps;
    piece.mapped = true;
  } else if (!piece.keeps_handle) {
    change.kind = GraphChange::Kind::kOwnerRetains;
    piece.keeps_handle = true;
  } else if (dice.one_in(2)) {
    change.kind = GraphChange::Kind::kOwnerUnmaps;
    piece.mapped = false;
  } else {
    change.kind = GraphChange::Kind::kOwnerReleases;
    piece.keeps_handle = false;
  }
  return true;
}

}  // namespace stasis::workloads
