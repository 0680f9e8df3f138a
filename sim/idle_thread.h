// The thread that the real driver's cuInit leaves in the process that calls it.
#pragma once

namespace stasis::sim {

// One per process, to its end: it blocks all signals and waits in poll for nothing. It shares the
// root and the working directory with the calling thread, so that the process can enter no mount
// namespace, as with the real driver. A forked child has none, and may start one. Nothing happens
// where there is no thread to be had.
void start_idle_thread();

}  // namespace stasis::sim
