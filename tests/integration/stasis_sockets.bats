#!/usr/bin/env bats
# What a dump and a restore keep of sockets: options, multicast groups, addresses; and what is said of
# the rest. docs/what-survives.md has its rows from here. Long because each kind of socket has its cases.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
}
teardown() {
  end_stasis
  [[ ! -e $BATS_TEST_TMPDIR/link ]] || ip link delete "$(<"$BATS_TEST_TMPDIR/link")" 2>/dev/null || true
  [[ -e $BATS_TEST_TMPDIR/address ]] || return 0
  ip address del 10.99.0.1/32 dev lo 2>/dev/null || true
  ip address del 10.99.0.2/32 dev lo 2>/dev/null || true
}

@test "every option of a socket, and its multicast groups, are as they were, also of a process without CUDA" {
  start_target sockets
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  dump_it --tcp-established --network-lock skip --json
  assert_equal "$(json 'd["lost"]')" "[]"
  capture stasis inspect "$image" --json
  assert_equal "$(json 'd["lost"]')" "[]"
  done_by restore --images-dir "$image" --detach --json
  assert_equal "$(json 'd["lost"]')" "[]"
  target_goes_on
  restored_verifies
  grep -q 'values of sockets verified' "$TARGET_LOG"
  assert_equal "$(grep -c 'lost$' "$TARGET_LOG")" 0
  # Not by having tried nothing.
  (($(grep -c 'kept$' "$TARGET_LOG") > 200))
  grep -q '^udp6: option 67 of level 41: kept' "$TARGET_LOG"
  grep -q '^tcp4: option 18 of level 6: kept' "$TARGET_LOG"
  grep -q '^udp4: multicast group 232.1.1.3: kept' "$TARGET_LOG"
}

@test "an image of before, without a word on sockets, is restored" {
  start_target memory --size 1M
  dump_it
  python3 -IS "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" 'del m["socket_state"]'
  restore_it
  target_goes_on
  restored_verifies
}

@test "what an image cannot hold is said at the dump, in words, in JSON and by inspect" {
  start_with 'keep = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)]
keep[0].bind(("127.0.0.1", 0)); keep[1][0].send(b"kept")
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", keep[0].getsockname())
events = libc.inotify_init1(0); libc.inotify_add_watch(events, folder.encode(), 0x100)
open(folder + "/made", "w").close()
count = libc.eventfd(3, 1)
urgent = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM); urgent[0].send(b"!", socket.MSG_OOB)
corked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); corked.connect(("127.0.0.1", 9)); corked.send(b"half", 0x8000)
master, slave = os.openpty(); os.write(slave, b"out")
libc.syscall(250, 1, b"own")  # keyctl(KEYCTL_JOIN_SESSION_KEYRING)
if min(libc.syscall(248, b"user", b"stasis-test", b"v", 1, which) for which in (-2, -3)) > 0:  # add_key
    open(folder + "/keys", "w").close()'
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(json "[f['light'] for f in d['processes'] if f['id'] == 'eventfd']")" "['yellow']"
  done_by dump "$TARGET" --images-dir "$image-first" --leave-running --json
  # A kernel may have no keys, and a container none to give.
  local all=5
  [[ ! -e $BATS_TEST_TMPDIR/keys ]] || all=7
  assert_equal "$(json "sum('(keyctl)' in one for one in d['lost'])")" $((all - 5))
  for words in "): datagrams not yet read" "): events of watched files not yet read" "EFD_SEMAPHORE" \
    "an urgent byte not yet read (MSG_OOB)" "a datagram not yet sent"; do
    assert_equal "$(json "sum('$words' in one for one in d['lost'])")" 1 "$words"
  done
  # What is not yet read of a terminal is in the image.
  assert_equal "$(json 'len(d["lost"])')" "$all"
  # To look has taken nothing away.
  dump_it
  assert_contains "$err" "the image does not hold: process "
  capture stasis inspect "$image" --json
  assert_equal "$(json 'len(d["lost"])')" "$all"
}

