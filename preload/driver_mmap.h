// The host's memory in which the driver keeps what it saves of a process.
//
// Driver 580.159.04 takes it at a checkpoint by mmap() with MAP_POPULATE: the kernel clears one
// page of 4 KiB after the other before anything is saved. In huge pages, which the driver does not
// ask for, and touched as the content comes, a checkpoint of 4 GiB takes 1.1 s instead of 2.0, and
// one of an empty context 0.13 s instead of 0.18 (docs/results/2026-11-22-standstill-2.md). So the
// agent stands in for mmap(), and gives that one request of the driver's huge pages.
#pragma once

namespace stasis::preload {

// Whose requests are meant: the library in which `function` is. Before the program can use it.
void note_driver_library(const void* function);

}  // namespace stasis::preload
