#!/usr/bin/env bats
# What stasis is given wrongly, and what goes wrong on the way: a clear error, a documented status, the
# target as it was, nothing left behind.
# Long because it is a list, with one test for each refusal.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

# The target runs as before, and there is neither an image nor a part of one.
unharmed() {
  in_state running
  target_goes_on
  no_image
  nothing_left
}

# --- whom

@test "what is no process number is refused by every verb" {
  for verb in suspend resume recover "dump --images-dir $image"; do
    for number in 0 "" 99999999999 4194305x 1.5; do
      # shellcheck disable=SC2086
      refused 2 usage $verb "$number"
    done
    # shellcheck disable=SC2086
    refused 2 usage $verb -5
    # shellcheck disable=SC2086
    refused 3 no-such-process $verb 2147483647
    # shellcheck disable=SC2086
    refused 3 no-such-process $verb no-such-job # the name of a job
  done
  no_image
}

@test "what is wrong with an option is said in the words of its help" {
  refused 2 usage dump 1 x --compress
  assert_contains "$err" "--compress needs a value: one of none, lz4, zstd"
  refused 2 usage run --every
  assert_contains "$err" "--every needs a value: TIME"
  refused 2 usage dump 1 "$image" -D "$image"
  assert_contains "$err" "there is more than one DIR: $image, $image"
  assert_contains "$err" "write \`stasis dump [OPTION]... PID DIR\`, with one process or job at a time"
  assert_contains "$err" "and the directory once, as DIR or by -D"
  refused 2 usage restore "$image" -D "$image"
  assert_contains "$err" "write \`stasis restore [OPTION]... DIR\`, the directory once, as DIR or by -D"
  # Also of several names.
  refused 2 usage dump one two three "$image"
  assert_contains "$err" "there are 2 arguments too many: three $image"
  assert_contains "$err" "one process or job at a time"
  refused 2 usage recover 1 --all
  assert_contains "$err" "PID and --all do not go together"
  refused 2 usage suspend 1 --timeout 1s --timeout 2s
  assert_contains "$err" "--timeout was given more than once"
  refused 2 usage ps --watch 50ms
  assert_contains "$err" "is no time from 100ms to 24h"
}

@test "a missing, unknown or doubled argument is refused with the way to the help" {
  refused 2 usage
  refused 2 usage frobnicate
  refused 2 usage suspend
  assert_contains "$err" "stasis suspend --help"
  refused 2 usage suspend 1 2
  refused 2 usage dump 1
  refused 2 usage restore
  refused 2 usage suspend 1 --timeout soon
  refused 2 usage suspend 1 --timeout -1
  # CLI11 reads them, and alone would take -18446744073709551615 for 1, and 010000000000 for 8^10.
  for time in 1.5s 1.5h 12d h s "" 1200h 1e3 10x 10M 4294967296 99999999999999999999 -1s -18446744073709551615 010000000000 "s 10"; do
    refused 2 usage suspend 1 --timeout "$time"
    assert_contains "$err" "'$time' is no duration; take a whole number with ms, s, m or h"
    assert_contains "$err" "49 days at most"
  done
  for time in 10s 2m 500ms 1h 0 0s 90 2500 010 "10 m" 1193h 4294967295 4294967295ms; do
    refused 3 no-such-process suspend 2147483647 --timeout "$time"
  done
  refused 2 usage dump 1 --images-dir "$image" --sync maybe
  for size in 4G 8G 99999999999999999999G; do
    refused 2 usage dump 1 --images-dir "$image" --ghost-limit "$size"
    assert_contains "$err" "$size"
  done
  refused 2 usage dump 1 --images-dir "$image" --ghost-limit 4G
  assert_contains "$err" "4294967295 bytes at most"
  for size in large -1 "" 1.5G 4T 1Kx ib M 1e3; do
    refused 2 usage dump 1 --images-dir "$image" --ghost-limit "$size"
    assert_contains "$err" "'$size' is no size that CRIU takes; take a whole number with K, M or G"
  done
  for size in 4095M 3g 1KiB 4294967295 0 64KB 010 "64 KB"; do
    refused 3 no-such-process dump 2147483647 --images-dir "$image" --ghost-limit "$size"
  done
  refused 2 usage dump 1 --images-dir "$image" --leave-running --leave-suspended
  refused 2 usage recover
  refused 2 usage recover 1 --all
  refused 2 usage dump 1 --images-dir ""
  refused 2 usage dump 1 --images-dir /
  refused 2 usage dump 1 --images-dir "$BATS_TEST_TMPDIR/.."
}

