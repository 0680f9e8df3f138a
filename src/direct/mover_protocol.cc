#include "direct/mover_protocol.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace stasis::direct::protocol {
namespace {

constexpr std::size_t kLongestText = 4096;
constexpr std::size_t kMostContext = 8;

class Writer {
 public:
  template <class T>
  void value(const T& value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  void text(const std::string& text) {
    const auto size = static_cast<std::uint32_t>(std::min(text.size(), kLongestText));
    value(size);
    const auto bytes = std::as_bytes(std::span(text.data(), size));
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  std::vector<std::byte> out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}
  template <class T>
  T value() {
    T value{};
    if (!has(sizeof value)) return value;
    std::memcpy(&value, left_.data(), sizeof value);
    left_ = left_.subspan(sizeof value);
    return value;
  }
  std::string text() {
    const auto size = value<std::uint32_t>();
    if (!has(size)) return {};
    std::string out(reinterpret_cast<const char*>(left_.data()), size);
    left_ = left_.subspan(size);
    return out;
  }
  bool good() const { return good_; }

 private:
  bool has(std::size_t bytes) { return good_ = good_ && left_.size() >= bytes; }
  std::span<const std::byte> left_;
  bool good_ = true;
};

}  // namespace

std::optional<Kind> kind_of(std::span<const std::byte> message) {
  Reader reader(message);
  const auto kind = reader.value<Kind>();
  if (!reader.good()) return std::nullopt;
  return kind;
}

std::vector<std::byte> failed(const Error& error) {
  Writer writer;
  writer.value(Kind::kFailed);
  writer.value(static_cast<std::uint32_t>(error.code));
  writer.text(error.message);
  writer.text(error.remedy);
  writer.value(static_cast<std::uint32_t>(error.driver.has_value()));
  if (error.driver) {
    writer.value(error.driver->number);
    writer.text(error.driver->name);
    writer.text(error.driver->text);
  }
  const std::size_t count = std::min(error.context.size(), kMostContext);
  writer.value(static_cast<std::uint32_t>(count));
  for (std::size_t i = 0; i < count; ++i)
    writer.text(error.context[i]);
  return writer.take();
}

std::optional<Error> error_of(std::span<const std::byte> message) {
  Reader reader(message);
  if (reader.value<Kind>() != Kind::kFailed) return std::nullopt;
  Error error;
  error.code = static_cast<ErrorCode>(reader.value<std::uint32_t>());
  error.message = reader.text();
  error.remedy = reader.text();
  if (reader.value<std::uint32_t>() != 0) {
    DriverFailure driver;
    driver.number = reader.value<int>();
    driver.name = reader.text();
    driver.text = reader.text();
    error.driver = std::move(driver);
  }
  const auto count = reader.value<std::uint32_t>();
  for (std::uint32_t i = 0; i < count && reader.good(); ++i)
    error.context.push_back(reader.text());
  if (!reader.good()) return std::nullopt;
  return error;
}

}  // namespace stasis::direct::protocol
