#include "criu/criu_terminals.h"

#include <cstdint>
#include <map>
#include <set>

#include <fmt/format.h>
#include <protozero/pbf_reader.hpp>

#include "criu/criu_messages.h"

namespace stasis {
namespace {

// criu/include/magic.h; images/tty.proto and fdinfo.proto of CRIU 4.2.
constexpr std::uint32_t kTerminalDataMagic = 0x59413026;
constexpr std::uint32_t kTableNumbersMagic = 0x54432030;  // ids-N.img
constexpr std::uint64_t kTerminalType = 11;
constexpr std::uint32_t kTerminalField = 19;  // of an entry of files.img
constexpr std::size_t kMostThatCriuTakes = 16384;
constexpr std::size_t kMostOfNumbers = 1 << 20;  // bytes

std::map<std::uint32_t, std::uint64_t> varints_of(protozero::pbf_reader message) {
  std::map<std::uint32_t, std::uint64_t> out;
  while (message.next()) {
    if (message.wire_type() == protozero::pbf_wire_type::varint) {
      const auto tag = message.tag();
      out[tag] = message.get_uint64();
    } else {
      message.skip();
    }
  }
  return out;
}

// By the numbers of their open files.
std::map<std::uint64_t, SavedTerminal> open_terminals(const UniqueFd& criu_dir) {
  std::map<std::uint64_t, SavedTerminal> out;
  std::map<std::uint64_t, std::uint64_t> by_end;  // a number of an open file
  (void)each_message(
      read_criu_image(criu_dir, kFilesImage), kFilesMagic, [&](protozero::pbf_reader message) {
        while (message.next(kTerminalField, protozero::pbf_wire_type::length_delimited)) {
          auto fields = varints_of(message.get_message());
          SavedTerminal terminal;
          terminal.flags = static_cast<unsigned>(fields[3]);
          terminal.is_first = by_end.emplace(fields[2], fields[1]).second;
          out.insert_or_assign(fields[1], terminal);
        }
      });
  (void)each_message(
      read_criu_image(criu_dir, "tty-data.img"), kTerminalDataMagic,
      [&](protozero::pbf_reader message) {
        std::uint64_t end = 0;
        std::string unread;
        while (message.next()) {
          constexpr std::uint32_t kEnd = 1;
          constexpr std::uint32_t kData = 2;
          const auto tag = message.tag();
          const auto wire = message.wire_type();
          if (tag == kEnd && wire == protozero::pbf_wire_type::varint)
            end = message.get_uint64();
          else if (tag == kData && wire == protozero::pbf_wire_type::length_delimited)
            unread = message.get_string();
          else
            message.skip();
        }
        const auto found = by_end.find(end);
        if (found == by_end.end()) return;
        SavedTerminal& terminal = out[found->second];
        terminal.has_more = unread.size() >= kMostThatCriuTakes;
        terminal.unread = std::move(unread);
      });
  return out;
}

}  // namespace

std::vector<SavedTerminal> saved_terminals(const UniqueFd& criu_dir,
                                           const std::vector<int>& numbers) {
  std::vector<SavedTerminal> out;
  auto terminals = open_terminals(criu_dir);
  if (terminals.empty()) return out;
  for (const int number : numbers) {
    std::uint64_t table = 0;
    (void)each_message(read_criu_image(criu_dir, fmt::format("ids-{}.img", number), kMostOfNumbers),
                       kTableNumbersMagic, [&](const protozero::pbf_reader& message) {
                         table = varints_of(message)[2];
                       });
    (void)each_message(read_criu_image(criu_dir, fmt::format("fdinfo-{}.img", table)),
                       kDescriptorsMagic, [&](const protozero::pbf_reader& message) {
                         auto fields = varints_of(message);
                         const auto found = terminals.find(fields[1]);
                         if (fields[3] != kTerminalType || found == terminals.end()) return;
                         found->second.number = number;
                         found->second.descriptor = static_cast<int>(fields[4]);
                         out.push_back(std::move(found->second));
                         terminals.erase(found);
                       });
  }
  return out;
}

}  // namespace stasis