@test "help and version are words, too, and --version has a short form and JSON" {
  local words
  done_by --version
  local version=$out
  for words in version -V; do
    done_by "$words"
    assert_equal "$out" "$version"
  done
  done_by --version --json
  assert_equal "stasis $(json 'd["version"]')"$'\n' "$version"
  done_by dump --help
  local help=$out
  done_by help dump
  assert_equal "$out" "$help"
  done_by help
  assert_contains "$out" "Exit status"
}

@test "--help and --version say so and succeed" {
  done_by --version
  assert_contains "$out" "stasis "
  done_by --help
  assert_contains "$out" "Exit status"
  for verb in ps suspend resume dump restore recover; do
    done_by "$verb" --help
    assert_contains "$out" "--json"
  done
}

@test "a process that has gone is no such process" {
  start_target idle
  kill -KILL "$TARGET"
  wait_until 60 number_is_free
  for verb in suspend resume recover "dump --images-dir $image"; do
    # shellcheck disable=SC2086
    refused 3 no-such-process $verb "$TARGET"
  done
  no_image
}

@test "a zombie is told from a living process" {
  local file=$BATS_TEST_TMPDIR/zombie
  python3 -IS -c 'import os, sys, time
pid = os.fork()
if pid == 0: os._exit(0)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
open(sys.argv[1], "w").write(str(pid))
time.sleep(60)' "$file" 3>&- &
  at_end_kill $!
  wait_until 60 test -s "$file"
  refused 3 zombie suspend "$(<"$file")"
  refused 3 zombie dump "$(<"$file")" --images-dir "$image"
}

@test "a process without CUDA is refused, also with others below it" {
  sleep 60 3>&- &
  at_end_kill $!
  for verb in suspend resume recover "dump --images-dir $image"; do
    # shellcheck disable=SC2086
    refused 4 not-cuda $verb $!
  done
  setsid bash -c 'sleep 60 & sleep 60 & wait' 3>&- &
  echo $! >>"$targets"
  two_below() { (($(children_of $! | wc -l) == 2)); }
  wait_until 60 two_below
  refused 4 not-cuda suspend $!
  assert_contains "$err" "nor any of the 2 below it uses CUDA"
  nothing_left
}

@test "a thread id is refused, and its process is named" {
  start_target threads
  local tid
  tid=$(ls "/proc/$TARGET/task" | tail -n 1)
  for verb in suspend resume recover "dump --images-dir $image"; do
    # shellcheck disable=SC2086
    refused 2 thread-id $verb "$tid"
    assert_contains "$err" "process $TARGET"
  done
  unharmed
}

