// What of a network namespace of the tree's own CRIU 4.2.1 does not bring back: it saves devices,
// addresses, routes of the main table, rules and some settings (its net.c).
#include <linux/if_link.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/fd.h"
#include "doctor/criu_checks.h"
#include "proc/in_namespace.h"
#include "proc/netlink.h"

namespace stasis::doctor {
namespace {

constexpr std::string_view kFromWithin =
    "dump and restore it from within that namespace (nsenter --net, ip netns exec), which leaves "
    "it as it is";
constexpr Kind kOwnNetwork{
    "own-network", Severity::kYellow,
    "lives in a network namespace of its own, which a restore makes anew: most settings below "
    "/proc/sys/net, routes of other tables than the main one, queueing disciplines (tc), IPsec "
    "(ip xfrm), and what was set by hand of neighbours and bridges (ip neigh, bridge fdb) are lost",
    "dump and restore it from within that namespace (nsenter --net, ip netns exec), which leaves "
    "it as it is, or set them again"};
constexpr Kind kOutsideDevices{
    "own-network", Severity::kYellow,
    "has devices whose other end is in another network namespace, and which a restore connects "
    "with nothing",
    kFromWithin};
constexpr Kind kNotMade{"network-device", Severity::kRed,
                        "has devices in a network namespace of its own that a restore cannot make",
                        kFromWithin};
constexpr Kind kNotSet{"network-route", Severity::kRed,
                       "has routes in a network namespace of its own by devices that are not "
                       "connected, with which no restore succeeds",
                       "connect the devices or take their addresses away; or dump and restore it "
                       "from within that namespace (nsenter --net, ip netns exec)"};

struct Networking {
  std::set<std::string> outside;    // devices, by name
  std::set<std::string> unmade;     // the same
  std::set<std::string> dead_ways;  // the devices of such routes
};

// The beginning of it as one of the kernel's structures; false if there is less.
template <typename Head>
bool starts_with(std::string_view bytes, Head& out) {
  if (bytes.size() < sizeof out) return false;
  std::memcpy(&out, bytes.data(), sizeof out);
  return true;
}

std::string_view rest_behind(std::string_view bytes, std::size_t size) {
  return bytes.substr(std::min(size, bytes.size()));
}

// A list in which each entry begins with its length.
template <typename Head, typename Length>
void for_each_entry(std::string_view list, Length Head::*length,
                    const std::function<void(const Head&, std::string_view)>& use) {
  Head head{};
  while (starts_with(list, head)) {
    const auto size = static_cast<std::size_t>(head.*length);
    if (size < sizeof head || size > list.size()) return;
    use(head, list.substr(0, size));
    list = rest_behind(list, NLMSG_ALIGN(size));
  }
}

void for_each_attribute(std::string_view list,
                        const std::function<void(int, std::string_view)>& use) {
  for_each_entry<rtattr>(list, &rtattr::rta_len, [&](const rtattr& head, std::string_view all) {
    use(head.rta_type & NLA_TYPE_MASK, rest_behind(all, RTA_LENGTH(0)));
  });
}

std::string link_text_of(std::string_view value) {
  return std::string(value.substr(0, value.find('\0')));
}

std::uint32_t word_of(std::string_view value) {
  std::uint32_t out = 0;
  return starts_with(value, out) ? out : 0;
}

// All answers to a question for a list: each without its header.
template <typename Head>
void ask_all(std::uint16_t type, std::uint8_t family,
             const std::function<void(const Head&, std::string_view)>& use) {
  const UniqueFd netlink = proc::open_netlink(NETLINK_ROUTE);
  if (!netlink.valid()) return;
  struct {
    nlmsghdr header;
    Head body;
  } question{};
  question.header.nlmsg_len = sizeof question;
  question.header.nlmsg_type = type;
  question.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
  // The family is the first byte of each of these.
  std::memcpy(&question.body, &family, sizeof family);
  if (::send(netlink.get(), &question, sizeof question, 0) != sizeof question) return;
  std::array<char, 65536> buffer{};
  for (bool is_over = false; !is_over;) {
    const ssize_t got = ::recv(netlink.get(), buffer.data(), buffer.size(), 0);
    if (got <= 0) return;
    for_each_entry<nlmsghdr>({buffer.data(), static_cast<std::size_t>(got)}, &nlmsghdr::nlmsg_len,
                             [&](const nlmsghdr& header, std::string_view all) {
                               is_over |= header.nlmsg_type == NLMSG_DONE ||
                                          header.nlmsg_type == NLMSG_ERROR;
                               Head head{};
                               const std::string_view body = rest_behind(all, NLMSG_HDRLEN);
                               if (!is_over && starts_with(body, head))
                                 use(head, rest_behind(body, NLMSG_ALIGN(sizeof head)));
                             });
  }
}

void note_device(std::string_view attributes, Networking& out) {
  std::string name;
  std::string kind;
  bool is_outside = false;
  for_each_attribute(attributes, [&](int type, std::string_view value) {
    if (type == IFLA_IFNAME) name = link_text_of(value);
    if (type == IFLA_LINK_NETNSID) is_outside = true;
    if (type != IFLA_LINKINFO) return;
    for_each_attribute(value, [&](int inner, std::string_view what) {
      if (inner == IFLA_INFO_KIND) kind = link_text_of(what);
    });
  });
  // It asks for the device below it, which the options of a restore would have to name.
  if (kind == "macvlan") out.unmade.insert(fmt::format("{} (macvlan)", name));
  if (kind == "veth" && is_outside) out.outside.insert(fmt::format("{} (veth)", name));
}

constexpr unsigned kUnconnected = RTNH_F_DEAD | RTNH_F_LINKDOWN;

// The kernel takes no route that says so (rtm_to_fib_config() of net/ipv4/fib_frontend.c), and CRIU
// gives it back as it was.
void note_route(const rtmsg& route, std::string_view attributes, Networking& out) {
  bool is_dead = (route.rtm_flags & kUnconnected) != 0;
  std::uint32_t table = route.rtm_table;
  std::uint32_t device = 0;
  for_each_attribute(attributes, [&](int type, std::string_view value) {
    if (type == RTA_TABLE) table = word_of(value);
    if (type == RTA_OIF) device = word_of(value);
    if (type != RTA_MULTIPATH) return;
    for_each_entry<rtnexthop>(value, &rtnexthop::rtnh_len,
                              [&](const rtnexthop& way, std::string_view) {
                                is_dead |= (way.rtnh_flags & kUnconnected) != 0;
                                device = static_cast<std::uint32_t>(way.rtnh_ifindex);
                              });
  });
  if (table != RT_TABLE_MAIN || !is_dead) return;
  std::array<char, IF_NAMESIZE> name{};
  if (::if_indextoname(device, name.data()) != nullptr) out.dead_ways.insert(name.data());
}

Networking networking() {
  Networking out;
  ask_all<ifinfomsg>(RTM_GETLINK, AF_UNSPEC, [&](const ifinfomsg&, std::string_view attributes) {
    note_device(attributes, out);
  });
  ask_all<rtmsg>(RTM_GETROUTE, AF_INET, [&](const rtmsg& route, std::string_view attributes) {
    note_route(route, attributes, out);
  });
  return out;
}

// Of another process. Nothing where its network may not be entered.
std::optional<Networking> networking_of(Pid pid) {
  std::optional<Networking> out;
  proc::in_namespace(pid, proc::Namespace::kNetwork, [&] { out = networking(); });
  return out;
}

}  // namespace

void probe_networks(Facts& facts, const Processes& processes, const CriuOptions& options,
                    Signs& out) {
  const Pid root = processes.front().pid;
  // One that stays, and is there at the restore.
  if (std::any_of(options.external.begin(), options.external.end(),
                  [](const std::string& one) { return one.starts_with("net["); }))
    return;
  if (facts.namespace_of(root, "net") == 0 || facts.has_our_namespace(root, "net")) return;
  out.add(root, kOwnNetwork, "unshare --net");
  std::map<ino_t, Pid> networks;
  for (const proc::ProcessInfo& info : processes) {
    const ino_t its = facts.namespace_of(info.pid, "net");
    if (its != 0 && !facts.has_our_namespace(info.pid, "net")) networks.insert({its, info.pid});
  }
  for (const auto& [space, pid] : networks) {
    const auto found = networking_of(pid);
    if (!found) continue;
    for (const std::string& name : found->unmade)
      out.add(pid, kNotMade, name);
    for (const std::string& name : found->dead_ways)
      out.add(pid, kNotSet, name);
    // Of several, the other end may be in another one of the tree's.
    for (const std::string& name : found->outside)
      if (networks.size() == 1) out.add(pid, kOutsideDevices, name);
  }
}

}  // namespace stasis::doctor
