#!/usr/bin/env bats
# stasis run --images-dir: a job that is saved, ended, killed, and goes on from there, with the real CRIU
# on the simulated driver. Long because each test begins, saves and continues the same kind of job.

load helpers
load stasis_lib

load stasis_jobs_lib

setup() { setup_job; }
teardown() { end_stasis; }

@test "saved by USR1, killed with all it has, started again: it goes on from the image" {
  start_run
  job_is_up
  wait_until 60 target_is_past 10
  local before
  before=$(target_round)
  saves 000001
  grep -q 'standing still for' "$RUN_LOG"
  target_goes_on
  kill -KILL "$RUN"
  wait_until 60 job_is_gone
  ends_with 137
  wait_until 60 gpu_is_free
  start_run
  told "goes on from $images/000001 "
  # It verifies each round with what is in its memory, and would end at the first that is missing or
  # comes twice. The rounds since the image are done again, those before it are not.
  target_goes_on
  (($(target_round) >= before))
  kill -INT "$RUN" # not a signal to save: passed on, and the program has no handler
  ends_with 130
  job_is_gone
  nothing_left
}

@test "TERM saves it and ends it with 75; the same command line goes on; its own end is passed on" {
  start_run --exit-code 99
  job_is_up
  kill -TERM "$RUN"
  ends_with 99
  told "saved to $images/000001 "
  job_is_gone
  gpu_is_free
  local saved
  saved=$(target_round)
  start_run --on-signal USR1,USR2
  told "goes on from $images/000001 "
  assert_equal "$(ls "$images")" $'000001\nlock'
  wait_until 60 target_is_past "$saved"
  # TERM is not taken here: the workload ends its round, and says that all were right.
  kill -TERM "$RUN"
  ends_with 0
  grep -q "^verified" "$TARGET_LOG"
  (($(target_round) > saved))
}

# With no option for it.
@test "a job that root starts, and its restored job, find no io_uring, and are saved" {
  local seen=$BATS_TEST_TMPDIR/seen
  job=(sh -c 'grep Seccomp: /proc/self/status >"$0"; exec "$@"' "$seen" "${job[@]}")
  start_run
  job_is_up
  assert_equal "$(<"$seen")" $'Seccomp:\t2'
  saves 000001
  target_goes_on
  kill -KILL "$RUN"
  wait_until 60 job_is_gone
  ends_with 137
  wait_until 60 gpu_is_free
  start_run
  told "goes on from $images/000001 "
  target_goes_on
  grep -qx $'Seccomp:\t2' "/proc/$(job_pid)/status"
  kill -INT "$RUN"
  ends_with 130
}

@test "a job that holds a lock of a file is saved, and holds it again" {
  local locked=$BATS_TEST_TMPDIR/locked
  job=(sh -c 'exec 9>"$0" && flock 9 && exec "$@"' "$locked" "${job[@]}")
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  flock --nonblock "$locked" true
  start_run
  told "goes on from $images/000001 "
  target_goes_on
  refused_lock() { ! flock --nonblock "$locked" true; }
  refused_lock
  kill -INT "$RUN"
  ends_with 130
}

# A server outside of the job, to which the job has a connection; its port in `port`.
start_connected() {
  python3 - "$BATS_TEST_TMPDIR/port" >/dev/null 2>&1 3>&- <<'END' &
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
open(sys.argv[1], "w").write(str(server.getsockname()[1]))
kept = []
while True: kept.append(server.accept())
END
  at_end_kill $!
  wait_until 30 test -s "$BATS_TEST_TMPDIR/port"
  port=$(<"$BATS_TEST_TMPDIR/port")
  job=(bash -c 'exec 9<>"/dev/tcp/127.0.0.1/$0" && exec "$@"' "$port" "${job[@]}")
}
# How many connections to it are established, by the end that the job has.
connections() { awk -v port=":$(printf %04X "$port")" '$3 ~ port "$" && $4 == "01"' /proc/net/tcp | wc -l; }

@test "a job that is connected with a process outside is not saved, and hears of --tcp-close" {
  start_connected
  start_run
  job_is_up
  kill -USR1 "$RUN"
  told "open TCP connections"
  told "stasis run --tcp-close"
  target_goes_on
  assert_equal "$(connections)" 1
  kill -INT "$RUN"
  ends_with 130
}

