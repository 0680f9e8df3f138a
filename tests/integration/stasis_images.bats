#!/usr/bin/env bats
# What restores and dumps do with images of any origin, with a CRIU that is stuck, and what they leave.

load helpers
load stasis_lib
load agent_lib

# nothing_in_state: no record, no file of a suspended process, no working directory.
nothing_in_state() {
  assert_equal "$(find "$STASIS_STATE_DIR" -mindepth 1 ! -name '*.lock')" "" "left in the state directory"
}

# small_dump: a small job, dumped to $image.
small_dump() {
  need_root "CRIU"
  start_target memory --size 4M
  dump_it
}

it_runs_again() {
  restore_it
  target_goes_on
}

# --- links and plugins in an image

@test "a restore follows no link of the image's log directory" {
  small_dump
  local victim=$BATS_TEST_TMPDIR/victim
  echo precious >"$victim"
  ln -sf "$victim" "$image/log/stats-restore"
  # The log's name holds the time: be there first, whatever it is.
  local second
  for second in {0..20}; do
    ln -sf "$victim" "$image/log/restore-$(date -u -d "+$second seconds" +%Y%m%dT%H%M%SZ).log"
  done
  it_runs_again
  assert_equal "$(<"$victim")" precious
  restored_verifies
  nothing_in_state
}

@test "a log directory that is a link is not followed, and the restore goes on without it" {
  small_dump
  mkdir "$BATS_TEST_TMPDIR/elsewhere"
  rm -r "$image/log"
  ln -s "$BATS_TEST_TMPDIR/elsewhere" "$image/log"
  it_runs_again
  assert_equal "$(ls -A "$BATS_TEST_TMPDIR/elsewhere")" ""
  restored_verifies
}

@test "CRIU loads no plugin from an image" {
  small_dump
  local mark=$BATS_TEST_TMPDIR/loaded
  command -v cc >/dev/null || skip "needs a compiler"
  echo '#include <fcntl.h>
__attribute__((constructor)) static void loaded(void) { open("'"$mark"'", O_CREAT | O_WRONLY, 0600); }' |
    cc -shared -fPIC -x c - -o "$image/log/evil.so"
  it_runs_again
  [[ ! -e $mark ]]
  restored_verifies
}

@test "an image on read-only media is restored, and the log of a failure is where the message says" {
  need_root "CRIU"
  local disk=$BATS_TEST_TMPDIR/disk log
  mkdir "$disk"
  mount -t tmpfs -o size=64M tmpfs "$disk" 2>/dev/null || skip "no tmpfs can be mounted here"
  echo "$disk" >>"$BATS_TEST_TMPDIR/mounts"
  start_target memory --size 4M
  image=$disk/image
  dump_it
  mount -o remount,ro "$disk"
  # What only CRIU finds.
  mount --bind "$TARGET_STATUS" "$TARGET_STATUS"
  echo "$TARGET_STATUS" >>"$BATS_TEST_TMPDIR/mounts"
  mount -o remount,bind,ro "$TARGET_STATUS"
  refused 9 criu-failed restore --images-dir "$image" --detach
  log=$(sed -n 's/.*the whole log is \([^ ;]*\).*/\1/p' <<<"$err")
  grep -q "on restore: Read-only file system" "$log"
  rm "$log"
  umount "$TARGET_STATUS"
  it_runs_again
  restored_verifies
  nothing_in_state
}

# --- --force

@test "--force replaces nothing but an image" {
  need_root "CRIU"
  start_target memory --size 4M
  local kind
  for kind in folders manifest damaged; do
    rm -rf "$image"
    mkdir -p "$image/log" "$image/criu/sub"
    echo precious >"$image/log/precious"
    echo precious >"$image/criu/sub/thesis.tex"
    case $kind in
      manifest) echo '{"name": "my web app"}' >"$image/manifest.json" ;;
      damaged) printf '{\n  "format": 1\n}\n' >"$image/manifest.json" ;;
    esac
    for force in "" --force; do
      # shellcheck disable=SC2086
      refused 10 image-exists dump "$TARGET" --images-dir "$image" --leave-running $force
      [[ $err != *--force* ]]
    done
    assert_equal "$(cat "$image/criu/sub/thesis.tex" "$image/log/precious")" $'precious\nprecious'
  done
  target_goes_on
  nothing_left
}