@test "what cannot be set again is said, and the job runs" {
  # It would end at the next look at what is not as it was.
  start_target sockets --pause-ms 20000
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  dump_it --tcp-established --network-lock skip
  python3 -IS "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" '
one = [s for s in m["socket_state"]["sockets"] if s["memberships"]][0]
one["memberships"][0]["interface"] = "none"; one["options"].append("6:18:01000000")
m["socket_state"]["sockets"].append({**one, "descriptor": 1, "memberships": []})'
  done_by restore --images-dir "$image" --detach --json
  assert_contains "$(json 'd["lost"]')" "on none: No such device"
  assert_contains "$(json 'd["lost"]')" "(descriptor 1): the socket's options: it is another kind of file"
}

@test "the address that a job listens on is not here: said before anything is made, and by inspect" {
  : >"$BATS_TEST_TMPDIR/address"
  ip address add 10.99.0.1/32 dev lo || skip "no address can be added"
  start_with 'a = socket.create_server(("10.99.0.1", 0)); b = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); b.bind(("10.99.0.1", 0))
c = socket.create_server(("127.0.0.1", 0)); d = socket.create_server(("0.0.0.0", 0))'
  dump_it
  ip address del 10.99.0.1/32 dev lo
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "sockets of the job are bound to 10.99.0.1, which is not an address of this machine"
  assert_contains "$err" "ip address add 10.99.0.1/32 dev lo"
  [[ -z $(compgen -G "$image/log/restore-*") ]]
  capture stasis inspect "$image" --json
  assert_equal "$(json "[c['ok'] for c in d['checks'] if c['id'] == 'addresses']")" "[False]"
  ip address add 10.99.0.1/32 dev lo
  restore_it
  target_goes_on
}

@test "what may be bound to an address that is not here (IP_FREEBIND, IP_TRANSPARENT) comes back where none is" {
  start_with 'def bound(address, kind, level, option):
    s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
    s.setsockopt(level, option, 1); s.bind((address, 0))
    if kind == socket.SOCK_STREAM: s.listen(3)
    return s, level, option
stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
keep = [bound("10.98.0.1", stream, 0, 15), bound("10.98.0.2", datagram, 0, 15), bound("10.98.0.3", stream, 0, 19),
        bound("fd98::1", stream, 41, 78), bound("fd98::2", datagram, 41, 75)]
plain = socket.create_server(("127.0.0.1", 0))
def looks(): return [(s.getsockname(), s.getsockopt(*option)) for s, *option in keep], [plain.getsockopt(0, name) for name in (15, 19)]
before = looks()
import signal
def tell(*_):
    with open(folder + "/said", "w") as file: print("as before" if looks() == before else looks(), file=file)
signal.signal(signal.SIGUSR1, tell)'
  dump_it
  capture stasis inspect "$image" --json
  assert_equal "$(json "[c['ok'] for c in d['checks'] if c['id'] == 'addresses']")" "[True]"
  restore_it
  target_goes_on
  kill -USR1 "${CHILDREN[1]}"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/said"
  assert_equal "$(<"$BATS_TEST_TMPDIR/said")" "as before"
}

@test "mode and owner of a socket are as they were" {
  start_with 'pair = socket.socketpair(); keep = [socket.create_server(("127.0.0.1", 0)), pair[0], pair[1], socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
os.fchmod(keep[0].fileno(), 0o640); os.fchown(keep[1].fileno(), 12, 34)
def looks(): return [(one.st_mode, one.st_uid, one.st_gid) for one in (os.fstat(s.fileno()) for s in keep)]
before = looks()
import signal
def tell(*_):
    with open(folder + "/said", "w") as file: print("as before" if looks() == before else looks(), file=file)
signal.signal(signal.SIGUSR1, tell)'
  dump_it
  restore_it
  target_goes_on
  kill -USR1 "${CHILDREN[1]}"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/said"
  assert_equal "$(<"$BATS_TEST_TMPDIR/said")" "as before"
}

@test "the address of a connection is not here, and need not be with --tcp-close" {
  : >"$BATS_TEST_TMPDIR/address"
  ip address add 10.99.0.1/32 dev lo || skip "no address can be added"
  start_with 'a = socket.create_server(("0.0.0.0", 0)); b = socket.create_connection(("10.99.0.1", a.getsockname()[1])); c, _ = a.accept()'
  dump_it --tcp-established --network-lock skip
  ip address del 10.99.0.1/32 dev lo
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "TCP connections of the job have the address 10.99.0.1"
  assert_contains "$err" "--tcp-close"
  restore_it --tcp-close
  target_goes_on
}

