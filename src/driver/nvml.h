// What NVML says about GPUs: all of them, also those that CUDA_VISIBLE_DEVICES hides, without
// making a CUDA context (which would cost a few hundred MB of the GPU's memory). Thread-safe once
// loaded.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "driver/driver.h"
#include "driver/library.h"

namespace stasis {

class Nvml {
 public:
  // `libcuda_path`: where the driver's library was found; a libnvidia-ml.so.1 beside it is taken
  // when the user named that library by STASIS_LIBCUDA, else the system's.
  static Result<std::unique_ptr<Nvml>> load(const std::string& libcuda_path, bool beside);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  std::string driver_version() const;  // "580.159.04", empty if unknown
  Result<std::vector<Gpu>> gpus() const;
  Result<std::map<Pid, std::vector<GpuUse>>> memory_by_process() const;

 private:
  explicit Nvml(Library library) : library_(std::move(library)) {}
  Library library_;
};

}  // namespace stasis
