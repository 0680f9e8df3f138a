// Long because each record of the format has a function here, and their relations are checked
// together.
#include <algorithm>
#include <charconv>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "image/checksum.h"
#include "image/manifest.h"
#include "image/manifest_format.h"

namespace stasis {
namespace {

using Json = nlohmann::json;
using namespace manifest_format;  // NOLINT(google-build-using-namespace): constants only

constexpr const char* kRemedy =
    "the image is damaged: restore from another one, or copy it again from where it came from";

tl::unexpected<Error> wrong(std::string what) {
  return fail(ErrorCode::kImageCorrupt, "manifest.json: " + std::move(what), kRemedy);
}

bool is_hex(std::string_view text) {
  return text.size() == kChecksumDigits && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

// Reads the fields of one object. The first thing that is wrong is remembered, and what is read
// after it is empty, so that a record is read in one go and asked once whether it was whole.
class Fields {
 public:
  Fields(const Json& json, std::string where, std::string& problem)
      : json_(json), where_(std::move(where)), problem_(problem) {
    if (!json_.is_object()) complain("", "is no object");
  }

  const Json* find(const char* key) {
    if (!json_.is_object()) return nullptr;
    const auto found = json_.find(key);
    if (found == json_.end()) {
      complain(key, "is missing");
      return nullptr;
    }
    return &*found;
  }
  bool has(const char* key) const { return json_.is_object() && json_.contains(key); }

  std::uint64_t integer(const char* key, std::uint64_t least = 0,
                        std::uint64_t most = kMaxInteger) {
    const Json* value = find(key);
    if (value == nullptr) return least;
    const auto* number = value->get_ptr<const Json::number_unsigned_t*>();
    if (number == nullptr) {
      complain(key, "is no whole number");
      return least;
    }
    if (*number < least || *number > most) {
      complain(key, fmt::format("is {}, not within {}..{}", *number, least, most));
      return least;
    }
    return *number;
  }
  int small(const char* key) {
    return static_cast<int>(integer(key, 0, std::numeric_limits<int>::max()));
  }
  Pid pid(const char* key, std::uint64_t least = 1) {
    return Pid{static_cast<int>(integer(key, least, kMaxPid))};
  }

  bool boolean(const char* key) {
    const Json* value = find(key);
    if (value == nullptr) return false;
    const auto* flag = value->get_ptr<const Json::boolean_t*>();
    if (flag == nullptr) {
      complain(key, "is neither true nor false");
      return false;
    }
    return *flag;
  }

  std::string string(const char* key) {
    const Json* value = find(key);
    return value == nullptr ? std::string() : as_string(*value, key);
  }

  std::vector<std::string> strings(const char* key, std::size_t most) {
    std::vector<std::string> values;
    for (const Json* item : items(key, 0, most))
      values.push_back(as_string(*item, key));
    return values;
  }

  // The items of an array, by address; they live as long as the document.
  std::vector<const Json*> items(const char* key, std::size_t least, std::size_t most) {
    const Json* value = find(key);
    if (value == nullptr) return {};
    if (!value->is_array()) {
      complain(key, "is no array");
      return {};
    }
    if (value->size() < least || value->size() > most) {
      complain(key, fmt::format("has {} items, not {}..{}", value->size(), least, most));
      return {};
    }
    std::vector<const Json*> found;
    found.reserve(value->size());
    for (const Json& item : *value)
      found.push_back(&item);
    return found;
  }

  void complain(const char* key, const std::string& what) {
    if (!problem_.empty()) return;
    problem_ = where_.empty() || *key == '\0' ? fmt::format("{}{} {}", where_, key, what)
                                              : fmt::format("{}.{} {}", where_, key, what);
  }

 private:
  std::string as_string(const Json& value, const char* key) {
    const auto* text = value.get_ptr<const Json::string_t*>();
    if (text == nullptr) {
      complain(key, "is no text");
      return {};
    }
    if (text->size() > kMaxString) {
      complain(key, fmt::format("is {} bytes long, more than {}", text->size(), kMaxString));
      return {};
    }
    return *text;
  }

  const Json& json_;
  std::string where_;
  std::string& problem_;
};

// A value of the kind that criu_options.inc names.
void read_option(Fields& fields, const char* key, bool& value) { value = fields.boolean(key); }
void read_option(Fields& fields, const char* key, std::uint32_t& value) {
  value = static_cast<std::uint32_t>(fields.integer(key, 0, std::uint32_t{0xffffffff}));
}
void read_option(Fields& fields, const char* key, std::string& value) {
  value = fields.string(key);
}
void read_option(Fields& fields, const char* key, std::vector<std::string>& value) {
  value = fields.strings(key, kMaxExternal);
}
template <class Choice>
void read_option(Fields& fields, const char* key, Choice& value) {
  if (const auto known = choice_from_name<Choice>(fields.string(key))) {
    value = *known;
  } else {
    fields.complain(key, "is no value that is known");
  }
}

CriuOptions read_options(const Json& json, std::string& problem) {
  Fields fields(json, "criu_options", problem);
  CriuOptions options;
  for_each_criu_option([&](const auto& row) { read_option(fields, row.key, options.*row.field); });
  return options;
}

std::optional<ImageCudaState> cuda_state_from_name(std::string_view name) {
  for (const ImageCudaState state :
       {ImageCudaState::kRunning, ImageCudaState::kLocked, ImageCudaState::kCheckpointed}) {
    if (image_cuda_state_name(state) == name) return state;
  }
  return std::nullopt;
}

ThreadStateRecord read_thread_state(const Json& json, const std::string& where,
                                    std::string& problem) {
  Fields fields(json, where, problem);
  ThreadStateRecord state;
  state.thread = Tid{fields.pid("tid").value};
  if (fields.has("cpus")) state.cpus = fields.string("cpus");
  if (fields.has("io_priority"))
    state.io_priority = static_cast<std::uint32_t>(fields.integer("io_priority", 0, 0xffff));
  if (fields.has("timer_slack")) state.timer_slack = fields.integer("timer_slack");
  if (fields.has("memory_policy")) state.memory_policy = fields.string("memory_policy");
  if (state.memory_policy.size() > kMaxPolicy) fields.complain("memory_policy", "is too long");
  if (fields.has("personality"))
    state.personality = static_cast<std::uint32_t>(fields.integer("personality", 0, 0xffffffff));
  if (fields.has("machine_check")) {
    state.machine_check = fields.string("machine_check");
    if (state.machine_check != "early" && state.machine_check != "late")
      fields.complain("machine_check", "is neither early nor late");
  }
  if (fields.has("slice")) state.slice = fields.integer("slice");
  return state;
}

OwnStateRecord read_own_state(Fields& fields) {
  OwnStateRecord own;
  if (fields.has("processor_state")) {
    for (const Json* item : fields.items("processor_state", 0, kStateBits)) {
      const auto* bit = item->get_ptr<const Json::number_unsigned_t*>();
      if (bit == nullptr || *bit >= kStateBits) {
        fields.complain("processor_state", "holds what is no number of a bit");
        break;
      }
      own.processor_state |= std::uint64_t{1} << *bit;
    }
  }
  if (fields.has("deny_new_code"))
    own.deny_new_code = static_cast<std::uint32_t>(fields.integer("deny_new_code", 0, 0xffffffff));
  if (fields.has("lock_new")) own.lock_new = static_cast<int>(fields.integer("lock_new", 0, 7));
  if (fields.has("merge_memory")) own.merge_memory = fields.boolean("merge_memory");
  return own;
}

KernelStateRecord read_kernel_state(const Json& json, const std::string& where,
                                    std::string& problem) {
  Fields fields(json, where, problem);
  KernelStateRecord state;
  if (fields.has("core_dump_filter"))
    state.core_dump_filter =
        static_cast<std::uint32_t>(fields.integer("core_dump_filter", 0, 0xffffffff));
  state.own = read_own_state(fields);
  if (fields.has("autogroup_nice"))
    state.autogroup_nice =
        static_cast<int>(fields.integer("autogroup_nice", 0, 2 * kNiceOffset)) - kNiceOffset;
  std::unordered_set<int> threads;
  for (const Json* item : fields.items("threads", 0, kMaxThreads)) {
    state.threads.push_back(read_thread_state(*item, where + ".threads", problem));
    if (!threads.insert(state.threads.back().thread.value).second)
      fields.complain("threads", "has a thread twice");
    if (!problem.empty()) return state;
  }
  if (!fields.has("timers")) return state;
  for (const Json* item : fields.items("timers", 0, kMaxTimers)) {
    Fields timer(*item, where + ".timers", problem);
    state.timers.push_back({static_cast<int>(timer.integer("fd", 0, kMaxDescriptor)),
                            static_cast<int>(timer.integer("clock", 0, 15)),
                            static_cast<int>(timer.integer("flags", 0, 3)), timer.integer("left"),
                            timer.integer("interval"), timer.integer("ticks"),
                            timer.integer("clock_at_dump")});
    if (!problem.empty()) return state;
  }
  return state;
}

ProcessRecord read_process(const Json& json, std::size_t index, std::string& problem) {
  Fields fields(json, fmt::format("processes[{}]", index), problem);
  ProcessRecord process;
  process.pid = fields.pid("pid");
  process.parent = fields.pid("parent_pid", 0);
  process.command = fields.strings("command", kMaxArguments);
  process.cuda = fields.boolean("cuda");
  if (process.cuda) {
    process.cuda_state = cuda_state_from_name(fields.string("cuda_state"));
    if (!process.cuda_state) fields.complain("cuda_state", "is no state that is known");
  } else if (fields.has("cuda_state")) {
    fields.complain("cuda_state", "is there though cuda is false");
  }
  if (fields.has("threads")) {
    for (const Json* item : fields.items("threads", 0, kMaxThreads)) {
      const auto* number = item->get_ptr<const Json::number_unsigned_t*>();
      if (number == nullptr || *number < 1 || *number > kMaxPid) {
        fields.complain("threads", "holds what is no thread number");
        break;
      }
      process.threads.push_back(Tid{static_cast<int>(*number)});
    }
  }
  if (fields.has("tcp_ports")) {
    for (const Json* item : fields.items("tcp_ports", 0, kMaxPorts)) {
      const auto* number = item->get_ptr<const Json::number_unsigned_t*>();
      if (number == nullptr || *number < 1 || *number > kMaxPorts) {
        fields.complain("tcp_ports", "holds what is no port");
        break;
      }
      process.tcp_ports.push_back(static_cast<std::uint16_t>(*number));
    }
  }
  if (fields.has("kernel_state")) {
    process.kernel_state = read_kernel_state(
        *fields.find("kernel_state"), fmt::format("processes[{}].kernel_state", index), problem);
  }
  for (const Json* item : fields.items("gpu_memory", 0, kMaxGpus)) {
    Fields use(*item, fmt::format("processes[{}].gpu_memory", index), problem);
    process.gpu_memory.push_back({use.string("gpu_uuid"), use.integer("bytes")});
  }
  return process;
}

ContentRecord read_content(const Json& json, const char* name, std::string& problem) {
  Fields fields(json, name, problem);
  ContentRecord content;
  content.index_size = fields.integer("index_size");
  content.index_checksum = fields.string("index_xxh3");
  if (!is_hex(content.index_checksum)) fields.complain("index_xxh3", "is no checksum");
  for (const Json* item : fields.items("data_sizes", 0, kMaxDataFiles)) {
    const auto* size = item->get_ptr<const Json::number_unsigned_t*>();
    if (size == nullptr || *size > kMaxInteger) {
      fields.complain("data_sizes", "holds what is no size");
      break;
    }
    content.data_sizes.push_back(*size);
  }
  if (fields.has("taken_files"))
    content.reused_files = fields.integer("taken_files", 0, content.data_sizes.size());
  return content;
}

JobRecord read_job(const Json& json, std::string& problem) {
  Fields fields(json, "job", problem);
  return {fields.strings("command", kMaxArguments), fields.strings("streams", kMaxStreams)};
}

// "LEVEL:NAME:HEXADECIMAL".
std::optional<SocketOptionRecord> read_socket_option(std::string_view text) {
  SocketOptionRecord option;
  for (int* number : {&option.level, &option.name}) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
    const auto used = static_cast<std::size_t>(end - text.data());
    if (error != std::errc() || *number < 0 || used == text.size() || text[used] != ':')
      return std::nullopt;
    text.remove_prefix(used + 1);
  }
  if (text.size() % 2 != 0 || text.size() > 2 * kMaxSocketValue) return std::nullopt;
  for (std::size_t at = 0; at < text.size(); at += 2) {
    unsigned byte = 0;
    const char* two = text.data() + at;
    if (std::from_chars(two, two + 2, byte, 16).ptr != two + 2) return std::nullopt;
    option.value += static_cast<char>(byte);
  }
  return option;
}

SocketRecord read_socket(const Json& json, std::size_t index, std::string& problem) {
  Fields fields(json, fmt::format("socket_state.sockets[{}]", index), problem);
  SocketRecord socket;
  socket.pid = fields.pid("pid");
  socket.descriptor = fields.small("descriptor");
  socket.domain = fields.small("domain");
  socket.type = fields.small("type");
  socket.protocol = fields.small("protocol");
  for (const std::string& text : fields.strings("options", kMaxSocketOptions)) {
    auto option = read_socket_option(text);
    if (!option) {
      fields.complain("options", "holds what is no option");
      break;
    }
    socket.options.push_back(std::move(*option));
  }
  for (const Json* item : fields.items("memberships", 0, kMaxMemberships)) {
    Fields one(*item, fmt::format("socket_state.sockets[{}].memberships", index), problem);
    socket.memberships.push_back({one.string("interface"), one.string("group"),
                                  one.boolean("include"),
                                  one.strings("sources", kMaxMulticastSources)});
  }
  return socket;
}

SocketsRecord read_sockets(const Json& json, std::string& problem) {
  Fields fields(json, "socket_state", problem);
  SocketsRecord record;
  record.addresses = fields.strings("addresses", kMaxAddresses);
  record.connection_addresses = fields.strings("connection_addresses", kMaxAddresses);
  for (const Json* item : fields.items("sockets", 0, kMaxSockets)) {
    record.sockets.push_back(read_socket(*item, record.sockets.size(), problem));
    if (!problem.empty()) return record;
  }
  record.lost = fields.strings("lost", kMaxLost);
  return record;
}

FileRecord read_file_record(const Json& json, std::size_t index, std::string& problem) {
  Fields fields(json, fmt::format("files[{}]", index), problem);
  FileRecord file{fields.string("path"), fields.integer("size"), fields.string("checksum")};
  if (!valid_file_path(file.path)) fields.complain("path", "is no path inside the image");
  if (!is_hex(file.checksum)) fields.complain("checksum", "is no checksum");
  return file;
}

Manifest read_fields(const Json& json, std::string& problem) {
  Fields fields(json, "", problem);
  Manifest manifest;
  manifest.stasis_version = fields.string("stasis_version");
  manifest.created = fields.string("created");
  manifest.hostname = fields.string("hostname");
  manifest.kernel_release = fields.string("kernel_release");
  manifest.criu_version = fields.small("criu_version");
  manifest.driver_version = fields.string("driver_version");
  manifest.cuda_version = fields.small("cuda_version");
  manifest.simulated = fields.boolean("simulated");
  for (const Json* item : fields.items("gpus", 0, kMaxGpus)) {
    Fields gpu(*item, fmt::format("gpus[{}]", manifest.gpus.size()), problem);
    manifest.gpus.push_back({gpu.string("uuid"), gpu.string("name"), gpu.integer("total_memory"),
                             gpu.string("pci_bus_id")});
  }
  manifest.root = fields.pid("root_pid");
  for (const Json* item : fields.items("processes", 1, kMaxProcesses)) {
    manifest.processes.push_back(read_process(*item, manifest.processes.size(), problem));
    if (!problem.empty()) return manifest;
  }
  if (const Json* options = fields.find("criu_options")) {
    manifest.criu_options = read_options(*options, problem);
  }
  const std::string sync = fields.string("sync");
  if (sync != "disk" && sync != "none") fields.complain("sync", "is neither disk nor none");
  manifest.sync = sync == "none" ? SyncPolicy::kNone : SyncPolicy::kDisk;
  for (const Json* item : fields.items("phases", 0, kMaxPhases)) {
    Fields phase(*item, "phases", problem);
    manifest.phases.push_back(
        {phase.string("name"), static_cast<double>(phase.integer("microseconds")) / 1e6});
  }
  if (const Json* checksum = fields.find("checksum")) {
    Fields kind(*checksum, "checksum", problem);
    if (kind.string("algorithm") != kChecksumAlgorithm) {
      kind.complain("algorithm", "is not " + std::string(kChecksumAlgorithm));
    }
    kind.integer("block_size", kChecksumBlock, kChecksumBlock);
  }
  for (const Json* item : fields.items("files", 1, kMaxFiles)) {
    manifest.files.push_back(read_file_record(*item, manifest.files.size(), problem));
    if (!problem.empty()) return manifest;
  }
  if (fields.has("gpu_content"))
    manifest.content = read_content(*fields.find("gpu_content"), "gpu_content", problem);
  if (fields.has("host_content"))
    manifest.host_content = read_content(*fields.find("host_content"), "host_content", problem);
  if (fields.has("job")) manifest.job = read_job(*fields.find("job"), problem);
  if (fields.has("socket_state"))
    manifest.sockets = read_sockets(*fields.find("socket_state"), problem);
  const auto features = fields.strings("requires", kMaxRequires);
  const auto agrees = [&](std::string_view feature, bool is_there, const char* field) {
    if (is_there == (std::find(features.begin(), features.end(), feature) != features.end()))
      return;
    fields.complain("requires", fmt::format("and {} do not agree about {}", field, feature));
  };
  agrees(kNeedsContent, manifest.content.has_value(), "gpu_content");
  agrees(kNeedsHostContent, manifest.host_content.has_value(), "host_content");
  manifest.total_bytes = fields.integer("total_bytes");
  return manifest;
}

bool valid_time(std::string_view text) {
  constexpr std::string_view kForm = "dddd-dd-ddTdd:dd:ddZ";
  return text.size() == kForm.size() &&
         std::equal(text.begin(), text.end(), kForm.begin(), [](char c, char form) {
           return form == 'd' ? c >= '0' && c <= '9' : c == form;
         });
}

// A process that is its own ancestor; every parent is one of `processes`, or 0.
std::optional<int> own_ancestor(const std::unordered_map<int, const ProcessRecord*>& processes) {
  std::unordered_set<int> sound;
  for (const auto& [pid, process] : processes) {
    std::unordered_set<int> path;
    for (const ProcessRecord* at = process; !sound.contains(at->pid.value);) {
      if (!path.insert(at->pid.value).second) return at->pid.value;
      if (at->parent.value == 0) break;
      at = processes.at(at->parent.value);
    }
    sound.merge(path);
  }
  return std::nullopt;
}

// What the fields must have to do with each other; empty if all is well.
std::string check_relations(const Manifest& manifest) {
  if (!valid_time(manifest.created)) return "created is no time in UTC";
  std::set<std::string_view> gpus;
  for (const GpuRecord& gpu : manifest.gpus) {
    if (!gpus.insert(gpu.uuid).second) return fmt::format("GPU {} stands twice", gpu.uuid);
  }
  std::unordered_map<int, const ProcessRecord*> processes;
  for (const ProcessRecord& process : manifest.processes) {
    if (!processes.emplace(process.pid.value, &process).second) {
      return fmt::format("process {} stands twice", process.pid.value);
    }
  }
  std::unordered_set<int> threads;
  for (const ProcessRecord& process : manifest.processes) {
    for (const Tid thread : process.threads) {
      if (processes.contains(thread.value) || !threads.insert(thread.value).second) {
        return fmt::format("the number of thread {} stands twice", thread.value);
      }
    }
  }
  const auto root = processes.find(manifest.root.value);
  if (root == processes.end()) return "root_pid is none of the processes";
  if (root->second->parent.value != 0) return "the root has a parent in the image";
  for (const ProcessRecord& process : manifest.processes) {
    if (process.parent == process.pid) {
      return fmt::format("process {} is its own parent", process.pid.value);
    }
    if (process.parent.value != 0 && !processes.contains(process.parent.value)) {
      return fmt::format("the parent of process {} is none of the processes", process.pid.value);
    }
    for (const GpuMemoryRecord& use : process.gpu_memory) {
      if (!gpus.contains(use.gpu_uuid)) {
        return fmt::format("process {} uses a GPU that is not listed", process.pid.value);
      }
    }
  }
  if (const auto pid = own_ancestor(processes))
    return fmt::format("process {} is its own ancestor", *pid);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    if (i > 0 && manifest.files[i].path <= manifest.files[i - 1].path) {
      return fmt::format("files[{}] is out of order or stands twice", i);
    }
    total += manifest.files[i].size;  // each below 2^53, and checked as it grows: no overflow
    if (total > kMaxInteger) return "the files are larger than can be";
  }
  for (const auto& content : {manifest.content, manifest.host_content}) {
    // 65 numbers below 2^53 at most: no overflow either.
    if (content) total += content->total_bytes();
    if (total > kMaxInteger) return "the files are larger than can be";
  }
  if (total != manifest.total_bytes) {
    return fmt::format("total_bytes is {}, the files have {}", manifest.total_bytes, total);
  }
  return {};
}

// Refuses what nlohmann would let pass: a key twice, deep nesting, and more values than any
// manifest has, before they are in memory. A pass of its own, because its parser with a callback
// looks at all earlier siblings after each object.
class Watch final : public nlohmann::json_sax<Json> {
 public:
  bool deep = false;
  bool twice = false;
  bool many = false;

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool start_object(std::size_t) override { return value() && begin(); }
  bool end_object() override { return end(); }
  bool start_array(std::size_t) override { return value() && begin(); }
  bool end_array() override { return end(); }
  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) twice = true;
    return !twice && value();
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  bool begin() {
    keys_.emplace_back();
    deep = keys_.size() > kMaxDepth;
    return !deep;
  }
  bool end() {
    keys_.pop_back();
    return true;
  }

