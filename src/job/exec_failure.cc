#include "job/exec_failure.h"

#include <cerrno>
#include <filesystem>

#include <fmt/format.h>

#include "base/fd.h"

namespace stasis::job {
namespace {

std::string remedy_for(const std::string& program, int number) {
  std::error_code ignored;
  switch (number) {
    case ENOENT:
      return program.find('/') == std::string::npos
                 ? "name a program that is on the PATH, or give its path"
                 : "check the path; if the file is there, so must be the interpreter that it names";
    case EACCES:
      if (std::filesystem::is_directory(program, ignored))
        return "name a program and not a directory";
      return "make it executable with chmod +x, or start it by its interpreter (python3 FILE); the "
             "mount it lies on must not be noexec";
    case ENOEXEC:
      return "it is no program of this machine's; a script needs a first line such as #!/bin/sh";
    case E2BIG:
      return "give it fewer arguments, or a smaller environment";
    default:
      return {};
  }
}

}  // namespace

Error exec_failure(const std::string& program, int number) {
  Error error = errno_error(fmt::format("cannot start {}", program), number);
  error.remedy = remedy_for(program, number);
  return error;
}

int exit_status_of_exec_failure(int number) { return number == ENOENT ? 127 : 126; }

}  // namespace stasis::job