@test "--map-address: sockets and the connections among them come back with another address" {
  local port
  : >"$BATS_TEST_TMPDIR/address"
  ip address add 10.99.0.1/32 dev lo || skip "no address can be added"
  start_with 'server = socket.create_server(("10.99.0.1", 0))
six = socket.create_server(("::ffff:10.99.0.1", 0), family=socket.AF_INET6, dualstack_ipv6=True)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); datagrams.bind(("10.99.0.1", 0))
every = socket.create_server(("0.0.0.0", 0))
open(folder + "/port", "w").write(str(server.getsockname()[1]))
if os.fork() == 0:
    one = socket.create_connection(server.getsockname())
    while True: one.sendall(one.recv(100).upper())
other, _ = server.accept()
def rounds():
    number = 0
    while True:
        number += 1
        other.sendall(b"round %d" % number)
        assert other.recv(100) == b"ROUND %d" % number
        names = [s.getsockname()[0] for s in (server, six, datagrams, every, other)] + [other.getpeername()[0]]
        with open(folder + "/names.new", "w") as file: file.write(" ".join(names))
        os.rename(folder + "/names.new", folder + "/names")
        open(folder + "/rounds", "w").write(str(number))
        time.sleep(0.02)
import threading; threading.Thread(target=rounds, daemon=True).start()'
  port=$(<"$BATS_TEST_TMPDIR/port")
  dump_it
  ip address del 10.99.0.1/32 dev lo
  ip address add 10.99.0.2/32 dev lo
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "--map-address 10.99.0.1=NEW"
  refused 2 usage restore --images-dir "$image" --detach --map-address 10.99.0.1=10.99.0.2 --map-address 10.99.0.7=10.99.0.2
  assert_contains "$err" "no socket of the image has the address 10.99.0.7"
  refused 2 usage restore --images-dir "$image" --detach --map-address 10.99.0.1=10.99.0.2 --map-address 10.99.0.1=10.99.0.3
  assert_contains "$err" "10.99.0.1 is mapped to two others"
  for words in 10.99.0.1=::1 10.99.0.1=0.0.0.0 10.99.0.1=224.0.0.1; do
    refused 2 usage restore --images-dir "$image" --detach --map-address "$words"
  done
  nothing_left
  [[ -z $(find "$STASIS_STATE_DIR" -name images) ]]
  refused 9 criu-failed restore --images-dir "$image" --detach --map-address 10.99.0.1=10.99.0.3
  assert_contains "$err" "bound to 10.99.0.3, which is not an address of this machine"
  restore_it --map-address 10.99.0.1=10.99.0.2
  rm -f "$BATS_TEST_TMPDIR"/{names,rounds}
  wait_until 60 test -s "$BATS_TEST_TMPDIR/rounds"
  assert_equal "$(<"$BATS_TEST_TMPDIR/names")" "10.99.0.2 ::ffff:10.99.0.2 10.99.0.2 0.0.0.0 10.99.0.2 10.99.0.2"
  python3 -IS -c 'import socket, sys; socket.create_connection(("10.99.0.2", int(sys.argv[1])), 5)' "$port"
  # The image is as it was.
  capture stasis verify "$image"
  ((status == 0))
}

@test "connections of a job's processes with each other are kept without an option, and carry on" {
  start_with 'server = socket.create_server(("127.0.0.1", 0))
def echo():
    one = socket.create_connection(server.getsockname())
    while True: one.sendall(one.recv(100).upper())
if os.fork() == 0: echo()
other, _ = server.accept()
closed, gone = socket.create_connection(server.getsockname()), server.accept()[0]
gone.close()
def rounds():
    number = 0
    while True:
        number += 1
        other.sendall(b"round %d" % number)
        assert other.recv(100) == b"ROUND %d" % number
        open(folder + "/rounds", "w").write(str(number))
        time.sleep(0.01)
import threading; threading.Thread(target=rounds, daemon=True).start()'
  rounds_are_more_than() { (($(cat "$BATS_TEST_TMPDIR/rounds" 2>/dev/null || echo 0) > $1)); }
  wait_until 60 rounds_are_more_than 3
  dump_it
  assert_contains "$err" "connected with each other by TCP"
  local before
  before=$(<"$BATS_TEST_TMPDIR/rounds")
  restore_it
  target_goes_on
  wait_until 60 rounds_are_more_than $((before + 3))
}

