#!/usr/bin/env bats
# What stasis doctor says of filters of system calls and of Landlock, the target's and the tool's own.

load helpers
load stasis_lib
load doctor_lib

setup() { setup_doctor; }
teardown() { end_doctor; }

@test "a supervisor of system calls, to which a restore would not connect the program, is refused" {
  cat >"$BATS_TEST_TMPDIR/supervised.py" <<'END'
import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
# getpriority(2) is left to the supervisor.
program = b"".join(struct.pack("HBBI", *one) for one in
                   [(0x20, 0, 0, 0), (0x15, 0, 1, 140), (6, 0, 0, 0x7fc00000), (6, 0, 0, 0x7fff0000)])
text = ctypes.create_string_buffer(program)
filters = struct.pack("HxxxxxxQ", 4, ctypes.addressof(text))
libc.prctl(38, 1, 0, 0, 0)
listener = libc.syscall(317, 1, 8, filters)  # seccomp(2), SECCOMP_FILTER_FLAG_NEW_LISTENER
if listener < 0: open(sys.argv[1] + "/none", "w").close(); sys.exit()
if os.fork() == 0:
    # The supervisor's place: outside of the tree, and it never answers.
    os.setsid()
    if os.fork(): os._exit(0)
    open(sys.argv[1] + "/supervisor", "w").write(str(os.getpid()))
    for fd in 0, 1, 2: os.close(fd)
    time.sleep(300)
os.wait(); os.close(listener)
while not os.path.exists(sys.argv[1] + "/supervisor"): time.sleep(.01)
os.execvp("stasis-workload", ["stasis-workload", "memory", "--size", "1M", "--status", sys.argv[1] + "/status"])
END
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  (exec_on_gpu setsid python3 "$BATS_TEST_TMPDIR/supervised.py" "$BATS_TEST_TMPDIR") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 test -e "$BATS_TEST_TMPDIR/supervisor" -o -e "$BATS_TEST_TMPDIR/none"
  [[ ! -e $BATS_TEST_TMPDIR/none ]] || skip "this kernel gives no listener"
  at_end_kill "$(<"$BATS_TEST_TMPDIR/supervisor")"
  wait_until 60 target_is_up
  capture stasis dump "$TARGET" --images-dir "$image" --json
  assert_equal "$status $(json "d['error']['obstacles'][0]['id']")" "9 seccomp-listener"
  unharmed
  done_by dump "$TARGET" --images-dir "$image" --leave-running --ignore-undumpable
  assert_contains "$err" "the supervisor of its system calls"
  target_goes_on
}

# in_landlock WHO: a tree with a Python program that may make no FIFO any more, or a thread of it.
in_landlock() {
  start_with "def enter():
    rules = libc.syscall(444, (1 << 12).to_bytes(8, 'little'), 8, 0)
    libc.prctl(38, 1, 0, 0, 0)
    entered.append(rules >= 0 and libc.syscall(446, rules, 0) == 0)
    os.close(rules); done.set(); last()
import threading
entered, done, last = [], threading.Event(), lambda: None
if '$1' == 'thread':
    last = lambda: time.sleep(300)
    threading.Thread(target=enter, daemon=True).start(); done.wait()
else: enter()
print('in a domain:', entered[0], flush=True)"
  grep -q "in a domain: True" "$TARGET_LOG" || skip "this kernel has no Landlock"
  [[ ! -s /proc/self/attr/current ]] || grep -q unconfined /proc/self/attr/current || skip "a security module confines this"
}

@test "a sandbox by Landlock, of a process or of a thread, is not lost without a word" {
  local who
  for who in process thread; do
    rm -f "$BATS_TEST_TMPDIR/ready" "$BATS_TEST_TMPDIR/status"
    in_landlock "$who"
    refused 9 undumpable dump "$TARGET" --images-dir "$image"
    assert_contains "$err" "in a sandbox (a Landlock domain)"
    unharmed
    capture stasis dump "$TARGET" --images-dir "$image" --json
    assert_equal "$(json '[(o["id"], o["override"]) for o in d["error"]["obstacles"]]')" "[('landlock', '--ignore-obstacles')]"
    assert_equal "$(pgrep -x cat --parent "$TARGET" || true)" ""
    done_by dump "$TARGET" --images-dir "$image" --leave-running --ignore-undumpable --json
    assert_contains "$(json "'; '.join(d['lost'])")" "its sandbox (a Landlock domain)"
    rm -rf "$image"
    kill -9 -- "-$TARGET"
  done
}

@test "a program whose filter kills for what a dump asks of it is asked without the filter" {
  # Kills for keyctl (250) on x86-64, and lets all else pass.
  start_with 'import struct
rules = b"".join(struct.pack("HBBI", *rule) for rule in ((0x20, 0, 0, 0), (0x15, 0, 1, 250), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)))
code = ctypes.create_string_buffer(rules, len(rules))
class Program(ctypes.Structure): _fields_ = [("n", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
libc.prctl(38, 1, 0, 0, 0)
open(folder + "/number", "w").write(str(os.getpid()))
assert libc.syscall(317, 1, 0, ctypes.byref(Program(4, ctypes.addressof(code)))) == 0'
  local program
  program=$(<"$BATS_TEST_TMPDIR/number")
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  kill -0 "$program"
  target_goes_on
}

@test "red: everything, for a stasis under a seccomp filter; a filter of the target alone is fine" {
  local filter='import ctypes, struct, sys, os
libc = ctypes.CDLL(None, use_errno=True)
rule = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000), 8)  # all is allowed
class Program(ctypes.Structure): _fields_ = [("n", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
libc.prctl(38, 1, 0, 0, 0)
assert libc.syscall(317, 1, 0, ctypes.byref(Program(1, ctypes.addressof(rule)))) == 0'
  start_with "$filter"
  local under=(python3 -IS -c "$filter
os.execvp(sys.argv[1], sys.argv[1:])" stasis)
  capture "${under[@]}" doctor "$TARGET" --no-trial --json
  ((status == 1))
  assert_equal "$(lights seccomp)" red
  assert_equal "$(json "[f['light'] for f in d['machine'] if f['id'] == 'seccomp']")" "['red']"
  refused_by 9 undumpable "${under[@]}" dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "seccomp=unconfined"
  refused_by 9 criu-failed "${under[@]}" dump "$TARGET" --images-dir "$image" --ignore-undumpable
  unharmed
  done_by dump "$TARGET" --images-dir "$image" --leave-running
}
