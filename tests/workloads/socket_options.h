// Sockets of every common kind, with every option that can be set to another value than its
// default, and multicast groups; and what has become of them. Nothing here knows which options the
// tool does: each number is tried.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/workloads/gpu.h"

namespace stasis::workloads {

class SocketOptions {
 public:
  // Sets all; ends the program where it cannot.
  SocketOptions();

  // The sockets, by name; one that may not be made here is not among them.
  std::vector<std::string> names() const;
  // A line for each value of this socket: "NAME: option N of level L: kept", or "lost".
  std::vector<std::string> options_of(std::size_t socket) const;
  // The same of all multicast groups.
  std::vector<std::string> groups() const;

 private:
  struct Socket {
    std::string name;
    UniqueFd fd;
  };
  struct Group {
    std::size_t socket;
    const char* address;
  };
  using Place = std::pair<int, int>;  // level and number

  void add(const std::string& name, int domain, int type, int protocol = 0);
  void add_listener();
  void change(std::size_t index);
  void join();
  std::string filter(const Group& group) const;

  std::vector<Socket> sockets_;
  std::map<std::pair<std::size_t, Place>, std::string> set_;
  std::vector<Group> groups_;
  std::vector<std::string> filters_;
};

}  // namespace stasis::workloads
