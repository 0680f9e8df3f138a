#include "image/content_codec.h"

#include <lz4.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "image/content_format.h"

namespace stasis {
namespace {

constexpr int kZstdLevel = 1;
constexpr std::size_t kPieces = 4;
constexpr std::size_t kPiece = 4096;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
struct FreeCompressor {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
};
struct FreeDecompressor {
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

struct Buffer {
  std::unique_ptr<std::byte, Free> memory;
  std::size_t size = 0;

  Result<std::span<std::byte>> get(std::size_t bytes) {
    if (size < bytes) {
      size = 0;
      memory.reset(static_cast<std::byte*>(
          std::aligned_alloc(content_format::kPage, content_format::page_aligned(bytes))));
      if (memory == nullptr) {
        return fail(ErrorCode::kOutOfHostMemory,
                    fmt::format("no memory for {} bytes of GPU content", bytes));
      }
      size = content_format::page_aligned(bytes);
    }
    return std::span(memory.get(), size);
  }
};

const char* chars(std::span<const std::byte> bytes) {
  return reinterpret_cast<const char*>(bytes.data());
}
char* chars(std::span<std::byte> bytes) { return reinterpret_cast<char*>(bytes.data()); }

}  // namespace

struct Workspace::State {
  Buffer stored;
  Buffer content;
  std::unique_ptr<ZSTD_CCtx, FreeCompressor> compressor;
  std::unique_ptr<ZSTD_DCtx, FreeDecompressor> decompressor;

  std::optional<std::size_t> compress(ContentEncoding encoding, std::span<const std::byte> from,
                                      std::span<std::byte> into) {
    if (encoding == ContentEncoding::kLz4) {
      const int size = LZ4_compress_default(chars(from), chars(into), static_cast<int>(from.size()),
                                            static_cast<int>(into.size()));
      return size > 0 ? std::optional<std::size_t>(static_cast<std::size_t>(size)) : std::nullopt;
    }
    if (encoding != ContentEncoding::kZstd) return std::nullopt;
    if (compressor == nullptr) compressor.reset(ZSTD_createCCtx());
    if (compressor == nullptr) return std::nullopt;  // without memory it stays as it is
    const std::size_t size = ZSTD_compressCCtx(compressor.get(), into.data(), into.size(),
                                               from.data(), from.size(), kZstdLevel);
    return ZSTD_isError(size) == 0 ? std::optional(size) : std::nullopt;
  }
};

Workspace::Workspace() : state_(std::make_unique<State>()) {}
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;
Workspace::~Workspace() = default;

Result<std::span<std::byte>> Workspace::stored(std::size_t bytes) {
  return state_->stored.get(bytes);
}
Result<std::span<std::byte>> Workspace::content(std::size_t bytes) {
  return state_->content.get(bytes);
}

std::optional<std::size_t> Workspace::compress(ContentEncoding encoding,
                                               std::span<const std::byte> content,
                                               std::span<std::byte> into) {
  // By the same method: bf16 weights shrink by a fifth with zstd and not at all with lz4.
  if (content.size() >= 4 * kPieces * kPiece) {
    std::array<std::byte, kPieces * kPiece> sample{};
    for (std::size_t i = 0; i < kPieces; ++i) {
      const std::size_t from = content.size() / kPieces * i;
      std::copy_n(content.begin() + static_cast<std::ptrdiff_t>(from), kPiece,
                  sample.begin() + static_cast<std::ptrdiff_t>(i * kPiece));
    }
    std::array<std::byte, sample.size() - sample.size() / 16> room;
    if (!state_->compress(encoding, sample, room)) return std::nullopt;
  }
  return state_->compress(encoding, content, into);
}

bool Workspace::decompress(ContentEncoding encoding, std::span<const std::byte> stored,
                           std::span<std::byte> into) {
  if (encoding == ContentEncoding::kLz4) {
    return LZ4_decompress_safe(chars(stored), chars(into), static_cast<int>(stored.size()),
                               static_cast<int>(into.size())) == static_cast<int>(into.size());
  }
  if (encoding != ContentEncoding::kZstd) return false;
  if (state_->decompressor == nullptr) state_->decompressor.reset(ZSTD_createDCtx());
  if (state_->decompressor == nullptr) return false;
  return ZSTD_decompressDCtx(state_->decompressor.get(), into.data(), into.size(), stored.data(),
                             stored.size()) == into.size();
}

bool all_zero(std::span<const std::byte> bytes) {
  // Each byte is the one before it, and the first is 0.
  return bytes.empty() || (bytes.front() == std::byte{0} &&
                           std::memcmp(bytes.data(), bytes.data() + 1, bytes.size() - 1) == 0);
}

}  // namespace stasis
