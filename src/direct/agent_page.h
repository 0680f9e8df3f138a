// How a tool finds and knows the page of an agent in another process: by its descriptors and its
// mappings. Private to src/direct.
#pragma once

#include <cstddef>
#include <string>
#include <system_error>
#include <vector>

#include "abi/agent_protocol.h"
#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"
#include "base/units.h"
#include "proc/procfs.h"

namespace stasis::direct {

// The path of the agent's page among the target's descriptors. A child that the target forked may
// hold one of its parent's, so there may be several. `failed` is std::errc::timed_out if they could
// not all be looked at before `until`: a program may have a million.
std::vector<std::string> paths_of_page(Pid pid, std::error_code& failed,
                                       Clock::time_point until = Clock::time_point::max());

// A file of any file system may be called so; to read what a program serves itself (FUSE) may never
// end.
bool is_agent_page(const proc::Mapping& mapping);

// The target chooses the name, and what it stands for: only memory is opened.
Result<UniqueFd> open_page(const std::string& path, int access);
// Is it not there any more: closed by the process meanwhile, or with its end?
bool is_closed(const std::string& path);

// As much as lies at the same place in all versions, which may be larger and smaller than ours.
inline constexpr std::size_t kOfAllVersions =
    offsetof(ControlPage, state) + sizeof(ControlPage::state);

// Of our version, of the process that has this number in its own PID namespace.
bool is_page_of(const ControlPage& page, int ns_pid);
bool is_page_of_another_version(const ControlPage& page, int ns_pid);

}  // namespace stasis::direct