@test "a dump that is under way is not called killed" {
  need_root "CRIU"
  start_target memory --size 64M
  STASIS_SIM_FAULTS="checkpoint:delay=6s" stasis dump "$TARGET" --images-dir "$image" --leave-running \
    >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  local tool=$!
  stopped_at_work "$tool"
  refused 10 image-incomplete restore --images-dir "$image"
  assert_contains "$err" "a dump into it is under way"
  [[ $err != *"may be deleted"* ]]
  kill -CONT "$tool"
  wait "$tool"
  target_goes_on
}

# --- external mounts

# Not CRIU itself: restoring a mount namespace wants a root that not every container has. What CRIU is
# told is seen by one that writes it down.
@test "a mount from outside that was named at the dump is named the other way round at the restore" {
  need_root "CRIU"
  local there=$BATS_TEST_TMPDIR/there asked=$BATS_TEST_TMPDIR/asked
  mkdir -p "$BATS_TEST_TMPDIR/source" "$there"
  TARGET_STATUS=$BATS_TEST_TMPDIR/external.status TARGET_LOG=$BATS_TEST_TMPDIR/external.log
  (exec_on_gpu setsid unshare --mount bash -c 'mount --bind "$1" "$2" &&
    for fd in {3..30}; do eval "exec $fd>&-"; done; exec </dev/null >"$4" 2>&1; exec stasis-workload memory --size 4M --status "$3"' bash \
    "$BATS_TEST_TMPDIR/source" "$there" "$TARGET_STATUS" "$TARGET_LOG") </dev/null >/dev/null 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  dump_it --external "mnt[$there]:data" --external "mnt[]:m"
  cat >"$BATS_TEST_TMPDIR/scribe.py" <<'END'
import socket, sys
channel = socket.socket(fileno=3)
request = channel.recv(65536)
if request[:2] == bytes([0x08, 10]):  # the version: 4.2.1
    version = bytes([0x08, 4, 0x10, 2, 0x20, 1])
    channel.send(bytes([0x08, 10, 0x10, 1, 0x52, len(version)]) + version)
else:
    open(sys.argv[1], "wb").write(request)
END
  printf '#!/bin/sh\nexec python3 %s %s\n' "$BATS_TEST_TMPDIR/scribe.py" "$asked" >"$BATS_TEST_TMPDIR/scribe"
  chmod +x "$BATS_TEST_TMPDIR/scribe"
  refused 9 criu-failed restore --images-dir "$image" --criu "$BATS_TEST_TMPDIR/scribe"
  grep -aqF "mnt[data]:$there" "$asked"
  grep -aqF "mnt[]:m" "$asked"
  refused 9 criu-failed restore --images-dir "$image" --criu "$BATS_TEST_TMPDIR/scribe" --external "mnt[data]:/elsewhere"
  grep -aqF "mnt[data]:/elsewhere" "$asked"
  ! grep -aqF "$there" "$asked" || return 1
}

@test "the remedies for a restore name options that it has" {
  capture stasis restore --help
  local option
  for option in --external --tcp-close --ext-unix-sk --manage-cgroups --inherit-fd --device-map; do
    assert_contains "$out" "$option"
  done
}

# --- numbers

@test "a thread number that is taken is refused before anything is made" {
  need_root "CRIU"
  start_target threads
  local tid taken
  tid=$(find "/proc/$TARGET/task" -mindepth 1 -maxdepth 1 -printf '%f\n' | grep -vx "$TARGET" | sort -n | tail -n 1)
  dump_it
  out=$(<"$image/manifest.json")
  assert_equal "$(json "$tid in d['processes'][0]['threads']")" True
  assert_equal "$(json "$TARGET in d['processes'][0]['threads']")" False
  echo $((tid - 1)) >/proc/sys/kernel/ns_last_pid || skip "process numbers cannot be chosen here"
  sleep 100 3>&- &
  taken=$!
  at_end_kill "$taken"
  [[ $taken == "$tid" ]] || skip "the number went to another process"
  refused 11 pid-in-use restore --images-dir "$image" --detach
  assert_contains "$err" "$tid"
  has_obstacle process-number stasis restore --images-dir "$image" --detach
  assert_equal "$(find "$image/log" -name 'restore-*')" "" "CRIU was asked"
  kill "$taken"
  wait "$taken" 2>/dev/null || true
  it_runs_again
  restored_verifies
}

# --- a CRIU that is stuck

# stuck_criu: says its version, and then nothing any more.
stuck_criu() {
  printf '#!/bin/bash\n[[ -e %q ]] && exec sleep 1000\ntouch %q\nexec %q "$@"\n' \
    "$BATS_TEST_TMPDIR/asked" "$BATS_TEST_TMPDIR/asked" "$(real_criu)" >"$BATS_TEST_TMPDIR/stuck"
  chmod +x "$BATS_TEST_TMPDIR/stuck"
  rm -f "$BATS_TEST_TMPDIR/asked"
}

# ends_within SECONDS STATUS: the tool started last.
ends_within() {
  local tool=$! status=0 begin=$SECONDS
  wait_until "$1" tool_has_ended "$tool" || { echo "still there after $1 s" >&2; kill -KILL "$tool"; return 1; }
  wait "$tool" || status=$?
  assert_equal "$status" "$2" "status after $((SECONDS - begin)) s"
}
tool_has_ended() { ! lives "$1"; }
criu_is_asked() { [[ -e $BATS_TEST_TMPDIR/asked ]] && pgrep -P "$1" -x sleep >/dev/null; }

@test "a dump with a CRIU that is stuck ends soon after a signal, and the job runs on" {
  need_root "CRIU"
  start_target memory --size 4M
  stuck_criu
  stasis dump "$TARGET" --images-dir "$image" --criu "$BATS_TEST_TMPDIR/stuck" >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  wait_until 60 criu_is_asked $!
  kill -TERM $!
  ends_within 60 143
  in_state running
  target_goes_on
  target_verifies
  nothing_left
  no_image
}

@test "a restore with a CRIU that is stuck ends soon after a signal, or when its time is over" {
  small_dump
  stuck_criu
  stasis restore --images-dir "$image" --criu "$BATS_TEST_TMPDIR/stuck" >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  wait_until 60 criu_is_asked $!
  kill -TERM $!
  ends_within 60 143
  stuck_criu
  refused 7 timeout restore --images-dir "$image" --criu "$BATS_TEST_TMPDIR/stuck" --timeout 1000
  wait_until 60 number_is_free
  nothing_in_state
  it_runs_again
  restored_verifies
}

# bats test_tags=long
@test "a CRIU that is stopped in the middle of a restore leaves nothing when a signal comes" {
  need_root "CRIU"
  start_target memory --size 64M
  dump_it
  local at criu
  criu=$(real_criu)
  for at in 0.01 0.03 0.06 0.1; do
    printf '#!/bin/bash\nif [[ -e %q ]]; then (sleep %s; kill -STOP $$) & fi\ntouch %q\nexec %q "$@"\n' \
      "$BATS_TEST_TMPDIR/asked" "$at" "$BATS_TEST_TMPDIR/asked" "$criu" >"$BATS_TEST_TMPDIR/stuck"
    chmod +x "$BATS_TEST_TMPDIR/stuck"
    rm -f "$BATS_TEST_TMPDIR/asked"
    stasis restore --images-dir "$image" --detach --criu "$BATS_TEST_TMPDIR/stuck" >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
    local tool=$! status=0
    sleep 1
    kill -TERM "$tool" 2>/dev/null || true
    wait_until 60 tool_has_ended "$tool"
    wait "$tool" || status=$?
    if ((status == 0)); then
      kill -KILL "$TARGET"
      wait_until 60 number_is_free
    else
      assert_equal "$status" 143 "$(<"$BATS_TEST_TMPDIR/said")"
      wait_until 60 number_is_free
      nothing_in_state
    fi
  done
}

@test "an interrupted restore leaves nothing behind" {
  need_root "CRIU"
  start_target memory --size 64M
  dump_it
  STASIS_SIM_FAULTS="copy:rate=20M" stasis restore --images-dir "$image" --timeout 1000 --detach \
    >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- || true
  lives && kill -KILL "$TARGET"
  wait_until 60 number_is_free
  STASIS_SIM_FAULTS="restore:error=999" refused 8 driver-error restore --images-dir "$image" --detach
  wait_until 60 number_is_free
  nothing_in_state
}

# --- what is shown

# bats test_tags=long
@test "a restore shows that CRIU works, and how far its GPU memory is" {
  need_root "CRIU"
  start_target memory --size 64M
  dump_it
  stuck_criu
  TERM=xterm script -qec "stasis restore --images-dir $image --criu $BATS_TEST_TMPDIR/stuck --timeout 5000" \
    "$BATS_TEST_TMPDIR/shown" >/dev/null 2>&1 </dev/null 3>&- || true
  tr '\r' '\n' <"$BATS_TEST_TMPDIR/shown" | grep -qE "criu +\[[#.]+\] +[0-9]+%"
  STASIS_SIM_FAULTS="copy:rate=25M" TERM=xterm script -qec \
    "stasis restore --images-dir $image --detach" "$BATS_TEST_TMPDIR/shown" >/dev/null 2>&1 </dev/null 3>&-
  tr '\r' '\n' <"$BATS_TEST_TMPDIR/shown" | grep -qE "restore +\[[#.]+\] +[0-9]+%"
  target_goes_on
  restored_verifies
}

@test "a restore by the direct path shows each phase, and that it stops when it is asked to" {
  need_root "CRIU"
  start_agent memory --size 8M
  dump_it
  STASIS_SIM_FAULTS="context:delay=3s; transfer:delay=1s" TERM=xterm script -qec \
    "stasis restore --images-dir $image --detach" "$BATS_TEST_TMPDIR/shown" >/dev/null 2>&1 </dev/null 3>&-
  cat -v "$BATS_TEST_TMPDIR/shown"
  tr '\r' '\n' <"$BATS_TEST_TMPDIR/shown" | grep -qE "(repopulate|copy in|open|restore) +.*[0-9]+ s"
  target_goes_on
  STASIS_SIM_FAULTS="checkpoint:delay=5s" TERM=xterm script -qec \
    "stasis suspend $TARGET --path driver & sleep 1; kill -TERM \$!; wait" "$BATS_TEST_TMPDIR/stopped" >/dev/null 2>&1 </dev/null 3>&-
  cat -v "$BATS_TEST_TMPDIR/stopped"
  tr '\r' '\n' <"$BATS_TEST_TMPDIR/stopped" | grep -qE "(stopping|roll back) +[[0-9]"
  restored_verifies
}

# --- what CRIU says

@test "a CRIU without its capabilities is not permitted, and says what it lacks" {
  small_dump
  printf '#!/bin/bash\nexec setpriv --bounding-set -checkpoint_restore,-sys_admin %q "$@"\n' "$(real_criu)" \
    >"$BATS_TEST_TMPDIR/weak"
  chmod +x "$BATS_TEST_TMPDIR/weak"
  refused 5 not-permitted restore --images-dir "$image" --detach --criu "$BATS_TEST_TMPDIR/weak"
  assert_contains "$err" "CAP_CHECKPOINT_RESTORE"
  wait_until 60 number_is_free
}

@test "too few descriptors for CRIU are called so" {
  small_dump
  printf '#!/bin/bash\nulimit -n 8; exec %q "$@"\n' "$(real_criu)" >"$BATS_TEST_TMPDIR/few"
  chmod +x "$BATS_TEST_TMPDIR/few"
  refused 9 criu-failed restore --images-dir "$image" --detach --criu "$BATS_TEST_TMPDIR/few"
  assert_contains "$err" "ulimit -n"
  wait_until 60 number_is_free
}

@test "a job that listens on a TCP port is restored at once, though connections to it were just closed" {
  need_root "CRIU"
  local port
  start_listening
  dump_it
  grep -q "\"tcp_ports\": *\[ *$port *\]" <(tr -d '\n' <"$image/manifest.json")
  closed_just_now
  restore_it
  it_listens
  target_goes_on
}

@test "a job whose side of a connection is closed, and the other one's not, is restored at once" {
  need_root "CRIU"
  local port
  HALF=1 start_listening
  dump_it --tcp-established
  restore_it
  it_listens
  target_goes_on
}
