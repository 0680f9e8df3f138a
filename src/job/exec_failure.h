// What is told when a program could not be started.
#pragma once

#include <string>

#include "base/error.h"

namespace stasis::job {

// Why execvp(3) of `program` failed with `number`, and what to do. Looks at the file.
Error exec_failure(const std::string& program, int number);

// As shells have it: 127 not found, 126 found and not to be started.
int exit_status_of_exec_failure(int number);

}  // namespace stasis::job
