// Reports on their way to another process of this program, which shows them.
#pragma once

#include <type_traits>

#include "base/error_record.h"
#include "base/json_record.h"
#include "image/manifest_fields.h"
#include "operations/operations.h"

namespace stasis {

void fields(auto& io, Described<ProcessReport> auto& process) {
  io("pid", process.pid);
  io("command", process.comm);
  io("cuda", process.cuda);
  io.optional_named("state", process.state, cuda_state_name, cuda_state_from_name);
  io("gpu_bytes", process.gpu_bytes);
}

void fields(auto& io, Described<Report> auto& report) {
  io("root", report.root);
  io("processes", report.processes);
  io("phases", report.phases);
  io("lost", report.lost);
  io("total", report.total);
  io.optional("downtime", report.downtime);
  io("was_so", report.was_so);
  io.optional("moved_before", report.moved_before);
  io("lock_tries", report.lock_tries);
  io("direct_bytes", report.direct_bytes);
}

void fields(auto& io, Described<DumpReport> auto& report) {
  using Base = std::conditional_t<std::is_const_v<std::remove_reference_t<decltype(report)>>,
                                  const Report, Report>;
  fields(io, static_cast<Base&>(report));
  io("images_dir", report.images_dir);
  io("image_bytes", report.image_bytes);
  io("written_bytes", report.written_bytes);
  io("reused_bytes", report.reused_bytes);
  io("precopied_bytes", report.precopied_bytes);
  io("direct_io", report.direct_io);
  io("dropped_zero_bytes", report.dropped_zero_bytes);
}

void fields(auto& io, Described<RecoverReport> auto& report) {
  io("root", report.root);
  io.named("operation", report.operation, &RecordedOperation::name, RecordedOperation::from_name);
  io("image", report.image);
  io("processes", report.processes);
  io("finished", report.finished);
  io("image_kept", report.image_kept);
  io("outcome", report.outcome);
  io.optional("error", report.error);
  io("as_before", report.as_before);
  io("was_so", report.was_so);
}

}  // namespace stasis