@test "another user's process is refused, not taken for one without CUDA" {
  need_root "another user"
  start_target idle
  chmod 711 "$BATS_TEST_TMPDIR"
  as_another_user() {
    STASIS_STATE_DIR=/tmp/stasis-unprivileged-${BATS_RUN_TMPDIR##*/} capture setpriv --reuid=65534 --regid=65534 --clear-groups \
      "$STASIS_BUILD/bin/stasis" "$@"
    rm -rf "/tmp/stasis-unprivileged-${BATS_RUN_TMPDIR##*/}"
  }
  as_another_user --version
  ((status == 0)) || skip "another user may not run the program: $err"
  for verb in suspend resume recover "dump --images-dir /tmp/stasis-unprivileged-image-${BATS_RUN_TMPDIR##*/}"; do
    # shellcheck disable=SC2086
    as_another_user $verb "$TARGET"
    assert_equal "$status" 5 "status of $verb: $err"
    assert_contains "$err" "[not-permitted]"
    assert_contains "$err" "run as root"
  done
  as_another_user ps
  assert_equal "$status" 0
  assert_contains "$err" "not permitted"
  unharmed
}

@test "a state directory that others may write to is refused" {
  start_target idle
  mkdir -m 777 "$BATS_TEST_TMPDIR/open"
  STASIS_STATE_DIR=$BATS_TEST_TMPDIR/open refused 5 not-permitted suspend "$TARGET"
  STASIS_STATE_DIR=/no/such/dir refused 1 io suspend "$TARGET"
  in_state running
}

# --- where

@test "a directory for the image that cannot be made is refused before the target is touched" {
  start_target idle
  refused 1 io dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/no/parent"
  echo >"$BATS_TEST_TMPDIR/file"
  refused 10 image-exists dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/file"
  refused 1 io dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/file/below"
  refused 1 io dump "$TARGET" --images-dir /proc/image
  unharmed
}

# --- CRIU

fake_criu() {
  printf '#!/bin/sh\n%s\n' "$1" >"$BATS_TEST_TMPDIR/criu"
  chmod +x "$BATS_TEST_TMPDIR/criu"
  export STASIS_CRIU=$BATS_TEST_TMPDIR/criu
}

@test "a CRIU that is missing, no program or no CRIU is refused before the target is touched" {
  start_target idle
  STASIS_CRIU=/no/such/criu refused 9 criu-missing dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "unset it; \`stasis-get-criu\` (in the source: tools/get-criu)"
  refused 9 criu-missing dump "$TARGET" --images-dir "$image" --criu "$BATS_TEST_TMPDIR"
  fake_criu 'echo "I am no criu" >&2; exit 1'
  refused 9 criu-missing dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "I am no criu"
  unharmed
}

@test "a CRIU that is too old is refused, with its version" {
  start_target idle
  # Its answer to the question for the version: 3.17.1, as protobuf.
  cat >"$BATS_TEST_TMPDIR/old.py" <<'END'
import socket
channel = socket.socket(fileno=3)
channel.recv(65536)
version = bytes([0x08, 3, 0x10, 17, 0x20, 1])
channel.send(bytes([0x08, 10, 0x10, 1, 0x52, len(version)]) + version)
END
  fake_criu "exec python3 $BATS_TEST_TMPDIR/old.py"
  refused 9 criu-too-old dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "3.17.1"
  unharmed
}

@test "an open TCP connection is refused, by us and by CRIU, and both say how to go on" {
  need_root "CRIU"
  start_target idle
  local script=$BATS_TEST_TMPDIR/tcp.py
  cat >"$script" <<'END'
import os, socket, subprocess, sys
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
os.set_inheritable(client.fileno(), True)
os.dup2(client.fileno(), 9, inheritable=True)
pid = subprocess.Popen(["setsid", "stasis-workload", "idle", "--status", sys.argv[1]],
                       pass_fds=[9], stdin=subprocess.DEVNULL,
                       stdout=open(sys.argv[1] + ".log", "w"), stderr=subprocess.STDOUT).pid
print(pid, flush=True)
import time
time.sleep(120)
END
  (exec_on_gpu python3 "$script" "$BATS_TEST_TMPDIR/tcp.status") </dev/null >"$BATS_TEST_TMPDIR/tcp.pid" 3>&- &
  at_end_kill $!
  TARGET_STATUS=$BATS_TEST_TMPDIR/tcp.status TARGET_LOG=$BATS_TEST_TMPDIR/tcp.status.log
  wait_until 60 target_is_up
  TARGET=$(<"$BATS_TEST_TMPDIR/tcp.pid")
  at_end_kill "$TARGET"
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "has open TCP connections: local port"
  refused 9 criu-failed dump "$TARGET" --images-dir "$image" --ignore-undumpable
  assert_contains "$err" "--tcp-established"
  assert_contains "$err" "$image.failed-dump.log"
  grep -q "Connected TCP socket" "$image.failed-dump.log"
  unharmed
}

@test "a unix socket to a process outside is refused, by the tool and by CRIU" {
  need_root "CRIU"
  python3 -IS -c 'import socket, sys, time
server = socket.socket(socket.AF_UNIX); server.bind(sys.argv[1]); server.listen()
a, _ = server.accept(); time.sleep(120)' "$BATS_TEST_TMPDIR/socket" 3>&- &
  at_end_kill $!
  wait_until 60 test -S "$BATS_TEST_TMPDIR/socket"
  with_descriptor 'import socket; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1] + "/socket")'
  for option in "" --ignore-undumpable; do
    refused 9 "$([[ $option ]] && echo criu-failed || echo undumpable)" dump "$TARGET" --images-dir "$image" $option
    assert_contains "$err" "--ext-unix-sk"
  done
  unharmed
}

@test "a file lock is refused, by us and by CRIU, and --file-locks lets it pass" {
  need_root "CRIU"
  with_descriptor 'import fcntl; s = open(sys.argv[1] + "/locked", "w"); fcntl.flock(s, fcntl.LOCK_EX)'
  for option in "" --ignore-undumpable; do
    refused 9 "$([[ $option ]] && echo criu-failed || echo undumpable)" dump "$TARGET" --images-dir "$image" $option
    assert_contains "$err" "--file-locks"
  done
  unharmed
  done_by dump "$TARGET" --images-dir "$image" --file-locks
  [[ ! -e $image.failed-dump.log ]]
}

@test "a restore that waits for a lock says for which, and who holds it" {
  need_root "CRIU"
  with_descriptor 'import fcntl; s = open(sys.argv[1] + "/locked", "w"); fcntl.flock(s, fcntl.LOCK_EX)'
  done_by dump "$TARGET" --images-dir "$image" --file-locks
  flock "$BATS_TEST_TMPDIR/locked" sleep 60 3>&- &
  local holder=$! tool
  at_end_kill "$holder"
  wait_until 30 has_child "$holder"
  stasis restore --images-dir "$image" --detach >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  tool=$!
  wait_until 30 grep -q "the restore waits for the lock of $BATS_TEST_TMPDIR/locked, which process $holder (flock) holds" \
    "$BATS_TEST_TMPDIR/said" || { cat "$BATS_TEST_TMPDIR/said" >&2; return 1; }
  pkill -P "$holder"
  wait "$tool"
  kill -0 "$TARGET"
}
has_child() { [[ -n $(children_of "$1") ]]; }

# with_descriptor PYTHON: starts a target that has the descriptor of `s` open.
with_descriptor() {
  TARGET_STATUS=$BATS_TEST_TMPDIR/fd.status TARGET_LOG=$BATS_TEST_TMPDIR/fd.log
  (exec_on_gpu setsid python3 -IS -c "import os, sys
$1
os.set_inheritable(s.fileno(), True)
os.execvp('stasis-workload', ['stasis-workload', 'idle', '--status', sys.argv[2]])" \
    "$BATS_TEST_TMPDIR" "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
}

@test "a process that a debugger traces is not dumped, and runs on" {
  need_root "CRIU"
  start_target idle
  python3 -IS - "$TARGET" >"$BATS_TEST_TMPDIR/traced" 2>&1 3>&- <<'END' &
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True)  # PTRACE_SEIZE
time.sleep(120)
END
  local tracer=$!
  at_end_kill "$tracer"
  wait_until 60 grep -q '^0' "$BATS_TEST_TMPDIR/traced"
  # Before anything is touched.
  STASIS_SIM_FAULTS="lock:error=999" refused 7 busy dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "traced by process $tracer"
  STASIS_SIM_FAULTS="lock:error=999" refused 7 busy suspend "$TARGET"
  capture stasis suspend "$TARGET" --json
  assert_equal "$(json '[(o["id"], o["pid"], o["override"]) for o in d["error"]["obstacles"]]')" "[('tracer', $TARGET, None)]"
  unharmed
  kill -KILL "$tracer"
}

@test "criu that is killed at any moment leaves the process running, or its whole image" {
  need_root "CRIU"
  local criu
  criu=$(real_criu)
  start_target memory --size 32M
  for at in 0.02 0.05 0.08 0.1 0.12 0.14 0.16 0.2 0.25; do
    fake_criu "if [ \"\$1\" = swrk ]; then ( sleep $at; kill -KILL \$\$ ) & fi; exec $criu \"\$@\""
    capture timeout 60 stasis dump "$TARGET" --images-dir "$image"
    export STASIS_CRIU=$criu
    if ((status == 0)); then
      wait_until 60 number_is_free
      restore_it
      target_goes_on
      rm -rf "$image"
    else
      assert_equal "$status" 9 "status at $at: $err"
      if ! lives; then
        # No tool can undo that: its registers were criu's. But it must be said.
        assert_contains "$err" "ended meanwhile: process $TARGET"
        nothing_left
        skip "criu was killed while its code ran in the process, and took it along"
      fi
      unharmed
    fi
    nothing_left
  done
  restored_verifies
}

# --- the disk

small_disk() {
  need_root "a small disk"
  disk=$BATS_TEST_TMPDIR/disk
  mkdir "$disk"
  mount -t tmpfs -o "size=$1" tmpfs "$disk" 2>/dev/null || skip "no tmpfs can be mounted here"
  echo "$disk" >>"$BATS_TEST_TMPDIR/mounts"
}

@test "a disk that is too small is refused before the target is touched, with the figures" {
  small_disk 16M
  start_target pinned --size 64M
  refused 11 no-space dump "$TARGET" --images-dir "$disk/image"
  assert_contains "$err" "needs about"
  in_state running
  target_goes_on
  target_verifies
  assert_equal "$(ls -A "$disk")" ""
}

@test "a disk that runs full during the dump leaves the target running, with the right data" {
  small_disk 48M
  # What is on the GPU is not foreseen in full: a context's share is left out of the estimate.
  start_target memory --size 64M
  refused 11 no-space dump "$TARGET" --images-dir "$disk/image"
  in_state running
  target_goes_on
  [[ ! -e $disk/image ]]
  assert_equal "$(find "$disk" -name '*partial*')" ""
  target_verifies
  nothing_left
}

@test "a state directory without room refuses before the target is touched" {
  small_disk 4K
  start_target idle
  mkdir -p "$disk/state"
  head -c 8K /dev/zero >"$disk/fill" 2>/dev/null || true
  chmod 700 "$disk/state"
  export STASIS_STATE_DIR=$disk/state
  refused 11 no-space suspend "$TARGET"
  assert_contains "$err" "free some space in $STASIS_STATE_DIR, or name another state directory by STASIS_STATE_DIR"
  capture stasis doctor "$TARGET" --no-trial
  assert_contains "$out" "the state directory $STASIS_STATE_DIR has no room"
  # Where nothing could be saved, --best-effort runs it all the same.
  refused 11 no-space run --images-dir "$image" -- true
  assert_contains "$err" "the job could not be saved here"
  stasis run --best-effort --images-dir "$image" -- true
  in_state running
  target_goes_on
}

# --- damaged images

# restorable: the image is whole again, and restored.
restorable() {
  restore_it
  target_goes_on
  restored_verifies
}

@test "any damage to an image is found before a process is made" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  local pages=$image/criu/pages-1.img keep=$BATS_TEST_TMPDIR/keep
  cp -a "$image" "$keep"

  refuse_image() {
    refused 10 "$1" restore --images-dir "$image" --detach
    wait_until 60 number_is_free
    rm -rf "$image"
    cp -a "$keep" "$image"
  }

  spoil_byte "$pages" 100000
  refuse_image image-corrupt
  assert_contains "$err" "criu/pages-1.img has the checksum"

  truncate -s -1 "$pages"
  refuse_image image-corrupt
  assert_contains "$err" "bytes, expected"

  rm "$pages"
  refuse_image image-corrupt

  echo >"$image/criu/extra.img"
  refuse_image image-corrupt
  assert_contains "$err" "criu/extra.img"

  mv "$pages" "$BATS_TEST_TMPDIR/pages"
  ln -s "$BATS_TEST_TMPDIR/pages" "$pages"
  refuse_image image-corrupt

  sed -i 's/"hostname": "/&x/' "$image/manifest.json"
  refuse_image image-corrupt

  truncate -s -2 "$image/manifest.json"
  refuse_image image-corrupt

  : >"$image/manifest.json"
  refuse_image image-corrupt

  rm "$image/manifest.json"
  refuse_image image-incomplete

  rm -r "$image/criu"
  refuse_image image-corrupt

  restorable
}

