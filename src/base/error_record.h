// An error on its way to another process.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/json_record.h"

namespace stasis {

template <>
inline Obstacle JsonReader::blank<Obstacle>() {
  return {"managed-memory", Severity::kRed, {}, {}};
}

void fields(auto& io, Described<Obstacle> auto& obstacle) {
  io.named("id", obstacle.id, &ObstacleId::name, ObstacleId::find);
  io("pid", obstacle.pid);
  io("what", obstacle.what);
  io("remedy", obstacle.remedy);
  io("by", obstacle.by);
}

void fields(auto& io, Described<DriverFailure> auto& failure) {
  io("number", failure.number, Signed());
  io("name", failure.name);
  io("text", failure.text);
}

// As it is told: the context is part of its message.
void fields(auto& io, Described<Error> auto& error) {
  io("code", error.code);
  std::string message = error.to_string();
  io("message", message);
  if constexpr (std::remove_reference_t<decltype(io)>::kReads) error.message = std::move(message);
  io("remedy", error.remedy);
  io.optional("driver", error.driver);
  io.optional("obstacles", error.obstacles);
}

// For a message, which holds so much and no more: without its obstacles, and with texts of so many
// bytes at most.
inline Error shortened(Error error, std::size_t most) {
  error.message = error.to_string();
  error.context.clear();
  error.obstacles.clear();
  for (std::string* text : {&error.message, &error.remedy})
    text->resize(std::min(text->size(), most));
  return error;
}

}  // namespace stasis
