#include "criu/criu_core.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <protozero/pbf_reader.hpp>

#include "abi/processor_state.h"
#include "criu/criu_messages.h"
#include "proc/interrupted_call.h"
#include "proc/procfs.h"

namespace stasis {
namespace {

using protozero::pbf_reader;
using protozero::pbf_wire_type;
using protozero::tag_and_type;

constexpr std::uint32_t kImageMagic = 0x54564319;  // IMG_COMMON_MAGIC of CRIU's magic.h
constexpr std::uint32_t kCoreMagic = 0x55053847;   // CORE_MAGIC
constexpr std::size_t kCoreHead = 12;
constexpr std::size_t kLargestCore =
    4U << 20;  // some kilobytes, and 150 bytes for each signal that waits

constexpr std::uint32_t varint(protozero::pbf_tag_type tag) {
  return tag_and_type(tag, pbf_wire_type::varint);
}

std::string name_of(int number) { return fmt::format("core-{}.img", number); }

// The message of a file, without its head; nothing if it is none.
std::optional<std::string_view> body_of(const std::string& text) {
  std::uint32_t head[3] = {};
  if (text.size() < kCoreHead) return std::nullopt;
  std::memcpy(head, text.data(), kCoreHead);
  if (head[0] != kImageMagic || head[1] != kCoreMagic || head[2] > text.size() - kCoreHead)
    return std::nullopt;
  return std::string_view(text).substr(kCoreHead, head[2]);
}

Result<std::string> read_core(const UniqueFd& criu_dir, const std::string& name) {
  STASIS_TRY_ASSIGN(auto file,
                    open_checked(criu_dir.get(), name, O_RDONLY | O_NOFOLLOW, is_regular_file));
  return read_file(file, name, kLargestCore);
}

// A number of the message, and where in the file it stands.
struct Place {
  std::uint64_t value = 0;
  std::size_t begin = 0;
  std::size_t end = 0;
};
struct Registers {
  std::optional<Place> result;       // ax
  std::optional<Place> instruction;  // ip
  std::optional<std::uint64_t> number, first, second, third, fourth;
};

Place place_of(pbf_reader& from, const char* start) {
  Place place;
  place.begin = static_cast<std::size_t>(from.data().data() - start);
  place.value = from.get_uint64();
  place.end = static_cast<std::size_t>(from.data().data() - start);
  return place;
}

// user_x86_regs_entry
Registers read_registers(pbf_reader from, const char* start) {
  Registers out;
  while (from.next()) {
    switch (from.tag_and_type()) {
      case varint(8):
        out.fourth = from.get_uint64();
        break;
      case varint(11):
        out.result = place_of(from, start);
        break;
      case varint(13):
        out.third = from.get_uint64();
        break;
      case varint(14):
        out.second = from.get_uint64();
        break;
      case varint(15):
        out.first = from.get_uint64();
        break;
      case varint(16):
        out.number = from.get_uint64();
        break;
      case varint(17):
        out.instruction = place_of(from, start);
        break;
      default:
        from.skip();
    }
  }
  return out;
}

std::optional<Registers> registers_of(const std::string& text) {
  const auto body = body_of(text);
  if (!body) return std::nullopt;
  std::optional<Registers> out;
  try {
    pbf_reader core(body->data(), body->size());
    while (core.next(2, pbf_wire_type::length_delimited)) {  // thread_info
      pbf_reader info = core.get_message();
      while (info.next(2, pbf_wire_type::length_delimited))  // gpregs
        out = read_registers(info.get_message(), text.data());
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return out;
}

// With as many bytes as there are: trailing groups of zeros are no other number.
bool write_varint(std::string& text, const Place& place, std::uint64_t value) {
  for (std::size_t at = place.begin; at < place.end; ++at) {
    const bool last = at + 1 == place.end;
    text[at] = static_cast<char>((value & 0x7f) | (last ? 0 : 0x80));
    value >>= 7;
  }
  return value == 0;
}

// The thread's number in its own PID namespace, by which CRIU calls its file.
int number_in_namespace(Pid pid, Tid thread) {
  const auto text =
      read_file(AT_FDCWD, fmt::format("/proc/{}/task/{}/status", pid.value, thread.value), 65536);
  if (!text) return thread.value;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("NSpid:"))
      return static_cast<int>(std::strtol(line.c_str() + line.find_last_of('\t') + 1, nullptr, 10));
  }
  return thread.value;
}

// True if the file's text was changed.
bool restart_call(std::string& text, const proc::AddressSpace& space, Tid thread) {
  const auto registers = registers_of(text);
  if (!registers || !registers->result || !registers->instruction || !registers->number ||
      static_cast<std::int64_t>(registers->result->value) != -EINTR ||
      static_cast<std::int32_t>(*registers->number) < 0) {
    return false;
  }
  const auto made =
      proc::call_made(space, {*registers->number, registers->instruction->value,
                              registers->first.value_or(0), registers->second.value_or(0),
                              registers->third.value_or(0), registers->fourth.value_or(0)});
  if (!made || !(proc::waits_for_kept_time(*made) || proc::returns_eintr_after_stop(*made)))
    return false;
  if (proc::has_signal(space.pid(), thread)) return false;
  std::string changed = text;
  if (!write_varint(changed, *registers->result, *made) ||
      !write_varint(changed, *registers->instruction,
                    registers->instruction->value - proc::kSyscallLength)) {
    return false;
  }
  text = std::move(changed);
  return true;
}

}  // namespace

std::optional<int> parent_death_signal(const UniqueFd& criu_dir, Tid thread) {
  const auto text = read_core(criu_dir, name_of(thread.value));
  const auto body = text ? body_of(*text) : std::nullopt;
  if (!body) return std::nullopt;
  int signal = 0;
  try {
    pbf_reader core(body->data(), body->size());
    while (core.next(5, pbf_wire_type::length_delimited)) {  // thread_core
      pbf_reader thread_core = core.get_message();
      while (thread_core.next(8, pbf_wire_type::varint))  // pdeath_sig
        signal = static_cast<int>(thread_core.get_uint32());
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return signal;
}

std::optional<std::uint64_t> permitted_capabilities(const UniqueFd& criu_dir, Tid thread) {
  const auto text = read_core(criu_dir, name_of(thread.value));
  const auto body = text ? body_of(*text) : std::nullopt;
  if (!body) return std::nullopt;
  std::optional<std::uint64_t> bits;
  unsigned shift = 0;
  try {
    pbf_reader core(body->data(), body->size());
    while (core.next(5, pbf_wire_type::length_delimited)) {  // thread_core
      pbf_reader thread_core = core.get_message();
      while (thread_core.next(10, pbf_wire_type::length_delimited)) {  // creds
        pbf_reader creds = thread_core.get_message();
        for (; creds.next(10, pbf_wire_type::varint) && shift < 64; shift += 32)  // cap_prm
          bits = bits.value_or(0) | std::uint64_t{creds.get_uint32()} << shift;
      }
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return bits;
}

bool has_tiles(const UniqueFd& criu_dir, Tid thread) {
  const auto text = read_core(criu_dir, name_of(thread.value));
  const auto body = text ? body_of(*text) : std::nullopt;
  if (!body) return false;
  std::uint64_t in_use = 0;
  try {
    pbf_reader core(body->data(), body->size());
    while (core.next(2, pbf_wire_type::length_delimited)) {  // thread_info
      pbf_reader info = core.get_message();
      while (info.next(3, pbf_wire_type::length_delimited)) {  // fpregs
        pbf_reader registers = info.get_message();
        while (registers.next(13, pbf_wire_type::length_delimited)) {  // xsave
          pbf_reader state = registers.get_message();
          while (state.next(1, pbf_wire_type::varint))  // xstate_bv
            in_use = state.get_uint64();
        }
      }
    }
  } catch (const std::exception&) {
    return false;
  }
  return (in_use & processor_state::kTiles) != 0;
}

int highest_number(const UniqueFd& criu_dir) {
  constexpr std::uint32_t kLastField = 5;  // of pstree_entry, images/pstree.proto: all are numbers
  constexpr std::uint32_t kMost = 1U << 22;  // PID_MAX_LIMIT of the kernel
  std::uint32_t highest = 0;
  (void)each_message(read_criu_image(criu_dir, "pstree.img"), kTreeMagic, [&](pbf_reader message) {
    while (message.next()) {
      if (message.tag() > kLastField || message.wire_type() != pbf_wire_type::varint) {
        message.skip();
        continue;
      }
      const std::uint32_t number = message.get_uint32();
      if (number < kMost) highest = std::max(highest, number);
    }
  });
  return static_cast<int>(highest);
}

std::vector<Tid> threads_with_tiles(const UniqueFd& criu_dir, Pid pid) {
  std::vector<Tid> threads = proc::ProcFs().threads(pid);
  std::erase_if(threads, [&](Tid thread) {
    return !has_tiles(criu_dir, Tid{number_in_namespace(pid, thread)});
  });
  return threads;
}

Result<int> restart_calls(const UniqueFd& criu_dir, Pid pid) {
  int count = 0;
  const auto space = proc::AddressSpace::open(pid);
  if (!space) return 0;  // what cannot be read stays as CRIU has it
  for (const Tid thread : proc::ProcFs().threads(pid)) {
    const std::string name = name_of(number_in_namespace(pid, thread));
    auto text = read_core(criu_dir, name);
    if (!text || !restart_call(*text, *space, thread)) continue;
    STASIS_TRY_ASSIGN(auto file, open_file(criu_dir.get(), name, O_WRONLY | O_NOFOLLOW));
    STASIS_TRY(write_all(file.get(), text->data(), text->size(), name));
    STASIS_TRY(file.close(name));
    ++count;
  }
  return count;
}

}  // namespace stasis
