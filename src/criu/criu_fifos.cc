#include "criu/criu_fifos.h"

#include <fcntl.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "criu/criu_messages.h"
#include "image/directory.h"

namespace stasis {
namespace {

// criu/include/magic.h; images/fdinfo.proto, fifo.proto and regfile.proto of CRIU 4.2.
constexpr std::uint32_t kIdsOfProcessMagic = 0x54432030;
constexpr std::uint64_t kPlainFileType = 1;
constexpr std::uint64_t kFifoType = 3;
constexpr std::uint32_t kPlainFileField = 3;
constexpr std::uint32_t kFifoField = 17;

using FieldWire = protozero::pbf_wire_type;

std::map<std::uint32_t, std::uint64_t> values_of(protozero::pbf_reader message) {
  std::map<std::uint32_t, std::uint64_t> out;
  while (message.next()) {
    const auto tag = message.tag();
    if (message.wire_type() == FieldWire::varint)
      out[tag] = message.get_uint64();
    else
      message.skip();
  }
  return out;
}

std::string_view whole_of(const protozero::pbf_reader& message) {
  return {message.data().data(), message.data().size()};
}

// The numbers of the open files that those descriptors are.
std::set<std::uint64_t> files_of(const UniqueFd& criu_dir,
                                 const std::vector<std::pair<int, int>>& descriptors) {
  std::set<std::uint64_t> out;
  for (const auto& wanted : descriptors) {
    std::uint64_t table = 0;
    (void)each_message(
        read_criu_image(criu_dir, fmt::format("ids-{}.img", wanted.first)), kIdsOfProcessMagic,
        [&](const protozero::pbf_reader& message) { table = values_of(message)[2]; });
    (void)each_message(
        read_criu_image(criu_dir, fmt::format("fdinfo-{}.img", table)), kDescriptorsMagic,
        [&](const protozero::pbf_reader& message) {
          auto fields = values_of(message);
          if (fields[3] == kFifoType && fields[4] == static_cast<std::uint64_t>(wanted.second))
            out.insert(fields[1]);
        });
  }
  return out;
}

// What files.img says of FIFOs and of files by name.
struct NamedFifos {
  std::map<std::uint64_t, std::uint64_t> file_of;  // the entry with the name of a FIFO
  std::map<std::uint64_t, std::string> files;
};

NamedFifos read_fifos(const std::string& image) {
  NamedFifos out;
  (void)each_message(image, kFilesMagic, [&](protozero::pbf_reader message) {
    while (message.next()) {
      if (message.wire_type() != FieldWire::length_delimited ||
          (message.tag() != kFifoField && message.tag() != kPlainFileField)) {
        message.skip();
        continue;
      }
      const bool is_fifo = message.tag() == kFifoField;
      const protozero::pbf_reader entry = message.get_message();
      auto fields = values_of(entry);
      if (is_fifo)
        out.file_of[fields[1]] = fields[3];
      else
        out.files[fields[1]] = whole_of(entry);
    }
  });
  return out;
}

// A FIFO has no place to which CRIU could go.
std::string file_entry(std::uint64_t id, const std::string& file) {
  constexpr std::uint32_t kId = 1;
  constexpr std::uint32_t kPlace = 3;
  std::string entry;
  protozero::pbf_writer fields(entry);
  protozero::pbf_reader message(file);
  while (message.next()) {
    if (message.tag() != kId && message.tag() != kPlace) {
      copy_field(message, fields);
      continue;
    }
    fields.add_uint64(message.tag(), message.tag() == kId ? id : ~std::uint64_t{0});
    message.skip();
  }
  std::string out;
  protozero::pbf_writer writer(out);
  writer.add_uint64(1, kPlainFileType);
  writer.add_uint64(2, id);
  writer.add_message(kPlainFileField, entry);
  return out;
}

// Of the tables of descriptors: which of their entries are of other files now.
Result<void> change_tables(const UniqueFd& criu_dir, const std::set<std::uint64_t>& changed) {
  constexpr std::uint32_t kType = 3;
  STASIS_TRY_ASSIGN(const auto listed, open_file(criu_dir.get(), ".", O_RDONLY | O_DIRECTORY));
  STASIS_TRY_ASSIGN(const auto names, list_directory(listed, "criu"));
  for (const std::string& name : names) {
    if (!name.starts_with("fdinfo-")) continue;
    const std::string image = read_criu_image(criu_dir, name);
    std::string out = image.substr(0, 8);
    bool is_needed = false;
    const bool whole = each_message(image, kDescriptorsMagic, [&](protozero::pbf_reader message) {
      auto fields = values_of(message);
      if (fields[kType] != kFifoType || !changed.contains(fields[1])) {
        append_message(out, whole_of(message));
        return;
      }
      is_needed = true;
      std::string entry;
      protozero::pbf_writer writer(entry);
      while (message.next()) {
        if (message.tag() != kType) {
          copy_field(message, writer);
          continue;
        }
        writer.add_uint64(kType, kPlainFileType);
        message.skip();
      }
      append_message(out, entry);
    });
    if (whole && is_needed) STASIS_TRY(replace_criu_image(criu_dir, name, out));
  }
  return {};
}

}  // namespace

Result<void> open_fifos_as_files(const UniqueFd& criu_dir,
                                 const std::vector<std::pair<int, int>>& descriptors) {
  const std::set<std::uint64_t> wanted = files_of(criu_dir, descriptors);
  if (wanted.empty()) return {};
  const std::string image = read_criu_image(criu_dir, kFilesImage);
  const NamedFifos fifos = read_fifos(image);
  std::set<std::uint64_t> changed;
  std::string out = image.substr(0, 8);
  const bool whole = each_message(image, kFilesMagic, [&](const protozero::pbf_reader& message) {
    auto fields = values_of(message);
    const auto name = fields[1] == kFifoType && wanted.contains(fields[2])
                          ? fifos.file_of.find(fields[2])
                          : fifos.file_of.end();
    const auto file =
        name == fifos.file_of.end() ? fifos.files.end() : fifos.files.find(name->second);
    if (file == fifos.files.end()) {
      append_message(out, whole_of(message));
      return;
    }
    append_message(out, file_entry(fields[2], file->second));
    changed.insert(fields[2]);
  });
  if (!whole || changed.empty()) return {};
  STASIS_TRY(replace_files_image(criu_dir, out));
  return change_tables(criu_dir, changed);
}

}  // namespace stasis