@test "with --tcp-close such a job is saved, and its connection is closed when it goes on" {
  start_connected
  start_run --tcp-close
  job_is_up
  saves 000001
  target_goes_on
  assert_equal "$(connections)" 1 "connections of a job that goes on"
  kill -TERM "$RUN"
  ends_with 75
  told "its connections are closed at a restore, as asked (--tcp-close): "
  start_run --tcp-close
  told "goes on from $images/000002 "
  target_goes_on
  assert_equal "$(connections)" 0
  kill -INT "$RUN"
  ends_with 130
  refused 2 usage run --images-dir "$images" --tcp-close --group "$BATS_TEST_TMPDIR/group" --parts 2 --part a -- true
}

@test "an image that another user has put there does not run as this one" {
  start_run
  job_is_up
  saves 000001
  kill -KILL "$RUN"
  wait_until 60 job_is_gone
  ends_with 137
  chown -R 65433 "$images/000001"
  refused_by 5 not-permitted stasis run --images-dir "$images" -- "${job[@]}"
  assert_contains "$err" "belongs to user 65433, and what it holds would run as user 0"
  # The user who has called sudo has named the directory.
  SUDO_UID=65433 start_run
  told "goes on from $images/000001 "
  target_goes_on
  kill -INT "$RUN"
  ends_with 130
}

# Its owner gives the job's folder another name, and puts a link to another job's in its place.
@test "a save into a folder that another user has put in the place of the job's is refused" {
  local theirs=$BATS_TEST_TMPDIR/theirs other=$BATS_TEST_TMPDIR/other
  mkdir "$theirs" "$other"
  chmod 755 "$BATS_TEST_TMPDIR" "$theirs"
  chown 65433 "$theirs"
  images=$theirs/job
  start_run --keep 1
  told "another user can rename or replace $images, or what leads to it"
  told "$theirs belongs to user 65433"
  job_is_up
  saves 000001
  mv "$images" "$images.old"
  ln -s "$other" "$images"
  kill -USR1 "$RUN"
  told "$images is not the folder any more that it was when the job began"
  target_goes_on
  assert_equal "$(ls "$other")" "" "nothing lands in the other job's folder"
  # None at all: the message names what can be done for a job that runs.
  rm "$images"
  kill -USR1 "$RUN"
  told "what to do: put the job's folder back, where it may be written; or save the job elsewhere, by its name, with"
  target_goes_on
  # While a save is under way.
  mv "$images.old" "$images"
  : >"$RUN_LOG"
  held_save USR1 2s
  mv "$images" "$images.old"
  ln -s "$other" "$images"
  told "is not the folder any more that it was when the job began"
  target_goes_on
  assert_equal "$(ls "$other")" ""
  rm "$images"
  mv "$images.old" "$images"
  saves 000003 # the log of the second is there
  kill -INT "$RUN"
  ends_with 130
}

@test "--io-uring: a job may use it" {
  job=(sh -c 'exit "$(sed -n "s/^Seccomp:\t//p" /proc/self/status)"')
  start_run --io-uring
  ends_with 0
  start_run --no-io-uring
  ends_with 2
  refused_by 2 usage stasis run --io-uring --no-io-uring --images-dir "$images" -- true
}

@test "--no-io-uring in a user namespace is refused for a job, and not for a program that is only started" {
  local own=(unshare --user --map-root-user)
  "${own[@]}" true || skip "the kernel makes no user namespaces"
  refused_by 8 not-supported "${own[@]}" stasis run --no-io-uring --images-dir "$images" -- true
  assert_contains "$err" "or run as root"
  "${own[@]}" stasis run --no-io-uring -- true
}

# In a user namespace, without a capability that root itself may lack and could not give back.
by_user() {
  by=(unshare --user --map-root-user setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource)
  "${by[@]}" true || skip "the kernel makes no user namespaces"
}
# counter_goes_on SIZE: started by the user, ended, restored by the user, and then by root.
counter_goes_on() {
  local count=100
  by_user
  images=$BATS_TEST_TMPDIR/$1
  job=(stasis-counter --gpu-memory "$1")
  start_run
  wait_until 60 grep -q '^listening on' "$TARGET_LOG"
  port=$(sed -n 's/^listening on 127.0.0.1://p' "$TARGET_LOG")
  counts
  kill -TERM "$RUN"
  ends_with 75
  for by in "${by[*]}" ""; do
    # shellcheck disable=SC2206 # words
    by=($by)
    start_run
    told "goes on from $images/00000$((count - 100)) "
    counts
    kill -TERM "$RUN"
    ends_with 75
  done
}
counts() { assert_equal "$(timeout 60 stasis-counter --ask "$port")" $((++count)); }

