// The library's own heap (private_heap.cc), as far as others have to know of it.
#pragma once

namespace stasis::sim {

// For the calling thread: rather take fresh memory than wait for another thread that uses the heap.
void never_wait_for_the_heap();

}  // namespace stasis::sim
