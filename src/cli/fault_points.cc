#include "base/fault_point.h"
#include "cli/verbs.h"

namespace stasis::cli {

Verb add_list_fault_points(CLI::App& app) {
  CLI::App* command = app.add_subcommand("list-fault-points")->group("");
  return {command,
          [](Context& context) -> Result<int> {
            nlohmann::json points = nlohmann::json::array();
            for (const FaultPointInfo& info : fault_points()) {
              points.push_back({{"name", std::string(info.name)},
                                {"can_fail", info.can_fail},
                                {"what", std::string(info.what)}});
            }
#ifdef STASIS_FAULT_POINTS
            const bool built_in = true;
#else
            const bool built_in = false;
#endif
            context.print({{"built_in", built_in}, {"points", points}});
            return 0;
          },
          false};
}

}  // namespace stasis::cli