@test "a job in a user namespace goes on, and again when root takes it over" {
  counter_goes_on 1M
  counter_goes_on 64M
}

# bats test_tags=long
@test "a job in a user namespace goes on with as much GPU memory as it likes" {
  counter_goes_on 4M
  counter_goes_on 32M
  counter_goes_on 1G
}

@test "a damaged image: the one before is taken, saying so; no sound one: refused" {
  start_run
  job_is_up
  saves 000001
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
  python3 -IS - "$images/000002"/criu/pages-*.img <<'END'
import sys
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
END
  start_run
  told "the image $images/000002 is damaged"
  told "goes on from $images/000001 "
  target_goes_on
  saves 000003
  kill -TERM "$RUN"
  ends_with 75
  # The damaged one does not count among those that are kept, and is older than they are by now.
  assert_equal "$(ls "$images")" $'000003\n000004\nlock'
  rm "$images"/*/criu/pages-*.img
  start_run
  ends_with 10
  grep -q "none of the images in $images is sound" "$RUN_LOG"
}

@test "a manifest that cannot be read, or was not copied: damage, and no reason to start over" {
  start_run
  job_is_up
  saves 000001
  kill -TERM "$RUN"
  ends_with 75
  # As from a bad sector: at address 0 of a process there is nothing, and the kernel says EIO.
  mount --bind "/proc/$$/mem" "$images/000002/manifest.json"
  echo "$images/000002/manifest.json" >"$BATS_TEST_TMPDIR/mounts"
  start_run
  told "the image $images/000002 is damaged"
  grep -q "Input/output error" "$RUN_LOG"
  told "goes on from $images/000001 "
  kill -KILL "$RUN"
  ends_with 137
  umount "$images/000002/manifest.json"
  rm "$images/000002/manifest.json"
  start_run
  told "the image $images/000002 is damaged"
  told "goes on from $images/000001 "
  kill -KILL "$RUN"
  ends_with 137
  rm "$images/000001/manifest.json"
  start_run
  ends_with 10
  grep -q "none of the images in $images is sound" "$RUN_LOG"
}

@test "what is left of an old image and cannot be removed is told, and does not hinder the next save" {
  # As on NFS, where a process still has a file of it open.
  local busy=$images/000001.removing/busy
  mkdir -p "$busy" "$BATS_TEST_TMPDIR/mounted"
  mount --bind "$BATS_TEST_TMPDIR/mounted" "$busy"
  echo "$busy" >"$BATS_TEST_TMPDIR/mounts"
  start_run --keep 1
  job_is_up
  grep -q "had left stays: cannot remove $busy" "$RUN_LOG"
  saves 000002
  saves 000003
  told "an old image cannot be removed: cannot remove $busy"
  assert_equal "$(ls "$images")" $'000001.removing\n000003\nlock'
  umount "$busy"
  kill -TERM "$RUN"
  ends_with 75
  assert_equal "$(ls "$images")" $'000004\nlock'
}

@test "what another user gives the name of a half image in a folder of his is not removed" {
  need_root "another user's folder"
  local folder=$images/000001.partial-0123456789abcdef
  mkdir -p "$folder/disk" "$BATS_TEST_TMPDIR/disk"
  echo stays >"$BATS_TEST_TMPDIR/disk/important"
  mount --bind "$BATS_TEST_TMPDIR/disk" "$folder/disk"
  echo "$folder/disk" >"$BATS_TEST_TMPDIR/mounts"
  mkdir -m 700 "$images/000002.partial-0123456789abcdef"
  echo stays >"$images/000002.partial-0123456789abcdef/letters"
  chown 65434:65434 "$images" "$folder"
  start_run
  job_is_up
  grep -q "had left stays: cannot remove $folder: it holds" "$RUN_LOG"
  grep -q 'it holds "letters", which is no part of an image' "$RUN_LOG"
  [ -e "$BATS_TEST_TMPDIR/disk/important" ]
  [ -e "$images/000002.partial-0123456789abcdef/letters" ]
  # Nor by a mount within what images have.
  umount "$folder/disk"
  mv "$folder/disk" "$folder/gpu"
  mount --bind "$BATS_TEST_TMPDIR/disk" "$folder/gpu"
  echo "$folder/gpu" >"$BATS_TEST_TMPDIR/mounts"
  kill -TERM "$RUN"
  ends_with 75
  start_run
  told "cannot remove $folder/gpu: it is a mount point"
  [ -e "$BATS_TEST_TMPDIR/disk/important" ]
  kill -TERM "$RUN"
  ends_with 75
  umount "$folder/gpu"
}

@test "a restore of a job's folder goes on with the job, as its line does" {
  start_run --name trainer
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  before=$(target_round)
  # What a restore of an image alone has, a job has not.
  refused 2 usage restore "$images" --verify first
  assert_contains "$err" "--verify cannot be used with the directory of a job"
  refused 2 usage restore "$images" --timeout 1m
  RUN_LOG=$BATS_TEST_TMPDIR/restore.log
  # What a file says of all restores does not stand in the way.
  printf '[restore]\nverify = first\n' >"$BATS_TEST_TMPDIR/config"
  export STASIS_CONFIG=$BATS_TEST_TMPDIR/config
  exec_on_gpu stasis restore "$images" --device-map auto --trace "$BATS_TEST_TMPDIR/trace" \
    </dev/null >"$TARGET_LOG" 2>"$RUN_LOG" 3>&- &
  RUN=$!
  at_end_kill "$RUN"
  told "the job goes on as by \`stasis run --images-dir $images --name trainer -- stasis-workload memory"
  told "goes on from $images/000001"
  target_goes_on
  (($(target_round) > before))
  stasis suspend trainer
  stasis resume trainer
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
  assert_equal "$(ls "$images")" $'000001\n000002\nlock'
  [ -s "$BATS_TEST_TMPDIR/trace" ]
  # The command of another user's image is not run, nor that of an image which goes in this moment.
  cp -r "$images" "$BATS_TEST_TMPDIR/theirs"
  chown -R 65433 "$BATS_TEST_TMPDIR/theirs"
  refused 5 not-permitted restore "$BATS_TEST_TMPDIR/theirs"
  mkdir "$BATS_TEST_TMPDIR/empty"
  refused 10 image-incomplete run --go-on-only --images-dir "$BATS_TEST_TMPDIR/empty" -- touch "$BATS_TEST_TMPDIR/started"
  [[ ! -e $BATS_TEST_TMPDIR/started ]]
  # Another does not go on with it meanwhile; a newest image that is damaged is not taken.
  printf x >>"$images/000002/manifest.json"
  start_run --name trainer
  told "goes on from $images/000001"
  refused 7 busy restore "$images"
}

@test "a restore of a job's image, or of its folder with --detach, is told the line that goes on from it" {
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  local given
  for given in "$images" "$images/000001"; do
    refused 2 usage restore "$given" --detach
    assert_contains "$err" "start \`stasis run --images-dir $images -- stasis-workload memory"
  done
  assert_contains "$err" "\`stasis restore $images\`"
  cp -r "$images/000001" "$BATS_TEST_TMPDIR/elsewhere"
  refused 2 usage restore "$BATS_TEST_TMPDIR/elsewhere" --detach
  assert_contains "$err" "let it be DIR/000001"
  # With the name that it was given, which its images keep.
  start_run --name trainer
  told "goes on from"
  kill -TERM "$RUN"
  ends_with 75
  refused 2 usage restore "$images" --detach
  assert_contains "$err" "start \`stasis run --images-dir $images --name trainer -- stasis-workload memory"
  assert_contains "$err" ", with --every and the like as before: the job goes on there"
  done_by inspect "$images" --json
  assert_equal "$(json 'd["name"]')" trainer
}

@test "of host memory that hardly changes the next save writes little, and the job goes on from it" {
  job=(python3 -S "$BATS_TEST_DIRNAME/host_heap.py" "$TARGET_STATUS" 96)
  start_run
  job_is_up
  saves 000001
  saves 000002
  # What both have is the first one's.
  (($(du -s --block-size=1 "$images/000001" "$images/000002" | sed -n '2s/[[:space:]].*//p') < 48 << 20))
  done_by verify "$images/000002" --json
  (($(json 'd["host_content"]["bytes"]') >= 76 << 20))
  kill -KILL "$RUN"
  wait_until 60 gpu_is_free
  ends_with 137
  start_run
  told "goes on from $images/000002 "
  target_goes_on
  kill -KILL "$RUN"
  ends_with 137
}

