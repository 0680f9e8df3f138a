// Makes an image that no dump has made: CRIU's part is two files that CRIU would not read, its GPU
// content is real. For tests of what reads images.
//
//   stasis-make-image DIR [--compress none|lz4|zstd] [--direct]
//
// Two processes, 100 and 101, of 40 chunks of 64 KiB and one of 5000 bytes each: every tenth is of
// zeros, every tenth is the same in both, half of the rest shrinks.
#include <fcntl.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "image/content_writer.h"
#include "image/image_writer.h"

namespace {

using namespace stasis;  // NOLINT(google-build-using-namespace): a program, not a header

constexpr std::uint32_t kChunk = 64U << 10;
constexpr std::size_t kChunks = 40;
constexpr std::size_t kTail = 5000;

template <class T>
T need(Result<T> result) {
  if (!result) {
    std::fprintf(stderr, "stasis-make-image: %s\n", result.error().to_string().c_str());
    std::exit(1);
  }
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

std::vector<std::byte> content_of(unsigned process) {
  std::vector<std::byte> bytes(kChunks * kChunk + kTail);
  for (std::size_t chunk = 0; chunk <= kChunks; ++chunk) {
    if (chunk % 10 == 3) continue;
    std::mt19937_64 random(chunk % 10 == 4 ? 4 : 1000 * process + chunk);
    const std::size_t end = std::min(bytes.size(), (chunk + 1) * kChunk);
    for (std::size_t at = chunk * kChunk; at + 8 <= end; at += 8) {
      const std::uint64_t value = chunk % 2 == 0 ? random() : random() % 3;
      std::memcpy(&bytes[at], &value, sizeof value);
    }
  }
  return bytes;
}

void write_file(const UniqueFd& dir, const std::string& name, const std::string& text) {
  auto file = need(open_file(dir.get(), name, O_WRONLY | O_CREAT | O_EXCL, 0600));
  need(write_all(file.get(), text.data(), text.size(), name));
  need(file.close(name));
}

ContentRecord write_content(const UniqueFd& dir, const ContentOptions& options) {
  NoProgress progress;
  Interrupt interrupt;
  auto writer = need(ContentWriter::create(dir, options));
  for (unsigned i = 0; i < 2; ++i) {
    GpuUuid gpu;
    gpu.bytes.fill(static_cast<std::uint8_t>(i + 1));
    need(writer.add_stream(
        Pid{static_cast<int>(100 + i)}, kChunks * kChunk + kTail,
        {{0, kChunk, gpu, 0x7f0000000000}, {kChunk, kTail, gpu, 0x7f1000000000}}));
  }
  for (unsigned i = 0; i < 2; ++i)
    need(writer.write(i, 0, content_of(i)));
  return need(writer.finish(progress, interrupt)).record;
}

Manifest describe() {
  Manifest manifest;
  manifest.stasis_version = "test";
  manifest.hostname = "nowhere";
  manifest.kernel_release = "0";
  manifest.criu_version = 40000;
  manifest.driver_version = "0";
  manifest.simulated = true;
  manifest.gpus = {
      {"GPU-01010101-0101-0101-0101-010101010101", "none", 1U << 30, "00000000:01:00.0"}};
  manifest.root = Pid{100};
  manifest.processes = {{Pid{100}, Pid{0}, {"made"}, true, CudaState::kRunning, {}},
                        {Pid{101}, Pid{100}, {"made"}, true, CudaState::kRunning, {}}};
  return manifest;
}

}  // namespace

int main(int argc, char** argv) {
  std::string dir;
  std::string compression = "none";
  ContentOptions options;
  options.chunk_bytes = kChunk;
  CLI::App app("Makes an image with GPU content, for tests");
  app.add_option("DIR", dir)->required();
  app.add_option("--compress", compression)->check(CLI::IsMember({"none", "lz4", "zstd"}));
  app.add_flag("--direct", options.direct_io);
  CLI11_PARSE(app, argc, argv);
  if (compression == "lz4") options.compression = ContentCompression::kLz4;
  if (compression == "zstd") options.compression = ContentCompression::kZstd;

  auto image = need(ImageWriter::create(dir, false));
  write_file(image.criu_dir(), "core-100.img", "no core");
  write_file(image.criu_dir(), "pages-1.img", std::string(100000, 'p'));
  Manifest manifest = describe();
  manifest.content = write_content(image.dir(), options);
  NoProgress progress;
  Interrupt interrupt;
  need(image.seal(std::move(manifest), SyncPolicy::kNone, progress, interrupt));
  need(image.commit());
  return 0;
}
