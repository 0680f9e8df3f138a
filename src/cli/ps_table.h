// The rows of `stasis ps`, and what people and spreadsheets read of them.
//
// Plain values, and functions of them; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "driver/driver.h"

namespace stasis::cli {

struct Row {
  Pid pid;
  std::string user;
  // A CUDA state, or "waiting" for its GPU memory, which is away though the driver lets it run;
  // without an answer "busy", "stopped", "frozen" or "traced", and "?" for another reason.
  std::string state;
  std::string path;    // "direct", "driver", or empty if that could not be seen
  std::string reason;  // why there is no CUDA state; empty if there is one
  // What it has on each GPU; of one that we suspended, what it had there and gets back.
  std::vector<GpuUse> uses;
  std::int64_t since =
      0;              // when we suspended it, or it was started; seconds since 1970, 0: unknown
  std::string under;  // "stasis dump (12)", "left behind by stasis dump", or empty
  std::string name;   // of the job it belongs to; empty if it belongs to none
  std::string command;
};

struct Collected {
  std::vector<Row> rows;
  std::vector<Gpu> gpus;  // of this machine; empty if they are not known
  std::size_t not_permitted = 0;
};

// The places of its GPUs in the driver's order; nothing for one that is not here.
std::vector<std::optional<std::size_t>> places_of(const Row& row, const std::vector<Gpu>& gpus);

// On GPUs now: none of it while it is suspended.
std::uint64_t bytes_in_use(const Row& row);

// What --columns knows.
std::vector<std::string> column_names();
// Of `columns`, in that order; of none: all, the table without those that a narrow terminal has no
// room for.
std::string table_of(const Collected& collected, const std::vector<std::string>& columns);
std::string csv_of(const Collected& collected, const std::vector<std::string>& columns,
                   bool header = true);

}  // namespace stasis::cli