# start_connecting ADDRESS: a program that connects there, in the middle of a dump (the tool has stopped).
start_connecting() {
  start_with 'server = socket.create_server(("127.0.0.1", 0))
def connect():
    while not os.path.exists(folder + "/connect"): time.sleep(0.01)
    globals()["one"] = socket.create_connection('"$1"')
    if one.getpeername() == server.getsockname(): globals()["other"] = server.accept()[0]
    open(folder + "/connected", "w").close()
import threading; threading.Thread(target=connect, daemon=True).start()'
}

dumped_while_it_connects() {
  STASIS_FAULT=lock.before:stop stasis dump "$TARGET" --images-dir "$image" </dev/null >"$BATS_TEST_TMPDIR/out" 2>"$BATS_TEST_TMPDIR/err" 3>&- &
  local tool=$!
  at_end_kill "$tool"
  wait_until 60 grep -q "State:.*stopped" "/proc/$tool/status"
  touch "$BATS_TEST_TMPDIR/connect"
  wait_until 60 test -e "$BATS_TEST_TMPDIR/connected"
  kill -CONT "$tool"
  status=0
  wait "$tool" || status=$?
  err=$(<"$BATS_TEST_TMPDIR/err")
}

@test "the first connection of a job with itself may come when its dump has begun" {
  start_connecting 'server.getsockname()'
  dumped_while_it_connects
  assert_equal "$status" 0 "$err"
  assert_contains "$err" "connected with each other by TCP"
  restore_it
  target_goes_on
}

@test "a connection out of the job that comes when its dump has begun is not kept without consent" {
  # A server outside of the tree, of the kernel alone: no process has to accept.
  python3 -IS -c 'import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(300)' >"$BATS_TEST_TMPDIR/port" 3>&- &
  at_end_kill $!
  wait_until 60 test -s "$BATS_TEST_TMPDIR/port"
  start_connecting "('127.0.0.1', $(<"$BATS_TEST_TMPDIR/port"))"
  dumped_while_it_connects
  assert_equal "$status" 9 "$err"
  assert_contains "$err" "leads out of the job"
  assert_contains "$err" "the dump is tried again"
  assert_contains "$err" "has open TCP connections"
  target_goes_on
  no_image
}

@test "sockets whose connection was reset or refused, and that are still open, keep no image from being restored" {
  start_with 'server = socket.create_server(("127.0.0.1", 0))
reset, cut = socket.create_connection(server.getsockname()), server.accept()[0]
cut.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); cut.close()
address = server.getsockname(); server.close()
refused = socket.socket()
try: refused.connect(address)
except ConnectionRefusedError: pass
state = lambda one: one.getsockopt(socket.IPPROTO_TCP, 11, 1)[0]  # TCP_INFO
while state(reset) != 7: time.sleep(.01)  # TCP_CLOSE'
  dump_it
  restore_it
  target_goes_on
}

@test "--tcp-established and --tcp-close together make no sense" {
  start_target idle
  refused 2 usage dump "$TARGET" --images-dir "$image" --tcp-established --tcp-close
  target_goes_on
  no_image
}

# The program accepts once a dump's directory has come and gone: then one try has failed.
@test "a dump that meets a connection just being opened is tried again" {
  IMAGES="$BATS_TEST_TMPDIR" start_with 'server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
def accept():
    tried = lambda: [name for name in os.listdir(folder) if name.startswith("image")]
    while not tried(): time.sleep(0.002)
    while tried(): time.sleep(0.002)
    globals()["other"] = server.accept()[0]
    client.sendall(b"here")
import threading; threading.Thread(target=accept, daemon=True).start()'
  dump_it
  assert_contains "$err" "has not accepted all that were made"
  assert_contains "$err" "the dump is tried again"
  restore_it
  target_goes_on
}