@test "--every saves it again and again, and --keep says how many images stay" {
  start_run --every 700ms --keep 2
  told "removed 000001"
  told "removed 000002"
  wait_until 60 two_stay # for a moment the next one may be there too
  target_goes_on
  # A save that was cut short leaves nothing that hinders.
  wait_until 60 eval 'compgen -G "$images/*.partial-*" >/dev/null'
  kill -KILL "$RUN"
  wait_until 60 job_is_gone
  ends_with 137
  start_run --every 10m
  told "goes on from $images/"
  target_goes_on
  assert_equal "$(find "$images" -maxdepth 1 -name '*partial*')" ""
  kill -TERM "$RUN"
  ends_with 75
}

@test "a number without a unit is seconds for --every" {
  local before=${EPOCHREALTIME/./} took
  start_run --every 1
  told "saved to $images/000001 "
  took=$((${EPOCHREALTIME/./} - before))
  # Milliseconds would be sooner, and minutes later.
  ((took >= 1000000 && took < 30000000)) || { echo "the first save was there after $took us" >&2; return 1; }
  kill -TERM "$RUN"
  ends_with 75
}

@test "ps calls no job that is being saved one that waits for its memory" {
  job=(stasis-workload memory --size 64M --pause-ms 20 --status "$TARGET_STATUS")
  start_run --every 300ms --keep 2
  job_is_up
  local looks saves=0
  for ((looks = 0; looks < 60; ++looks)); do
    done_by ps
    [[ $out != *"stasis dump"* ]] || ((++saves))
    [[ $out != *waiting* && $err != *"stands still"* ]] || { printf '%s\n' "$out" "$err" >&2; return 1; }
    ((looks % 10)) || target_goes_on
  done
  told "saved to $images/000003 "
  ((saves > 0)) # it says what goes on with the job, though another namespace's records have that
  kill -TERM "$RUN"
  ends_with 75
}

