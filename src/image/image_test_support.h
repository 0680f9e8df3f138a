// What the tests of this folder share: a temporary directory, small images, a manifest of every
// kind of field.
#pragma once

#include <fcntl.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <string>

#include <gtest/gtest.h>

#include "base/fd.h"
#include "image/image_writer.h"
#include "image/manifest.h"

namespace stasis {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string form = (std::filesystem::temp_directory_path() / "stasis-image-XXXXXX").string();
    path_ = ::mkdtemp(form.data());
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The smallest that there may be.
inline constexpr std::uint32_t kTestChunk = 64U << 10;

// Aligned as the mover's buffers are.
class Memory {
 public:
  explicit Memory(std::size_t size, std::size_t shift = 0)
      : all_(static_cast<std::byte*>(std::aligned_alloc(4096, (size + shift + 8191) / 4096 * 4096)),
             &std::free),
        bytes_(all_.get() + shift, size) {
    std::memset(bytes_.data(), 0, size);
  }
  std::span<std::byte> bytes() { return bytes_; }
  std::span<std::byte> chunk(std::size_t number, std::uint32_t size = kTestChunk) {
    const std::size_t from = number * size;
    return bytes_.subspan(from, std::min<std::size_t>(size, bytes_.size() - from));
  }

 private:
  std::unique_ptr<std::byte, void (*)(void*)> all_;
  std::span<std::byte> bytes_;
};

inline void fill_random(std::span<std::byte> bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t value = random();
    std::memcpy(&bytes[at], &value, std::min(sizeof value, bytes.size() - at));
  }
}

inline UniqueFd open_directory(const std::string& path) {
  return std::move(open_file(AT_FDCWD, path, O_RDONLY | O_DIRECTORY).value());
}

// A manifest with something in every field; no files yet.
inline Manifest sample_manifest() {
  Manifest manifest;
  manifest.stasis_version = "0.1.0";
  manifest.created = "2026-11-21T09:30:00Z";
  manifest.hostname = "node-7";
  manifest.kernel_release = "6.18.0";
  manifest.criu_version = 40201;
  manifest.driver_version = "580.159.04";
  manifest.cuda_version = 13000;
  manifest.gpus = {{"GPU-0", "H100", 80ULL << 30, "00000000:18:00.0"},
                   {"GPU-1", "H100", 80ULL << 30, "00000000:2A:00.0"}};
  manifest.root = Pid{100};
  manifest.processes = {{Pid{100},
                         Pid{0},
                         {"python3", "train.py", "--name=\"a b\""},
                         true,
                         CudaState::kRunning,
                         {{"GPU-0", 17ULL << 30}, {"GPU-1", 5}},
                         {Tid{102}, Tid{103}}},
                        {Pid{101}, Pid{100}, {}, false, std::nullopt, {}}};
  manifest.criu_options.shell_job = true;
  manifest.criu_options.external = {"mnt[/data]:data"};
  manifest.criu_options.cgroups = CgroupMode::kSoft;
  manifest.phases = {{"lock", 0.004, 0.125}, {"checkpoint", 6.3}};
  manifest.beside = {{"driver: checkpoint 100", 6.25, 0.5}};
  return manifest;
}

// The same with files, as it stands in an image.
inline Manifest sealed_manifest() {
  Manifest manifest = sample_manifest();
  manifest.files = {{"criu/core-100.img", 4096, "00112233445566778899aabbccddeeff"},
                    {"criu/pages-1.img", 1ULL << 34, "ffeeddccbbaa99887766554433221100"}};
  manifest.content = {1000, "0123456789abcdef0123456789abcdef", {1ULL << 35, 4096}};
  manifest.host_content = {500, "fedcba9876543210fedcba9876543210", {8192}};
  manifest.total_bytes = 4096 + (1ULL << 34) + 1000 + (1ULL << 35) + 4096 + 500 + 8192;
  return manifest;
}

}  // namespace stasis
