// stasis-sim-smi: shows the simulated GPUs of this machine and who uses how much of them, and
// checks the settings that the simulated driver itself may not talk about.
//
// Reads the same files as the driver (registry.h) and needs no CUDA. Exit codes: 0 fine, 2 the
// environment is wrong.
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "sim/config.h"
#include "sim/faults.h"
#include "sim/registry.h"

namespace stasis::sim {
namespace {

constexpr int kBadEnvironment = 2;

std::string in_mib(std::uint64_t bytes) { return fmt::format("{} MiB", bytes >> 20); }

nlohmann::json describe(const Config& config, std::size_t index) {
  const auto& gpu = config.gpus[index];
  const auto used = usage(config.dir, gpu.uuid);
  nlohmann::json processes = nlohmann::json::array();
  for (const auto& process : used.processes) {
    processes.push_back(
        {{"pid", process.pid}, {"name", process.name}, {"used_bytes", process.bytes}});
  }
  return {{"index", index},
          {"name", gpu.name},
          {"uuid", to_text(gpu.uuid)},
          {"pci", pci_text(gpu.pci_bus)},
          {"total_bytes", gpu.capacity},
          {"used_bytes", used.used},
          {"processes", processes}};
}

void print_text(const nlohmann::json& machine) {
  fmt::print("SIMULATED GPUs (Stasis simulated driver {}, no hardware behind them)\n",
             machine["driver"].get<std::string>());
  for (const auto& gpu : machine["gpus"]) {
    fmt::print("{:>3}  {}  {}  {}  {} / {}\n", gpu["index"].get<int>(),
               gpu["name"].get<std::string>(), gpu["pci"].get<std::string>(),
               gpu["uuid"].get<std::string>(), in_mib(gpu["used_bytes"]),
               in_mib(gpu["total_bytes"]));
    for (const auto& process : gpu["processes"]) {
      const int pid = process["pid"];
      fmt::print("       {:>8}  {:<16} {}\n", pid ? std::to_string(pid) : "?",
                 process["name"].get<std::string>(), in_mib(process["used_bytes"]));
    }
  }
  if (machine["gpus"].empty()) fmt::print("  none (STASIS_SIM_GPUS=none)\n");
}

// The faults in force for calls made from this environment; false: they would be refused.
bool read_faults(const Config& config, std::vector<Fault>& out, std::string& error) {
  std::string text;
  if (const char* env = std::getenv("STASIS_SIM_FAULTS")) text = env;
  const char* named = std::getenv("STASIS_SIM_FAULTS_FILE");
  std::ifstream file(named && *named ? std::string(named) : config.dir + "/faults");
  if (file) text += "\n" + std::string(std::istreambuf_iterator<char>(file), {});
  return parse_faults(text, out, error);
}

int run(bool as_json) {
  Config config;
  std::vector<Fault> faults;
  std::string error;
  if (!load(config, error) || !read_faults(config, faults, error)) {
    fmt::print(
        stderr,
        "stasis-sim-smi: {}\nThe simulated driver refuses to work with this setting; correct "
        "or unset it.\n",
        error);
    return kBadEnvironment;
  }
  for (const auto& gpu : config.gpus) {
    // Only where there is something already: looking must not create anything.
    if (::access((config.dir + "/" + to_text(gpu.uuid)).c_str(), W_OK) == 0) {
      sweep(config.dir, gpu.uuid);
    }
  }
  nlohmann::json machine = {
      {"simulated", true}, {"driver", config.driver_text()}, {"cuda", config.cuda_version()},
      {"dir", config.dir}, {"faults", faults.size()},        {"gpus", nlohmann::json::array()}};
  for (std::size_t i = 0; i < config.gpus.size(); ++i) {
    machine["gpus"].push_back(describe(config, i));
  }
  if (as_json) {
    fmt::print("{}\n", machine.dump(2));
  } else {
    print_text(machine);
  }
  return 0;
}

}  // namespace
}  // namespace stasis::sim

int main(int argc, char** argv) {
  CLI::App app{"Shows the simulated GPUs of this machine and the processes that use them.",
               "stasis-sim-smi"};
  bool as_json = false;
  app.add_flag("--json", as_json, "Print one JSON object");
  app.footer(
      "The GPUs are those of STASIS_SIM_GPUS, STASIS_SIM_MACHINE and STASIS_SIM_DIR; see\n"
      "docs/simulated-driver.md. Fails with status 2 if one of these, or a fault, is malformed.");
  CLI11_PARSE(app, argc, argv);
  return stasis::sim::run(as_json);
}
