// Variables of the environment that a restored job is to pass on with other values.
#pragma once

namespace stasis::preload {

// Makes the changes that the file lists, each ended by a zero: "NAME=value" sets, "NAME" removes,
// "NAME*" removes what begins so. Nothing if it cannot be read. While the process has one thread.
void refresh_environment(const char* path);

}  // namespace stasis::preload