@test "a connection that is never accepted is told, and the program runs on" {
  start_with 'server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname())'
  refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "has not accepted all that were made, which CRIU cannot dump: 1 by descriptor"
  refused 7 busy dump "$TARGET" --images-dir "$image" --ignore-undumpable
  assert_contains "$err" "just being opened"
  target_goes_on
  no_image
}

@test "a connection to a unix socket that was closed before it is accepted is told, and the program runs on" {
  start_with 'server = socket.socket(socket.AF_UNIX); server.bind(folder + "/name"); server.listen()
client = socket.socket(socket.AF_UNIX); client.connect(folder + "/name"); client.close()'
  refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "a connection to a unix socket was closed before the program has accepted it"
  target_goes_on
}

@test "the other end of a pipe that is under way is no process outside: the dump waits until it is received" {
  start_with 'here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); end, pipe = os.pipe()
socket.send_fds(here, [b"x"], [end]); os.close(end); os.write(pipe, b"in the pipe")
def receive():
    while not os.path.exists(folder + "/go"): time.sleep(.02)
    got = socket.recv_fds(there, 1, 1)[1][0]; open(folder + "/received", "w").close()
    while not os.path.exists(folder + "/read"): time.sleep(.02)
    os.write(os.open(folder + "/got", os.O_WRONLY | os.O_CREAT), os.read(got, 20))
import threading; threading.Thread(target=receive, daemon=True).start()'
  refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "it is under way in a unix socket (SCM_RIGHTS), or outside of the tree"
  [[ $err != *"cannot be seen from here)"* ]]
  : >"$BATS_TEST_TMPDIR/go"
  wait_until 60 test -e "$BATS_TEST_TMPDIR/received"
  dump_it
  restore_it
  : >"$BATS_TEST_TMPDIR/read"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/got"
  assert_equal "$(<"$BATS_TEST_TMPDIR/got")" "in the pipe"
}

@test "what descriptors under way have that a restore would lose makes a dump wait until they are received" {
  local name make act bytes what
  local cases='lock|os.open(folder + "/file", os.O_RDWR + os.O_CREAT)|fcntl.flock(one, 2)|b"x"|a lock (flock, F_OFD_SETLK) or a lease
owner|os.dup((both := os.pipe())[0])|fcntl.fcntl(one, fcntl.F_SETOWN, os.getpid())|b"x"|a process that it signals
semaphore|libc.eventfd(1, 1)|0|b"x"|EFD_SEMAPHORE
epoll|libc.epoll_create1(0)|libc.epoll_ctl(one, 1, here.fileno(), ctypes.create_string_buffer(12))|b"x"|files that it watches (epoll)
thread|os.open("/proc/thread-self/stat", 0)|0|b"x"|a file of the kernel (/proc, /sys, a cgroup)
terminal|(pair := os.openpty())[1]|0|b"x"|a descriptor of a terminal that is under way
unnamed|os.open(folder, os.O_RDWR + os.O_TMPFILE)|0|b"x"|one of O_TMPFILE
many|os.open("/dev/null", 0)|count = 253|b"x"|more than 251 others in its message
empty|os.open("/dev/null", 0)|0|b""|with an empty message'
  while IFS='|' read -r name make act bytes what; do
    [[ ${STASIS_ALL_TESTS:-0} != 0 || $name != @(owner|thread|unnamed|many) ]] || continue
    start_with "import fcntl
here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); count = 1; one = $make; $act
here.send(b'first'); socket.send_fds(here, [$bytes], [one] * count); os.close(one)
def receive():
    while not os.path.exists(folder + '/go-$name'): time.sleep(.02)
    there.recv(9); global got; got = socket.recv_fds(there, 1, 1)[1][0]; open(folder + '/received', 'w').close()
