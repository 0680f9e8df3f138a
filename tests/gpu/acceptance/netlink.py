"""Network interfaces by netlink, for machines without ip(8): a veth pair between two namespaces, addresses, up."""

import errno
import os
import socket
import struct

NLM_F_REQUEST, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL = 1, 4, 0x400, 0x200
NLMSG_ERROR = 2
RTM_NEWLINK, RTM_NEWADDR = 16, 20
IFLA_IFNAME, IFLA_LINKINFO, IFLA_NET_NS_PID = 3, 18, 19
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFA_ADDRESS, IFA_LOCAL = 1, 2
IFF_UP = 1


def attribute(kind, content):
    return struct.pack("=HH", 4 + len(content), kind) + content + b"\0" * (-len(content) % 4)


def link_message(index=0, flags=0, change=0):
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


def ask(kind, flags, content):
    """Raises OSError with what the kernel answers."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        flags |= NLM_F_REQUEST | NLM_F_ACK
        netlink.send(struct.pack("=IHHII", 16 + len(content), kind, flags, 1, 0) + content)
        answer = netlink.recv(65536)
    found, = struct.unpack_from("=H", answer, 4)
    error, = struct.unpack_from("=i", answer, 16)
    if found != NLMSG_ERROR or error:
        raise OSError(-error or errno.EPROTO, os.strerror(-error or errno.EPROTO))


def join_by_veth(first, second):
    """(process, interface) each: a pair of interfaces in the network namespaces of these processes."""
    def end(process, name):
        return attribute(IFLA_IFNAME, name.encode() + b"\0") + attribute(IFLA_NET_NS_PID, struct.pack("=I", process))
    peer = attribute(VETH_INFO_PEER, link_message() + end(*second))
    info = attribute(IFLA_INFO_KIND, b"veth") + attribute(IFLA_INFO_DATA, peer)
    ask(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, link_message() + end(*first) + attribute(IFLA_LINKINFO, info))


def add_address(interface, address, bits=24):
    raw = socket.inet_aton(address)
    message = struct.pack("=BBBBi", socket.AF_INET, bits, 0, 0, socket.if_nametoindex(interface))
    ask(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, message + attribute(IFA_LOCAL, raw) + attribute(IFA_ADDRESS, raw))


def bring_up(interface):
    ask(RTM_NEWLINK, 0, link_message(socket.if_nametoindex(interface), IFF_UP, IFF_UP))