two_stay() { (($(ls "$images" | grep -cE '^[0-9]+$') == 2)); }

@test "its workers copy through as much memory as --ring says" {
  job=(stasis-workload memory --size 16M --pause-ms 20 --status "$TARGET_STATUS")
  start_run --ring 8M
  job_is_up
  held_save USR1 60s
  assert_equal "$(ring_of "$(pgrep -ox stasis-worker)")" $((8 << 20))
  kill -KILL "$RUN"
  ends_with 137
}

@test "with --trace there is what the newest save or restore did, whole" {
  local trace=$BATS_TEST_TMPDIR/trace
  cd "$BATS_TEST_TMPDIR"
  start_run --trace trace
  job_is_up
  [[ ! -e $trace ]]
  saves 000001
  trace "$trace" phase:criu driver:checkpoint phase:checksums
  echo old >"$trace"
  exec {old}<"$trace"
  echo precious >precious
  ln -s precious "$trace.new"
  saves 000002
  trace "$trace" phase:criu driver:checkpoint
  assert_equal "$(cat <&"$old")" old "it is replaced, and not written over"
  assert_equal "$(<precious)" precious "nor is what a link led to"
  kill -TERM "$RUN"
  ends_with 75
  start_run --trace "$trace"
  told "goes on from $images/000003 "
  trace "$trace" driver:restore
  grep -q 'stasis run: restore' "$trace"
  assert_equal "$(compgen -G "$trace*")" "$trace"
  kill -INT "$RUN"
  ends_with 130
}

@test "a trace of a job that cannot be written is told, and the save stands" {
  start_run --trace "$BATS_TEST_TMPDIR/none/trace"
  job_is_up
  saves 000001
  told "no trace: "
  kill -INT "$RUN"
  ends_with 130
  refused 2 usage run --images-dir "$images" --trace /dev/shm/trace -- true
  assert_contains "$err" "/dev/shm/trace cannot be written: the job has a /dev/shm of its own"
  cd /dev/shm
  refused 2 usage run --images-dir "$images" --trace trace -- true
  assert_contains "$err" "/dev/shm/trace cannot be written: the job has a /dev/shm of its own"
  cd - >/dev/null
  refused 2 usage run --trace "$BATS_TEST_TMPDIR/trace" -- true
}

@test "a second one on the same directory is refused, and so is another command" {
  start_run
  job_is_up
  capture timeout 60 stasis run --images-dir "$images" -- "${job[@]}"
  assert_equal "$status" 7
  assert_contains "$err" "process $RUN on"
  kill -TERM "$RUN"
  ends_with 75
  job+=(--rounds 1000000)
  start_run
  ends_with 2
  grep -q "is an image of another command: stasis-workload memory" "$RUN_LOG"
  assert_equal "$(ls "$images")" $'000001\nlock'
}

