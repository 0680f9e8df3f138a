// Files of the installation that this code belongs to.
#pragma once

#include <string>

namespace stasis {

// Where `name` lies in lib/stasis: beside the library that this code is in, or below the same
// prefix, where systems have libraries in lib64 or lib/TRIPLET; or below the prefix of the program.
// The path is absolute if the library was loaded by one. Where it should lie if it is nowhere.
// Stateless; thread-safe.
std::string own_file(const std::string& name);

// Where the program `name` lies in bin of the prefix that the library is below which this code is
// in: lib/criu, lib64/criu or lib/stasis/criu. Otherwise as own_file().
std::string own_program(const std::string& name);

}  // namespace stasis