@test "what is no image is called so, and what a killed dump left is named" {
  refused 10 image-incomplete restore --images-dir "$image"
  mkdir "$image.partial-0123456789abcdef"
  refused 10 image-incomplete restore --images-dir "$image"
  assert_contains "$err" "$image.partial-0123456789abcdef"
  mkdir "$image"
  refused 10 image-incomplete restore --images-dir "$image"
  rmdir "$image"
  echo >"$image"
  refused 10 image-incomplete restore --images-dir "$image"
}

@test "a file that the job had open and that is not there any more is named" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  mv "$TARGET_STATUS" "$TARGET_STATUS.away"
  refused 9 criu-failed restore --images-dir "$image" --detach
  assert_contains "$err" "$TARGET_STATUS is not there"
  number_is_free
  nothing_left
  mv "$TARGET_STATUS.away" "$TARGET_STATUS"
  restorable
}

@test "a GPU restore that the driver refuses ends the tree and keeps the image" {
  need_root "CRIU"
  start_tree --size 4M
  dump_it
  STASIS_SIM_FAULTS="restore:error=999 pid=${CHILDREN[1]}" refused 8 driver-error \
    restore --images-dir "$image" --detach
  assert_contains "$err" "the image is intact"
  wait_until 60 number_is_free
  wait_until 60 number_is_free "${CHILDREN[0]}"
  gpu_is_free
  nothing_left
  restore_it
  target_goes_on
  restored_verifies 3
}