@test "with --once a job that has ended with 0 is not run again under the same word" {
  local run=(timeout 60 stasis run --images-dir "$images")
  local say=(sh -c 'echo ran; exit $(cat '"$BATS_TEST_TMPDIR/status"')')
  # runs_to WORD STATUS OUTPUT
  runs_to() {
    capture "${run[@]}" --once "$1" -- "${say[@]}"
    assert_equal "$status $out" "$2 $3"
  }
  echo 3 >"$BATS_TEST_TMPDIR/status"
  runs_to 7.0 3 $'ran\n'
  runs_to 7.0 3 $'ran\n'
  echo 0 >"$BATS_TEST_TMPDIR/status"
  runs_to 7.0 0 $'ran\n'
  runs_to 7.0 0 ""
  assert_contains "$err" "the job has ended with 0 before ($images/done-7.0), and is not run again"
  runs_to 7.1 0 $'ran\n'
  say+=(more)
  runs_to 7.0 0 $'ran\n'
  capture "${run[@]}" -- "${say[@]}"
  assert_equal "$out" $'ran\n'
  refused 2 usage run --images-dir "$images" --once a/b -- true
}

@test "a restored job that dies of a signal at once: said to be no end of its own, and the images stay" {
  job=(sh -c "while [ ! -e $BATS_TEST_TMPDIR/go ]; do sleep 0.05; done; kill -KILL \$\$")
  start_run --once 1
  wait_until 60 eval '[[ -n $(children_of "$(job_pid)") ]]'
  kill -TERM "$RUN"
  ends_with 75
  touch "$BATS_TEST_TMPDIR/go"
  start_run --once 1
  ends_with 137
  told "the job was ended by SIGKILL within"
  assert_equal "$(ls "$images")" $'000001\nlock'
}

@test "a command line that no image can hold is refused, also one that is so only in UTF-8" {
  # shellcheck disable=SC2046 # a word each
  refused 2 usage run --images-dir "$images" -- true $(seq 4096)
  refused 2 usage run --images-dir "$images" -- true "$(head -c 30000 /dev/zero | tr '\0' '\377')"
  capture stasis run --images-dir "$images" -- true "$(head -c 60000 /dev/zero | tr '\0' x)"
  assert_equal "$status" 0
}

@test "an empty name for the directory is refused, as of a variable that is not set" {
  refused 2 usage run --images-dir "" -- touch "$BATS_TEST_TMPDIR/started"
  assert_contains "$err" "is empty"
  refused 2 usage run --images-dir= --every 10m -- touch "$BATS_TEST_TMPDIR/started"
  [[ ! -e $BATS_TEST_TMPDIR/started ]]
}

@test "where it cannot be saved it is refused; with --best-effort it runs unsaved, and not if there is an image" {
  local weak=(setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin) run=(stasis run --images-dir "$images")
  local no_criu=(env STASIS_CRIU="$BATS_TEST_TMPDIR/no-criu") no_state=(env STASIS_STATE_DIR=/proc/none)
  local in_a_job=(stasis run --no-io-uring --)
  local program=(touch "$BATS_TEST_TMPDIR/started")
  refused_by 5 not-permitted "${weak[@]}" "${run[@]}" -- "${program[@]}"
  assert_contains "$err" "--best-effort"
  refused_by 9 criu-missing "${no_criu[@]}" "${run[@]}" -- "${program[@]}"
  refused_by 1 io "${no_state[@]}" "${run[@]}" -- "${program[@]}"
  refused_by 9 undumpable "${in_a_job[@]}" "${run[@]}" -- "${program[@]}"
  # A directory for the images that is none, or may not be written.
  local no_dir=$BATS_TEST_TMPDIR/no-directory
  : >"$no_dir"
  refused 1 io run --images-dir "$no_dir" -- "${program[@]}"
  local no_writing=$BATS_TEST_TMPDIR/no-writing
  mkdir "$no_writing"
  mount -t tmpfs -o ro read-only "$no_writing"
  echo "$no_writing" >>"$BATS_TEST_TMPDIR/mounts"
  refused 1 io run --images-dir "$no_writing" -- "${program[@]}"
  # It could be saved, and the image not be restored: in a container that was started with --cap-add
  # SYS_ADMIN, two of these are missing.
  local right
  for right in net_admin sys_chroot setpcap sys_time; do
    refused_by 5 not-permitted setpriv --bounding-set=-$right --inh-caps=-$right "${run[@]}" -- "${program[@]}"
    assert_contains "$err" "CAP_${right^^}"
  done
  [[ ! -e $BATS_TEST_TMPDIR/started && ! -e $images ]]
  # Nor is anything left in a directory that was there.
  mkdir "$images"
  refused_by 9 criu-missing "${no_criu[@]}" "${run[@]}" -- "${program[@]}"
  rmdir "$images"
  local lack
  for lack in weak no_criu no_state in_a_job; do
    local -n without=$lack
    # The signals that ask for a save do what they do to any program.
    capture timeout 60 "${without[@]}" "${run[@]}" --best-effort -- sh -c 'kill -TERM $$'
    assert_equal "$status" 143 "$lack: $err"
    assert_contains "$err" "nothing will be saved"
  done
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  refused_by 5 not-permitted "${weak[@]}" "${run[@]}" --best-effort -- "${job[@]}"
  refused_by 9 criu-missing "${no_criu[@]}" "${run[@]}" --best-effort -- "${job[@]}"
  # Before criu, which waits until the deadline for a right to drop capabilities.
  refused_by 5 not-permitted setpriv --bounding-set=-setpcap --inh-caps=-setpcap "${run[@]}" -- "${job[@]}"
}