import threading; threading.Thread(target=receive, daemon=True).start()"
    refused 7 busy dump "$TARGET" --images-dir "$image"
    assert_contains "$err" "has not yet read a descriptor"
    assert_contains "$err" "$what"
    : >"$BATS_TEST_TMPDIR/go-$name"
    wait_until 60 test -e "$BATS_TEST_TMPDIR/received"
    done_by dump "$TARGET" --images-dir "$image" --file-locks --leave-running
    end_targets
    rm -r "$BATS_TEST_TMPDIR/received" "$BATS_TEST_TMPDIR/ready" "$image"
  done <<<"$cases"
}

@test "memory under way in a unix socket that a process outside has too makes a dump wait until it ends" {
  start_with 'import mmap
here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
memory = libc.memfd_create(b"both", 0); os.write(memory, b"1")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        mapped = mmap.mmap(memory, 1); os.closerange(3, 100)
        while not os.path.exists(folder + "/go"): time.sleep(.02)
        open(folder + "/ended", "w").close()
    os._exit(0)
os.wait()
socket.send_fds(here, [b"x"], [memory]); os.close(memory)'
  refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "of memory or a deleted file that process"
  : >"$BATS_TEST_TMPDIR/go"
  wait_until 60 test -e "$BATS_TEST_TMPDIR/ended"
  done_by dump "$TARGET" --images-dir "$image" --leave-running
}

@test "an epoll that watches what only another process still has is told, and the program runs on" {
  start_with 'import select
events = select.epoll(); end, pipe = os.pipe(); events.register(end)
if os.fork() == 0: libc.prctl(1, 9); time.sleep(300)
os.close(end)'
  refused 9 criu-failed dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "an epoll of the process watches a file that the process has no more, and another one has"
  target_goes_on
}

@test "a connection that waits to be accepted is restored, also where its maker stands in front of the listener" {
  start_script waiting_connection.py
  dump_it
  restore_it
  script_goes_on
  touch "$TARGET_STATUS.go"
  wait_until 30 test -s "$TARGET_STATUS.answer"
  assert_equal "$(<"$TARGET_STATUS.answer")" "ANSWERED?"
  kill -KILL -- "-$TARGET"
}

@test "what CRIU leaves out behind an urgent byte or an empty message is not lost without a word" {
  start_with 'server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname()); urgent, _ = server.accept()
client.send(b"abc"); client.send(b"u", socket.MSG_OOB); client.send(b"def"); time.sleep(.1)'
  refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "an urgent byte (MSG_OOB) not yet read, behind which CRIU reads nothing"
  end_targets
  rm "$BATS_TEST_TMPDIR/ready"
  start_with 'server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname()); urgent, _ = server.accept()
client.send(b"abc"); client.send(b"u", socket.MSG_OOB); client.send(b"def"); time.sleep(.1)
urgent.recv(1, socket.MSG_OOB)'
  refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "has not yet read data behind an urgent byte (MSG_OOB) of a TCP connection, which CRIU cannot save"
  done_by dump "$TARGET" --images-dir "$image" --ignore-undumpable --leave-running
  assert_contains "$err" "data behind an urgent byte (MSG_OOB) of a TCP connection"
  # What is in a connection that is not kept counts for nothing.
  done_by dump "$TARGET" --images-dir "$image-close" --tcp-close --leave-running
  target_goes_on
  end_targets
  rm "$BATS_TEST_TMPDIR/ready"
  # CRIU saves what is behind an empty one that has others in front of it when it comes there again.
  start_with 'here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for message in (b"a", b"", b"b"): here.send(message)
def read():
    while not os.path.exists(folder + "/go"): time.sleep(.02)
    open(folder + "/got", "wb").write(there.recv(9) + there.recv(9))
import threading
threading.Thread(target=read, daemon=True).start()'
  done_by dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/two"
  assert_contains "$err" "what is behind an empty message in a unix socket, which CRIU cannot save; the dump is tried again"
  wait_until 60 number_is_free
  done_by restore "$BATS_TEST_TMPDIR/two" --detach
  : >"$BATS_TEST_TMPDIR/go"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/got"
  assert_equal "$(<"$BATS_TEST_TMPDIR/got")" ab
}

