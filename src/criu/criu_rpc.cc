#include "criu/criu_rpc.h"

#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

namespace stasis::criu_rpc {
namespace {

using protozero::pbf_reader;
using protozero::pbf_wire_type;
using protozero::pbf_writer;
using protozero::tag_and_type;

constexpr std::uint32_t varint(protozero::pbf_tag_type tag) {
  return tag_and_type(tag, pbf_wire_type::varint);
}
constexpr std::uint32_t bytes(protozero::pbf_tag_type tag) {
  return tag_and_type(tag, pbf_wire_type::length_delimited);
}

void add(pbf_writer& to, std::uint32_t tag, const std::optional<bool>& value) {
  if (value) to.add_bool(tag, *value);
}
void add(pbf_writer& to, std::uint32_t tag, const std::optional<std::int32_t>& value) {
  if (value) to.add_int32(tag, *value);
}
void add(pbf_writer& to, std::uint32_t tag, const std::optional<std::string>& value) {
  if (value) to.add_string(tag, *value);
}

// A value of the kind that criu_options.inc names.
void put(pbf_writer& to, std::uint32_t tag, bool value) { to.add_bool(tag, value); }
void put(pbf_writer& to, std::uint32_t tag, std::uint32_t value) { to.add_uint32(tag, value); }
void put(pbf_writer& to, std::uint32_t tag, CgroupMode value) {
  to.add_enum(tag, static_cast<std::int32_t>(value));
}
void put(pbf_writer& to, std::uint32_t tag, NetworkLock value) {
  to.add_enum(tag, static_cast<std::int32_t>(value));
}
void put(pbf_writer& to, std::uint32_t tag, const std::string& value) { to.add_string(tag, value); }
void put(pbf_writer& to, std::uint32_t tag, const std::vector<std::string>& values) {
  for (const std::string& value : values)
    to.add_string(tag, value);
}

// The numbers of criu_opts; those of CriuOptions are in criu_options.inc.
std::string options_to_wire(const Options& options) {
  std::string out;
  pbf_writer to(out);
  to.add_int32(1, options.images_dir_fd);
  add(to, 2, options.pid);
  add(to, 3, options.leave_running);
  add(to, 9, options.log_level);
  add(to, 10, options.log_file);
  add(to, 12, options.notify_scripts);
  add(to, 17, options.work_dir_fd);
  add(to, 26, options.rst_sibling);
  for (const InheritFd& inherited : options.inherit_fd) {
    std::string one;
    pbf_writer entry(one);
    entry.add_string(1, inherited.key);
    entry.add_int32(2, inherited.fd);
    to.add_message(27, one);
  }
  if (options.criu) {
    const CriuOptions defaults;
    for_each_criu_option([&](const auto& row) {
      const auto& value = (*options.criu).*row.field;
      if (row.help != nullptr || value != defaults.*row.field) put(to, row.number, value);
    });
  }
  return out;
}

Notification read_notification(pbf_reader from) {
  Notification out;
  while (from.next()) {
    switch (from.tag_and_type()) {
      case bytes(1):
        out.script = from.get_string();
        break;
      case varint(2):
        out.pid = from.get_int32();
        break;
      default:
        from.skip();
    }
  }
  return out;
}

std::optional<std::int32_t> read_restored_pid(pbf_reader from) {
  std::optional<std::int32_t> out;
  while (from.next()) {
    if (from.tag_and_type() == varint(1)) {
      out = from.get_int32();
    } else {
      from.skip();
    }
  }
  return out;
}

std::optional<Version> read_version(pbf_reader from) {
  Version out;
  bool has_major = false;
  bool has_minor = false;
  while (from.next()) {
    switch (from.tag_and_type()) {
      case varint(1):
        out.major_number = from.get_int32();
        has_major = true;
        break;
      case varint(2):
        out.minor_number = from.get_int32();
        has_minor = true;
        break;
      case varint(4):
        out.sublevel = from.get_int32();
        break;
      default:
        from.skip();
    }
  }
  if (!has_major || !has_minor) return std::nullopt;
  return out;
}

std::optional<Response> read_response(pbf_reader from) {
  Response out;
  bool has_type = false;
  bool has_success = false;
  while (from.next()) {
    switch (from.tag_and_type()) {
      case varint(1):
        out.type = static_cast<Type>(from.get_enum());
        has_type = true;
        break;
      case varint(2):
        out.success = from.get_bool();
        has_success = true;
        break;
      case bytes(4):
        out.restored_pid = read_restored_pid(from.get_message());
        if (!out.restored_pid) return std::nullopt;
        break;
      case bytes(5):
        out.notify = read_notification(from.get_message());
        break;
      case varint(7):
        out.cr_errno = from.get_int32();
        break;
      case bytes(9):
        out.cr_errmsg = from.get_string();
        break;
      case bytes(10):
        out.version = read_version(from.get_message());
        if (!out.version) return std::nullopt;
        break;
      default:
        from.skip();
    }
  }
  if (!has_type || !has_success) return std::nullopt;
  return out;
}

// What cannot be read is told by an exception, and here only.
template <class Read>
auto reading(std::string_view text, Read read) -> decltype(read(pbf_reader())) {
  try {
    return read(pbf_reader(text.data(), text.size()));
  } catch (const protozero::exception&) {
    return std::nullopt;
  }
}

}  // namespace

std::string to_wire(const Request& request) {
  std::string out;
  pbf_writer to(out);
  to.add_enum(1, static_cast<std::int32_t>(request.type));
  if (request.opts) to.add_message(2, options_to_wire(*request.opts));
  add(to, 3, request.notify_success);
  return out;
}

std::optional<Response> response_from_wire(std::string_view wire) {
  return reading(wire, read_response);
}

}  // namespace stasis::criu_rpc
