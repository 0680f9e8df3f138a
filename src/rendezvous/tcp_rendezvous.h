// Tools of several nodes that meet at a TCP address, with a secret that they share: the one on the
// node that has the address serves the others for as long as its operation lasts, and leads them;
// nothing runs before and after (docs/adr/0060-parts-that-meet-by-tcp.md).
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "group/group_rendezvous.h"

namespace stasis::rendezvous {

class TcpRendezvous : public GroupRendezvous {
 public:
  static bool is_address(const std::string& place);
  // Reads the secret, finds the address of the host, and listens there if this machine has it and
  // no other serves. Starts no thread. kUsage, kNotPermitted, kNotSupported, kIo.
  static Result<std::unique_ptr<TcpRendezvous>> open(const std::string& place,
                                                     const std::string& secret_file);
  ~TcpRendezvous() override;

  // Whether this part serves the others.
  bool serves() const;

  const std::string& place() const override;
  std::string when_in_use() const override;
  std::string when_silent() const override;
  Result<std::optional<std::string>> read(const std::string& name, std::size_t limit) override;
  Result<void> write(const std::string& name, const std::string& text) override;
  // What a client has made, and had no answer to, is its own when it makes the same again.
  Result<bool> claim(const std::string& name, const std::string& who,
                     const std::string& text) override;
  Result<std::vector<std::string>> names() override;
  void remove(const std::vector<std::string>& names) override;
  // Asks what serves now, or serves.
  Result<void> renew() override;
  // The others are answered from here on: so the part that serves is the first to come, and leads.
  Result<void> joined() override;
  // The part that serves does, and stays as long as parts are connected that have not heard the
  // outcome; ten seconds at most.
  bool cleans_up() const override;
  bool serves_others() const override;
  bool is_needed() override;
  void leave() override;

 private:
  class Ends;
  explicit TcpRendezvous(std::unique_ptr<Ends> ends);

  std::unique_ptr<Ends> ends_;
};

}  // namespace stasis::rendezvous
