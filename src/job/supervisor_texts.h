// What the supervisor of a job tells the user, in more than a sentence's worth of values.
//
// Functions only; any thread.
#pragma once

#include <string>
#include <vector>

#include "base/units.h"
#include "job/messages.h"

namespace stasis::job {

// The signal came before the job was begun.
std::string not_begun_text(int signal_number);

// Of another signal that ends the job, while it is saved; `until`: when --grace ends. A scheduler
// that preempts a job and then requeues it gives notice twice, and so does systemd with a process
// group.
std::string once_more_text(int signal_number, Clock::time_point until);

// `removed`: the images that went.
std::string saved_text(const std::string& path, const Saved& saved, const std::vector<int>& removed,
                       bool to_its_end);

// `after` its restore.
std::string early_end_text(int signal_number, Seconds after);

}  // namespace stasis::job