  bool value() {
    many = ++values_ > kMaxValues;
    return !many;
  }

  std::vector<std::set<std::string>> keys_;
  std::size_t values_ = 0;
};

Result<Json> parse_json(std::string_view text) {
  Watch watch;
  const bool whole = Json::sax_parse(text.begin(), text.end(), &watch);
  if (watch.deep) return wrong("it is nested too deeply");
  if (watch.twice) return wrong("a field stands twice");
  if (watch.many) return wrong(fmt::format("it has more than {} values", kMaxValues));
  if (!whole) return wrong("it is no JSON object");
  Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return wrong("it is no JSON object");
  return json;
}

Result<void> check_trailer(std::string_view text) {
  if (text.size() > kMaxText) {
    return wrong(fmt::format("it has {} bytes, more than {}", text.size(), kMaxText));
  }
  if (text.size() < kTrailerSize) return wrong("it is cut short");
  const std::string_view body = text.substr(0, text.size() - kTrailerSize);
  const std::string_view trailer = text.substr(body.size());
  const std::string_view digits = trailer.substr(kTrailerHead.size(), kChecksumDigits);
  if (!trailer.starts_with(kTrailerHead) || !trailer.ends_with(kTrailerTail) || !is_hex(digits)) {
    return wrong("it does not end with its checksum; it is cut short or was edited");
  }
  if (const std::string actual = xxh3_hex(body); actual != digits) {
    return wrong(fmt::format("its checksum is {}, expected {}", actual, digits));
  }
  return {};
}

