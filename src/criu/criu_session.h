// What a dump and a restore have in common: the conversation with one criu until its last answer,
// and the error that is made of a failure.
//
// Private to src/criu. One thread.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "base/fd.h"
#include "base/interrupt.h"
#include "base/result.h"
#include "base/units.h"
#include "criu/criu_process.h"
#include "criu/criu_rpc.h"
#include "image/criu_options.h"

namespace stasis {

// What to answer to a notification: an error makes criu fail and roll back.
using OnNotification = std::function<Result<void>(const criu_rpc::Notification&)>;

// How a conversation ended.
struct CriuAnswer {
  std::optional<criu_rpc::Response> response;  // the last one; none if criu ended or was killed
  std::optional<Error> refusal;                // the first error of OnNotification or of `stop`
  bool timed_out = false;                      // the deadline passed
  std::string end;                             // how criu's process ended
  std::string trouble;                         // what was wrong with the conversation; may be empty
  bool succeeded() const { return response && response->success && !refusal && !timed_out; }
};

// When a conversation is to end before its time, and how.
struct CriuLimits {
  std::chrono::milliseconds deadline{0};  // 0 = none
  // Looked at ten times a second while criu says nothing; an error has the same effect as the
  // deadline.
  std::function<Result<void>()> stop;
  // Makes criu fail by itself, so that it cleans up in order; called again and again until it has.
  // It is killed if it shows no sign of life for some seconds, or does not end within half a
  // minute.
  std::function<void()> give_up;
  // Called as often as `stop`, as long as all is well. May be empty.
  std::function<void()> on_wait;
};

// Starts a criu, which does nothing before the request comes, and calls `on_started`.
Result<CriuProcess> start_told(const std::string& path, const CriuProcess::StartOptions& options,
                               const std::function<Result<void>(Pid)>& on_started);

// Sends the request and answers notifications until criu gives its last answer. When this returns
// criu has ended, or was left behind.
CriuAnswer converse(CriuProcess& process, const criu_rpc::Request& request,
                    const OnNotification& on_notification, const CriuLimits& limits);

// Fills in what the manifest's options say.
void set_options(criu_rpc::Options& rpc, const CriuOptions& options);

// Where a failed step's log is.
struct LogPlace {
  const UniqueFd& directory;
  std::string name;
  std::function<std::string()> path;  // for people; may be empty, or say nothing
};

// Adds to the error that criu was left behind, if it was.
void tell_of_left_behind(const CriuProcess& process, Error& error);

// "CRIU could not dump process 12: ..." from the log, its decoded cause and the conversation.
Error criu_error(const std::string& what, const CriuAnswer& answer, const CriuProcess& process,
                 const LogPlace& log);

}  // namespace stasis