@test "who connects to a socket of a user's job sees that user after the restore, not root" {
  by=(python3 -S "$BATS_TEST_DIRNAME/peer_credentials.py" namespace)
  job=(python3 -S "$BATS_TEST_DIRNAME/peer_credentials.py" serve "$TARGET_STATUS")
  start_run
  job_is_up
  assert_contains "$(<"$TARGET_STATUS")" " ok True 12345 12345"
  kill -TERM "$RUN"
  ends_with 75
  # Those that were connected keep what a restore gives them, and cannot be told otherwise.
  # The pair, and of a round under way one end or two.
  grep -qE "the peer credentials of [234] connected unix sockets" "$RUN_LOG" || { cat "$RUN_LOG" >&2; return 1; }
  start_run
  told "goes on"
  target_goes_on
  assert_contains "$(<"$TARGET_STATUS")" " ok True 12345 12345"
}

@test "a dump says that connected sockets will name another process at their other end" {
  job=(python3 -S "$BATS_TEST_DIRNAME/peer_credentials.py" meet "$TARGET_STATUS")
  start_run
  job_is_up
  saves 000001
  told "the peer credentials of 2 connected unix sockets (SO_PEERCRED)"
}

@test "a command that cannot be started: with --json one object says so" {
  local options
  for options in "" "--images-dir $images"; do
    # shellcheck disable=SC2086 # words
    capture timeout 60 stasis run --json $options -- /nonexistent
    assert_equal "$status" 127
    assert_equal "$(json 'd["ok"], d["error"]["exit_status"], "/nonexistent" in d["error"]["message"]')" "False 127 True"
    assert_equal "$err" ""
  done
}

@test "it goes on on another GPU of the same kind: another UUID, another order, what the scheduler gives" {
  export STASIS_SIM_GPUS=A:8G,B:8G
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  # Another machine, with the two in the other order.
  export STASIS_SIM_MACHINE=other STASIS_SIM_GPUS=B:8G,A:8G
  start_run
  told "goes on from"
  target_goes_on
  assert_equal "$(gpu_used_of 0)" 0 "used of the GPU of the wrong kind"
  (($(gpu_used_of 1) > 0))
  kill -TERM "$RUN"
  ends_with 75
  # The scheduler says which of two it may have.
  export STASIS_SIM_GPUS=A:8G,A:8G
  CUDA_VISIBLE_DEVICES=0 start_run
  told "goes on from"
  target_goes_on
  (($(gpu_used_of 0) > 0 && $(gpu_used_of 1) == 0))
  kill -TERM "$RUN"
  ends_with 75
  # Or who runs it, by name.
  start_run --device-map 0=1
  told "goes on from"
  target_goes_on
  (($(gpu_used_of 1) > 0 && $(gpu_used_of 0) == 0))
  kill -TERM "$RUN"
  ends_with 75
}

@test "too few GPUs, or none of the kind: refused with what is needed, and the image stays" {
  export STASIS_SIM_GPUS=A:2x8G
  start_run
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  local run=(stasis run --images-dir "$images")
  STASIS_SIM_MACHINE=other STASIS_SIM_GPUS=B:2x8G refused_by 11 gpu-mismatch "${run[@]}" -- "${job[@]}"
  assert_contains "$err" "the job needs 1 x A (8.00 GiB), and it may have 2 x B (8.00 GiB)"
  STASIS_SIM_GPUS=A:8G refused_by 11 gpu-mismatch "${run[@]}" -- "${job[@]}"
  assert_contains "$err" "the job saw 2 GPUs"
  CUDA_VISIBLE_DEVICES="" refused_by 11 gpu-mismatch "${run[@]}" -- "${job[@]}"
  assert_contains "$err" "it may have none"
  refused_by 2 device-map-invalid "${run[@]}" --map 0-1 -- "${job[@]}"
  assert_equal "$(ls "$images" | grep -v log)" $'000001\nlock'
  start_run
  told "goes on from"
  target_goes_on
}