// The two fields that every format has: which readers may go on.
Result<void> check_version(const Json& json) {
  std::string problem;
  Fields fields(json, "", problem);
  const std::uint64_t format = fields.integer("format", 1);
  const std::vector<std::string> required = fields.strings("requires", kMaxRequires);
  if (!problem.empty()) return wrong(std::move(problem));
  if (format > static_cast<std::uint64_t>(kImageFormat)) {
    return fail(
        ErrorCode::kImageVersion,
        fmt::format("the image has format {}, this program reads up to {}", format, kImageFormat),
        "restore it with the Stasis that wrote it, or a newer one");
  }
  for (const std::string& feature : required) {
    if (feature == kNeedsContent || feature == kNeedsHostContent) continue;
    return fail(
        ErrorCode::kImageVersion,
        fmt::format("the image needs the feature \"{}\", which this program lacks", feature),
        "restore it with the Stasis that wrote it, or a newer one");
  }
  return {};
}

}  // namespace

Result<Manifest> parse_manifest(std::string_view text) {
  STASIS_TRY(check_trailer(text));
  STASIS_TRY_ASSIGN(auto json, parse_json(text));
  STASIS_TRY(check_version(json));
  std::string problem;
  Manifest manifest = read_fields(json, problem);
  if (problem.empty()) problem = check_relations(manifest);
  if (!problem.empty()) return wrong(std::move(problem));
  return manifest;
}

}  // namespace stasis