@test "a restore that the memory cgroup has no room for is refused before a process is made" {
  need_root "CRIU"
  start_target memory --size 128M
  done_by dump "$TARGET" --images-dir "$image"
  make_memory_cgroup $((100 << 20))
  # shellcheck disable=SC2016
  refused_by 11 out-of-host-memory bash -c 'echo $$ >"$1/cgroup.procs" && exec stasis restore --images-dir "$2" --detach' \
    bash "$CGROUP" "$image"
  assert_contains "$err" "the memory limit of $CGROUP (100 MiB) leaves"
  nothing_left
  done_by restore --images-dir "$image" --detach
  target_goes_on
}

@test "a process that dies while its GPU memory comes back ends the restore, and the image stays" {
  need_root "CRIU"
  start_target memory --size 8M
  dump_it
  STASIS_SIM_FAULTS="restore:die" refused 3 process-gone restore --images-dir "$image" --detach
  wait_until 60 number_is_free
  restorable
}

@test "managed memory is refused by a dump, and the process runs on" {
  start_target managed
  refused 8 not-supported dump "$TARGET" --images-dir "$image"
  unharmed
  target_verifies
}

@test "a target that ends during the dump is said to have ended" {
  need_root "CRIU"
  start_target memory --size 8M
  STASIS_SIM_FAULTS="checkpoint:delay=60s" stasis dump "$TARGET" --images-dir "$image" \
    >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  local tool=$! status=0
  wait_until 60 held_up
  kill -KILL "$TARGET"
  wait "$tool" || status=$?
  assert_equal "$status" 3
  grep -q "process $TARGET" "$BATS_TEST_TMPDIR/said"
  no_image
  nothing_left
}

# --- where

@test "an image whose processes have capabilities that its user cannot give is refused at once" {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
  refused_here() {
    capture setpriv --bounding-set=-net_raw "$@"
    assert_equal "$status" 5 "$err"
    assert_contains "$err" "CAP_NET_RAW"
  }
  refused_here stasis restore --images-dir "$image" --detach
  capture setpriv --bounding-set=-net_raw stasis inspect "$image" --json
  assert_contains "$out" "CAP_NET_RAW"
  restore_it
  target_goes_on
}

@test "where process numbers cannot be chosen, an image is refused, and told where they can" {
  need_root "CRIU"
  unshare --user --map-root-user true || skip "no user namespaces"
  start_target memory --size 4M
  dump_it
  capture unshare --user --map-root-user stasis restore --images-dir "$image" --detach
  assert_equal "$status" 5 "$err"
  assert_contains "$err" "unshare --user --map-root-user --pid"
  restore_it
  target_goes_on
}