@test "datagrams that come from outside while a dump is made are not taken for torn" {
  local name=$BATS_TEST_TMPDIR/datagrams sender
  start_with "open_to_all = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); open_to_all.bind('$name')"
  python3 -IS -c 'import socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.setblocking(False)
while True:
    try: s.sendto(b"one", sys.argv[1])
    except BlockingIOError: pass
    time.sleep(.005)' "$name" 3>&- &
  sender=$!
  at_end_kill "$sender"
  for _ in 1 2 3; do
    done_by dump "$TARGET" --images-dir "$image" --leave-running --force --ext-unix-sk
    [[ $err != *"tried again"* ]] || { echo "$err" >&2; return 1; }
  done
}

@test "a TCP connection by addresses of one link, which CRIU cannot restore, is refused" {
  local name=link$$
  ip link add "$name" type veth peer "${name}b" 2>/dev/null || skip "no veth here"
  echo "$name" >"$BATS_TEST_TMPDIR/link"
  ip link set "$name" up
  ip link set "${name}b" up
  ip -6 address add fe80::99:1/64 dev "$name" nodad || skip "no IPv6 here"
  start_with "where = ('fe80::99:1', 0, 0, socket.if_nametoindex('$name'))
def listens(): s = socket.socket(socket.AF_INET6); s.bind(where); s.listen(); return s
server, bound = listens(), socket.socket(socket.AF_INET6); bound.bind(where)
if os.fork():
    client = socket.socket(socket.AF_INET6); client.connect(server.getsockname()); accepted, _ = server.accept()
    ended = socket.socket(socket.AF_INET6); ended.connect(server.getsockname()); end, _ = server.accept()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); end.close()"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(json "[f['what'].count('descriptor ') for f in d['processes'] if f['id'] == 'link-local-connection']")" "[3]"
  refused 9 undumpable dump "$TARGET" --images-dir "$image" --tcp-established
  assert_contains "$err" "connections by IPv6 addresses of one link (fe80::)"
  target_goes_on
  dump_it --tcp-close
  restore_it
  target_goes_on
}

@test "a TCP connection that is peeked at from an offset is dumped when its data is read" {
  python3 -IS -c 'import socket; socket.socket().setsockopt(socket.SOL_SOCKET, 42, 0)' || skip "no SO_PEEK_OFF of TCP here"
  start_with 'server = socket.create_server(("127.0.0.1", 0)); client = socket.create_connection(server.getsockname()); peeks, _ = server.accept()
peeks.setsockopt(socket.SOL_SOCKET, 42, 0); client.send(b"abc"); assert peeks.recv(1, socket.MSG_PEEK) == b"a"
def read():
    while not os.path.exists(folder + "/go"): time.sleep(.02)
    peeks.recv(9); open(folder + "/empty", "w").close()
    while not os.path.exists(folder + "/more"): time.sleep(.02)
    client.send(b"def"); got = peeks.recv(2, socket.MSG_PEEK) + peeks.recv(2, socket.MSG_PEEK); open(folder + "/got", "wb").write(got)
import threading; threading.Thread(target=read, daemon=True).start()'
  refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "an offset to peek at it (SO_PEEK_OFF)"
  : >"$BATS_TEST_TMPDIR/go"
  wait_until 60 test -e "$BATS_TEST_TMPDIR/empty"
  dump_it
  restore_it
  : >"$BATS_TEST_TMPDIR/more"
  wait_until 60 test -s "$BATS_TEST_TMPDIR/got"
  assert_equal "$(<"$BATS_TEST_TMPDIR/got")" def
}

@test "what CRIU sets of connections, of TCP and of netlink, is as it was" {
  start_with 'server = socket.create_server(("127.0.0.1", 0)); one = socket.create_connection(server.getsockname()); two, _ = server.accept()
shut = socket.create_connection(server.getsockname()); other, _ = server.accept(); other.shutdown(1); shut.shutdown(1)
kept = socket.create_connection(server.getsockname()); kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); last, _ = server.accept()
route = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); route.bind((0, 0)); route.connect((0, 0))
group = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); group.bind((0, 0)); group.connect((0, 2))
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0); raw.setsockopt(263, 15, 1)
def header():
    try: return raw.getsockopt(263, 24)
    except OSError: return "not in this kernel"