# Not while it is being saved.
suspends() {
  capture timeout 60 stasis suspend trainer
  ((status == 0))
}

# Not while a save that had begun before looks at it.
shows_what_it_gets_back() {
  done_by ps --json --timeout 30000
  [[ $(json '[m["bytes"] > 0 for m in d["processes"][0]["gpu_memory"]]') == "[True]" ]]
}

@test "by its name it is suspended, resumed and dumped; while it is suspended nothing is saved" {
  start_run --name trainer --every 600ms
  job_is_up
  told "saved to"
  done_by ps --json --timeout 30000
  assert_equal "$(json 'd["processes"][0]["name"]')" trainer
  done_by ps --timeout 30000
  assert_contains "$out" trainer
  wait_until 60 suspends
  assert_contains "$out" "suspended process 5000 "
  gpu_is_free
  wait_until 60 shows_what_it_gets_back
  told "not saved, because the job is suspended"
  # By its number out here it is the same one.
  refused 2 usage swap trainer "$(job_pid)"
  done_by resume "$(job_pid)"
  target_goes_on
  wait_until 60 suspends
  # One that has to make room while it is suspended runs again afterwards.
  kill -TERM "$RUN"
  ends_with 75
  refused 3 no-such-process resume trainer
  start_run --name trainer
  told "goes on from"
  target_goes_on
  done_by dump trainer --images-dir "$image" --leave-running
  target_goes_on
  capture timeout 60 stasis run --name trainer -- true
  assert_equal "$status" 7
  assert_contains "$err" "another job has the name trainer"
  capture timeout 60 stasis run --name trainer --images-dir "$images-other" -- true
  assert_equal "$status" 7
  [[ ! -e $images-other ]]
  # A dump that ends it comes to its own end, though the job's namespace goes with the job.
  done_by dump trainer --images-dir "$image-last"
  assert_contains "$out" "it has ended"
  ends_with 137
  done_by verify "$image-last"
  nothing_left
}

@test "a program that is only started has its name, and what it starts belongs to it" {
  (exec_on_gpu stasis run --name server -- sh -c "stasis-workload memory --size 4M --status $TARGET_STATUS; true") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 target_is_up
  done_by ps --json --timeout 30000
  assert_equal "$(json 'd["processes"][0]["name"]')" server
  done_by suspend server
  gpu_is_free
  done_by resume server
  target_goes_on
  refused 2 usage run --name 12 -- true
}

@test "a suspend by name that is killed in the middle: recover by name, and the job goes on being saved" {
  start_run --name trainer
  job_is_up
  capture env STASIS_FAULT=checkpoint.after:kill timeout 60 stasis suspend trainer
  assert_equal "$status" 137
  done_by recover trainer
  target_goes_on
  saves 000001
  kill -TERM "$RUN"
  ends_with 75
  nothing_left
}

@test "a process that has left the job's tree is in no image, and that is told" {
  job=(bash -c '(sleep 1000 &); exec "$@"' bash "${job[@]}")
  start_run
  job_is_up
  saves 000001
  grep -q "(sleep) has left the job's tree" "$RUN_LOG"
  assert_equal "$(grep -c "has left the job's tree" "$RUN_LOG")" 1
  kill -TERM "$RUN"
  ends_with 75
}

@test "a job that does not use CUDA yet is saved too, and does later" {
  job=(sh -c "until [ -e $BATS_TEST_TMPDIR/go ]; do sleep 0.05; done; exec ${job[*]}")
  start_run
  wait_until 60 eval '[[ -n $(children_of "$(job_pid)") ]]'
  saves 000001
  kill -TERM "$RUN"
  ends_with 75
  [[ ! -e $TARGET_STATUS ]]
  touch "$BATS_TEST_TMPDIR/go"
  start_run
  told "goes on from $images/000002 "
  job_is_up
  kill -TERM "$RUN"
  ends_with 75
  start_run
  told "goes on from $images/000003 "
  target_goes_on
  kill -TERM "$RUN"
  ends_with 75
}
