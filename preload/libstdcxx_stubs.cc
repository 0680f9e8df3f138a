// What the C++ library's templates call instead of returning, in place of its own: no code here
// could catch it. Its own bring in all that says why in words, and with std::string the generator
// of random numbers, whose arc4random only glibc 2.36 has: programs in containers of Ubuntu 22.04
// (2.35) could not load the agent that is built on Debian 12.
#include <bits/functexcept.h>

#include <cstdlib>

// Weak: where another function of that file is needed, all are the library's.
// NOLINTBEGIN(cert-dcl58-cpp,bugprone-reserved-identifier)
namespace std {
__attribute__((weak)) void __throw_bad_alloc() { ::abort(); }
__attribute__((weak)) void __throw_bad_array_new_length() { ::abort(); }
__attribute__((weak)) void __throw_length_error(const char*) { ::abort(); }
__attribute__((weak)) void __throw_logic_error(const char*) { ::abort(); }
}  // namespace std
// NOLINTEND(cert-dcl58-cpp,bugprone-reserved-identifier)