if header() == 10: raw.setsockopt(263, 24, 12)
before = header()
def look():
    while not os.path.exists(folder + "/go"): time.sleep(.02)
    reuse = [s.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) for s in (server, one, two, shut, other, kept, last)]
    open(folder + "/got.new", "w").write(f"{reuse} {route.getpeername()} {group.getpeername()} {header() == before}"); os.rename(folder + "/got.new", folder + "/got")
import threading
threading.Thread(target=look, daemon=True).start()'
  dump_it
  restore_it
  : >"$BATS_TEST_TMPDIR/go"
  wait_until 60 test -e "$BATS_TEST_TMPDIR/got"
  assert_equal "$(<"$BATS_TEST_TMPDIR/got")" "[0, 0, 0, 0, 0, 1, 0] (0, 0) (0, 2) True"
}

@test "names of senders, closed peers and empty messages of unix sockets are not lost without a word" {
  start_with 'os.chdir(folder); AF, D = socket.AF_UNIX, socket.SOCK_DGRAM
def bound(name): s = socket.socket(AF, D); s.bind(name); return s
gets, sends = bound("gets"), bound("sends"); sends.sendto(b"one", "gets")
nameless = socket.socket(AF, D); other = bound("other"); nameless.sendto(b"one", "other")
lonely, closed = socket.socketpair(AF, D); closed.close()
pair = socket.socketpair(AF, D)
behind = bound("behind"); [nameless.sendto(m, "behind") for m in (b"a", b"", b"b")]'
  dump_it
  assert_contains "$err" "(descriptor 3): the names of the senders of messages not yet read"
  assert_contains "$err" "): that the peer of the unix socket is closed: send() says ENOTCONN"
  assert_contains "$err" "): messages in a unix socket that came while it was saved, or that are behind an empty one"
  assert_equal "$(grep -o 'names of the senders\|that the peer of' <<<"$err" | wc -l)" 2
  end_targets
  rm -r "$BATS_TEST_TMPDIR/ready" "$image"
  start_with 'name = folder + "/name"; first = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); first.bind(name)
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); sender.sendto(b"", name); sender.sendto(b"lost", name)
shut, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); end.close()
def read():
    while not os.path.exists(folder + "/go"): time.sleep(.02)
    first.recv(9)
import threading; threading.Thread(target=read, daemon=True).start()'
  refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "(descriptor 3) has not yet read an empty message in a unix socket, which CRIU cannot save"
  : >"$BATS_TEST_TMPDIR/go"
  dump_it
}

@test "what a restore forgets of errors, numbers and descriptors under way is said" {
  start_with 'refused = socket.socket(); refused.setblocking(False)
try: refused.connect(("127.0.0.1", 1))
except BlockingIOError: pass
time.sleep(.1)
server = socket.create_server(("127.0.0.1", 0)); counts = socket.create_connection(server.getsockname()); counted, _ = server.accept()
counts.setsockopt(socket.SOL_SOCKET, 60, 1); counted.setsockopt(socket.SOL_SOCKET, 37, 1 << 7 | 1 << 1 | 1 << 4)
server.setsockopt(socket.IPPROTO_TCP, 27, 1); opens = socket.create_connection(server.getsockname()); opened, _ = server.accept()
one, two = socket.socketpair()
one.send(b"ab"); socket.send_fds(one, [b"cd"], [os.open("/dev/null", os.O_RDONLY)])'
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  assert_contains "$err" "(descriptor 3): an error of the socket not yet read"
  assert_contains "$err" "the numbers of MSG_ZEROCOPY's completions, which begin at 0"
  assert_contains "$out$err" "(TCP_SAVED_SYN)"
  assert_contains "$err" "the numbers of time stamps (OPT_ID), which begin at 0"
  assert_contains "$err" "with which bytes descriptors under way (SCM_RIGHTS) come"
  target_goes_on
  end_targets
  rm "$BATS_TEST_TMPDIR/ready"
  start_with 'reset, other = socket.socketpair(); reset.send(b"unread"); other.send(b"x"); other.close()'
  refused 7 busy dump "$TARGET" --images-dir "$image-2"
  assert_contains "$err" "unix sockets with an error not yet read"
}
