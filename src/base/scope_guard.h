// Runs a function on every path out of a scope, unless dismissed.
#pragma once

#include <utility>

namespace stasis {

template <class F>
class [[nodiscard]] ScopeGuard {
 public:
  explicit ScopeGuard(F run) : run_(std::move(run)) {}
  ~ScopeGuard() {
    if (armed_) run_();
  }
  ScopeGuard(const ScopeGuard&) = delete;
  ScopeGuard& operator=(const ScopeGuard&) = delete;
  void dismiss() { armed_ = false; }

 private:
  F run_;
  bool armed_ = true;
};

}  // namespace stasis
