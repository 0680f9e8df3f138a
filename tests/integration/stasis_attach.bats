#!/usr/bin/env bats
# `stasis attach`: the agent comes to programs that run (docs/adr/0053-attach.md): what it finds and takes, what it
# leaves, whom it refuses, and that a program runs on whatever becomes of the tool.
# Long because each test attaches to the same few programs, and looks at them with the same helpers.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

# With its figures in $out. The programs here use no graphs unless a test says so.
attaches() { done_by attach "$TARGET" --json --graphs-are-safe "$@"; }
converted() { json 'sum(p["converted_bytes"] for p in d["attached"])'; }
# left WHY: so many bytes stay with the driver for that reason.
left() { json "sum(l['bytes'] for p in d['attached'] for l in p['left'] if l['why'] == '$1')"; }

# cycle_by PATH [BYTES]: suspended and resumed by the path that is meant, so many bytes at least past the driver, it goes
# on.
cycle_by() {
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" "$1" "path ($out)"
  (($(json 'd["direct_bytes"]') >= ${2:-0})) || { echo "too little past the driver: $out" >&2 && return 1; }
  gpu_is_free
  done_by resume "$TARGET" --json
  target_goes_on
}
# A digest of the driver's code in the target.
code_of() {
  python3 -IS - "${1:-$TARGET}" <<'END'
import hashlib, sys
digest = hashlib.sha256()
with open(f"/proc/{sys.argv[1]}/mem", "rb") as memory:
    for line in open(f"/proc/{sys.argv[1]}/maps"):
        word = line.split()
        if word[1] != "r-xp" or "libcuda.so" not in word[-1]:
            continue
        start, end = (int(at, 16) for at in word[0].split("-"))
        memory.seek(start)
        digest.update(memory.read(end - start))
print(digest.hexdigest())
END
}
# refused_alone STATUS CODE: attach refuses the target, though the word is given, has put no hook in, and it goes on.
refused_alone() {
  local code
  code=$(code_of)
  refused "$1" "$2" attach "$TARGET" --graphs-are-safe
  assert_equal "$(code_of)" "$code" "code of the driver"
}
path_in_ps() {
  capture stasis ps --json
  json "[p['path'] for p in d['processes'] if p['pid'] == $TARGET][0]"
}

# start_program MODE [ARGUMENT...]: stasis-inside-target, which says whether all came out right; sets TARGET.
start_program() {
  TARGET_LOG=$BATS_TEST_TMPDIR/program.log
  : >"$TARGET_LOG"
  (exec_on_gpu setsid stasis-inside-target "$@") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 grep -qs ready "$TARGET_LOG"
}
ends_right() {
  kill -TERM "$TARGET"
  wait_until 60 grep -qE "right|wrong" "$TARGET_LOG"
  assert_contains "$(<"$TARGET_LOG")" right
}

# --- What comes of it

@test "after the agent has come a program is as if it had been started with it: suspended, dumped, restored" {
  need_root "CRIU"
  local code bytes
  start_target memory --size 64M
  assert_equal "$(path_in_ps)" driver
  code=$(code_of)
  attaches
  bytes=$(converted)
  ((bytes >= 32 << 20))
  assert_equal "$(json 'd["was_so"], d["standstill_seconds"] > 0')" "False True"
  [[ $(code_of) != "$code" ]]
  target_goes_on
  assert_equal "$(path_in_ps)" direct
  cycle_by direct "$bytes"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(json 'd["verdict"]["suspend"]["possible"], d["verdict"]["dump"]["possible"]')" "True True"
  dump_it --json
  (($(json 'd["direct_bytes"]') >= bytes))
  restore_it
  target_goes_on
  cycle_by direct "$bytes"
  restored_verifies 1
}

@test "a program whose agent has come is left as it is, and so is one that was started with it" {
  local code
  start_target memory --size 64M
  attaches
  code=$(code_of)
  attaches
  assert_equal "$(json 'd["was_so"], d["standstill_seconds"]')" "True None"
  capture stasis attach "$TARGET"
  assert_contains "$out" "had its agent already"
  assert_equal "$(code_of)" "$code"
  target_verifies
  LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_target memory --size 64M
  code=$(code_of)
  attaches
  assert_equal "$(json 'd["was_so"]')" True
  assert_equal "$(code_of)" "$code"
  target_verifies
}

@test "of a tree those alone get it that have none" {
  local library=$STASIS_BUILD/lib/stasis/libstasis-preload.so rounds=$BATS_TEST_TMPDIR/two
  (exec_on_gpu setsid bash -c "LD_PRELOAD=$library stasis-workload memory --size 64M --status $rounds.with &
    stasis-workload memory --size 64M --status $rounds.without & wait") </dev/null >"$rounds.log" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 grep -qs ok "$rounds.with"
  wait_until 60 grep -qs ok "$rounds.without"
  at_end_kill $(children_of "$TARGET")
  attaches
  assert_equal "$(json 'sorted((p["was_so"], p["converted_bytes"] > 0) for p in d["attached"])')" \
    "[(False, True), (True, False)]" "$out; $(ps -o pid,ppid,stat,args --ppid "$TARGET"); $(<"$rounds.log")"
  done_by suspend "$TARGET" --json
  (($(json 'd["direct_bytes"]') >= 96 << 20))
  gpu_is_free
  done_by resume "$TARGET"
  TARGET_STATUS=$rounds.with target_goes_on
  TARGET_STATUS=$rounds.without target_goes_on
}

@test "a time of 0 has no end" {
  start_target memory --size 64M
  attaches --timeout 0
  (($(converted) >= 32 << 20))
  target_verifies
}

@test "a block's addresses are kept, whatever the driver maps meanwhile" {
  STASIS_SIM_TAKES_FREED=1 start_target memory --size 64M
  attaches
  (($(converted) >= 32 << 20))
  assert_equal "$(left address)" 0
  target_goes_on
  cycle_by direct $((32 << 20))
  target_verifies
}

@test "memory that the program has made by cuMemCreate is the agent's where it is, with the program's handles" {
  start_target vmm --size 64M --pause-ms 2 --renew-every 0
  attaches
  assert_equal "$(converted)" $((64 << 20)) "$out"
  cycle_by direct $((64 << 20))
  target_verifies
  # One that exchanges and renews it may have a piece mapped nowhere when the agent comes, and what it has made since it
  # has exported, which stays: how much is the agent's is chance.
  start_target vmm --size 64M --pause-ms 2
  attaches
  # It exchanges and releases by the handles of before, and makes more.
  wait_until 60 target_is_past $(($(target_round) + 13))
  done_by suspend "$TARGET" --json
  gpu_is_free
  done_by resume "$TARGET"
  target_goes_on
  wait_until 60 target_is_past $(($(target_round) + 13))
  target_verifies
}

@test "what is allocated afterwards is the agent's, and what it frees comes back to the GPU" {
  local most
  # Whose blocks are new ones after some rounds, how many of them is chance.
  start_target churn --size 256M --threads 4
  attaches
  for _ in {1..8}; do
    for _ in {1..4}; do target_goes_on; done
    done_by suspend "$TARGET" --json
    # Below 2 MiB they are the driver's, as for `stasis run`.
    most=$(json 'd["direct_bytes"] * 3 >= d["processes"][0]["gpu_bytes"] * 2')
    gpu_is_free
    done_by resume "$TARGET"
    target_goes_on
    [[ $most == False ]] || break
  done
  assert_equal "$most" True "two thirds by the direct path ($out)"
  cycle_by direct
  target_verifies
}

@test "memory of every kind goes on, and what cannot be taken is told" {
  start_target pool
  attaches
  assert_equal "$(converted)" 0
  target_goes_on
  cycle_by driver
  target_verifies
  start_target torture
  attaches
  (($(left small) > 0 && $(left shared-area) > 0))
  start_target pool --size 8M
  attaches
  (($(left other) > 0))
}

# bats test_tags=long
@test "memory of several streams and contexts is the agent's afterwards" {
  local kind
  for kind in streams contexts; do
    start_target "$kind" --size 256M
    attaches
    (($(converted) >= 250 << 20))
    target_goes_on
    cycle_by direct $((250 << 20))
    target_verifies
  done
}

@test "workers that a program has forked go on, and are dumped with it" {
  need_root "CRIU"
  start_target loader --size 64M
  attaches
  (($(converted) >= 64 << 20))
  target_goes_on
  cycle_by direct $((64 << 20))
  dump_it
  restore_it
  target_goes_on
  restored_verifies 1
}

@test "a tree of ranks that wait for each other is attached in the middle" {
  start_target collective --children 4 --size 32M
  attaches
  assert_equal "$(json 'len(d["attached"]), sum(p["was_so"] for p in d["attached"])')" "4 0"
  assert_equal "$(converted)" $((128 << 20))
  target_goes_on
  cycle_by direct $((128 << 20))
  target_verifies
}

@test "a rank whose work waits on the GPU for one that the gate holds back is let go on until all have met" {
  # Nearly all the time, and outside of any call of the driver, so that the gates close at once.
  start_target collective --children 3 --size 32M --ahead-ms 150
  attaches
  assert_equal "$(converted)" $((96 << 20))
  target_goes_on
  cycle_by direct $((96 << 20))
  target_verifies
}

@test "two GPUs that work on each other's memory do so afterwards" {
  STASIS_SIM_GPUS=2x1G
  export STASIS_SIM_GPUS
  start_target peer --size 256M
  attaches
  # One of two buffers may just be renewed.
  (($(converted) > 40 << 20))
  target_goes_on
  cycle_by direct $((40 << 20))
  target_verifies
}

# --- First of all, for another verb

# brings_it VERB...: stasis does it, and has brought the agent first.
brings_it() {
  done_by "$@" --attach --graphs-are-safe --json
  assert_contains "$(json 'd["notes"]')" "has an agent now, which has "
}

@test "suspend --attach brings the agent first, and says nothing where it is or where all is suspended" {
  start_target memory --size 64M
  brings_it suspend "$TARGET"
  assert_equal "$(json 'd["path"], [p["name"] for p in d["phases"]][:1]')" "direct ['hook']"
  gpu_is_free
  done_by suspend "$TARGET" --attach --json
  assert_equal "$(json 'd["was_so"], "agent" in str(d["notes"])')" "True False"
  done_by resume "$TARGET" --json
  assert_equal "$(json 'd["path"]')" direct
  target_goes_on
  done_by suspend "$TARGET" --attach --json
  assert_equal "$(json 'd["path"], "agent" in str(d["notes"])')" "direct False"
  done_by resume "$TARGET"
  target_verifies
}

@test "dump --attach brings the agent first" {
  need_root "CRIU"
  start_target memory --size 64M
  brings_it dump "$TARGET" --images-dir "$image" --leave-running
  assert_equal "$(json 'd["path"]')" direct
  target_goes_on
  done_by dump "$TARGET" --images-dir "$image.again" --attach --json
  assert_equal "$(json 'd["path"], "agent" in str(d["notes"])')" "direct False"
  wait_until 60 number_is_free
  done_by restore --images-dir "$image.again" --detach
  target_goes_on
  cycle_by direct
  restored_verifies 1
}

@test "swap --attach brings the agent first to the one that leaves" {
  STASIS_SIM_GPUS=8G
  export STASIS_SIM_GPUS
  start_target memory --size 64M
  local second=$TARGET second_status=$TARGET_STATUS
  done_by suspend "$second"
  start_target memory --size 64M
  brings_it swap "$TARGET" "$second"
  assert_equal "$(json 'd["suspended"]["path"], d["resumed"]["path"]')" "direct driver"
  TARGET_STATUS=$second_status target_goes_on
  done_by swap "$second" "$TARGET"
  target_goes_on
  target_verifies
}

# bats test_tags=long
@test "where attach is refused the verb is, all run on, and what to do instead is said" {
  start_target memory --size 8M
  local second=$TARGET verb
  done_by suspend "$second"
  start_target graph --size 96M
  for verb in suspend dump swap; do
    local -a arguments=("$TARGET")
    [[ $verb != dump ]] || arguments+=(--images-dir "$image")
    [[ $verb != swap ]] || arguments+=("$second")
    # CRIU is found before.
    [[ $verb != dump || $EUID == 0 ]] || continue
    refused 8 not-supported "$verb" "${arguments[@]}" --attach --watch-graphs 4s
    assert_contains "$err" "makes or launches CUDA graphs"
    assert_contains "$err" "without --attach the driver moves its GPU memory"
    in_state running "$TARGET"
    in_state checkpointed "$second"
    target_goes_on
  done
  [[ ! -e $image ]]
  nothing_left
  refused 2 usage suspend "$TARGET" --graphs-are-safe
  refused 2 usage suspend "$TARGET" --attach --path driver
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_verifies
}

@test "a suspend or a swap that is killed while it brings the agent is recovered from, and done again" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  STASIS_SIM_GPUS=8G
  export STASIS_SIM_GPUS
  start_target memory --size 8M
  local second=$TARGET
  done_by suspend "$second"
  local verb
  local -a command
  for verb in suspend swap; do
    start_target memory --size 64M
    command=("$verb" "$TARGET")
    [[ $verb != swap ]] || command+=("$second")
    STASIS_FAULT=attach.drained:kill capture timeout 60 stasis "${command[@]}" --attach --graphs-are-safe
    ((status != 0))
    done_by recover --all
    in_state running "$TARGET"
    in_state checkpointed "$second"
    target_goes_on
    done_by "${command[@]}" --attach --graphs-are-safe
    in_state checkpointed "$TARGET"
    [[ $verb != swap ]] || in_state running "$second"
    done_by resume "$TARGET"
    target_verifies
  done
  nothing_left
}

# --- While it works

# For longer than any pause of a workload's on a busy machine.
stands_still() {
  local before
  before=$(target_round)
  sleep 1
  assert_equal "$(target_round)" "$before" >/dev/null 2>&1
}

@test "a call that came before the hooks is waited for before memory is touched" {
  STASIS_SIM_FAULTS="allocate:delay=6s@60" start_target churn --size 256M --threads 1
  wait_until 60 stands_still
  attaches
  assert_equal "$(json 'd["standstill_seconds"] > 1')" True "$out"
  target_goes_on
  cycle_by direct
  target_verifies
}

# Each cycle is another program, as an agent comes to one once.
attach_under_load() {
  local i
  for ((i = 0; i < $1; ++i)); do
    start_program blocks 50
    attaches
    (($(converted) >= 64 << 20))
    ((i % 4)) || {
      done_by suspend "$TARGET" --json
      (($(json 'd["direct_bytes"]') >= 64 << 20))
      done_by resume "$TARGET"
    }
    ends_right
  done
}

@test "fifty threads that call all the time: the agent comes, and all they did is right" {
  attach_under_load 2
}

# bats test_tags=long
@test "fifty threads that call all the time: two hundred programs" {
  attach_under_load 200
}

@test "a program in a root directory without /proc is left alone, which is said" {
  need_root "namespaces"
  local root=$BATS_TEST_TMPDIR/root
  mkdir "$root"
  # shellcheck disable=SC2016
  exec_in_it() {
    exec_on_gpu unshare --mount setsid sh -c \
      'mount --rbind / "$1" && mount -t tmpfs none "$1/proc" && exec chroot "$@"' sh "$root" "$@"
  }
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  (exec_in_it "$STASIS_BUILD/bin/stasis-workload" memory --size 64M --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  refused 8 not-supported attach "$TARGET" --graphs-are-safe
  assert_contains "$err" "its root directory has no /proc of its PID namespace (chroot)"
  assert_contains "$err" "mount -t proc proc ROOT/proc"
  target_goes_on
  cycle_by driver
  # As is said.
  nsenter --target "$TARGET" --mount mount -t proc proc "$root/proc"
  done_by attach "$TARGET" --graphs-are-safe
  cycle_by direct
  nothing_left
}

# --- A driver that hangs

@test "a driver that hangs while memory is exchanged: within the time, all is said, and recover finishes it" {
  # The second reservation is the first block's, at its address.
  STASIS_SIM_FAULTS="reserve:delay=12s@2" start_target graph --size 96M
  local before
  SECONDS=0
  refused 12 not-rolled-back attach "$TARGET" --graphs-are-safe --timeout 1s
  ((SECONDS < 11))
  assert_contains "$err" "process $TARGET stands still"
  assert_contains "$err" "\`stasis recover $TARGET\` waits for that"
  before=$(target_round)
  capture stasis ps --json
  assert_contains "$out" waiting
  assert_contains "$out" "stands still until the driver answers its agent"
  assert_equal "$(target_round)" "$before"
  done_by recover "$TARGET"
  target_goes_on
  nothing_left
  cycle_by direct
  target_verifies
}

@test "a second signal leaves a driver that hangs alone, and a first one waits for an exchange that works" {
  local signals
  # The tool is asked once, or a second later once more.
  for signals in 1 2; do
    STASIS_SIM_FAULTS="reserve:delay=$((signals * 6 - 2))s@2" start_target graph --size 96M
    stasis attach "$TARGET" --graphs-are-safe --timeout 60s >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
    local tool=$! status=0
    # In the exchange, and not just without a round on a machine with much to do.
    wait_until 60 grep -qE "^TracerPid:[[:space:]]*[1-9]" "/proc/$TARGET/status"
    wait_until 60 no_round_for 1
    kill -TERM "$tool"
    SECONDS=0
    ((signals == 1)) || { sleep 1.2 && kill -TERM "$tool"; }
    wait "$tool" || status=$?
    ((SECONDS < 8))
    assert_equal "$status" "$( ((signals == 1)) && echo 143 || echo 12)" "$(<"$BATS_TEST_TMPDIR/said")"
    ((signals == 1)) || done_by recover --all
    target_goes_on
    cycle_by direct
    target_verifies
    nothing_left
  done
}

@test "a program that becomes another one while memory is exchanged is told at once" {
  local times said=$BATS_TEST_TMPDIR/said
  # At other instants between two stops of its threads.
  for times in {1..6}; do
    STASIS_SIM_FAULTS="reserve:delay=12s@2" start_program cuda-become /bin/sleep
    stasis attach "$TARGET" --graphs-are-safe --timeout 30s >"$said" 2>&1 3>&- &
    local tool=$! status=0
    sleep "1.$times$times"
    kill -TERM "$TARGET"
    SECONDS=0
    wait "$tool" || status=$?
    ((SECONDS < 5))
    assert_equal "$status" 3 "$(<"$said")"
    assert_contains "$(<"$said")" "process $TARGET has become another program (exec)"
    kill -KILL "$TARGET"
  done
  nothing_left
}

# --- Addresses and room

@test "a block whose address cannot be had goes back to the driver there, with its content" {
  # The second and third reservation of a block are those at its address; the first block is the driver's again.
  STASIS_SIM_FAULTS="reserve:error=2@2; reserve:error=2@3" start_target graph --size 96M
  attaches
  assert_equal "$(left address) $(converted)" "$((32 << 20)) $((64 << 20))"
  target_goes_on
  cycle_by direct $((64 << 20))
  target_verifies
}

# The driver gives the first place in it, where the block overlaps the one that it was in.
@test "a block behind room in its area goes back to the driver there, with its content" {
  start_program tail
  attaches
  assert_equal "$(left address)" "$(((3 << 20) + (23 << 20)))" "$out"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  ends_right
}

@test "a block that neither the agent nor the driver gets at its address is told as lost" {
  # The program's own four come first.
  STASIS_SIM_FAULTS="reserve:error=2@2; reserve:error=2@3; allocate:error=2@5" start_target graph --size 96M
  capture timeout 60 stasis attach "$TARGET" --graphs-are-safe
  assert_equal "$status" 12
  assert_contains "$err" "has lost 32.0 MiB of its GPU memory: neither the agent nor the driver got the address again"
  assert_contains "$err" "end the program"
}

@test "without room for a copy the memory stays with the driver" {
  STASIS_SIM_GPUS=1x96M
  export STASIS_SIM_GPUS
  start_program blocks 4
  attaches
  assert_equal "$(left no-room)" "$((64 << 20))"
  # Its threads have pieces of 4 MiB for a moment, for which there may be room.
  (($(converted) % (4 << 20) == 0 && $(converted) < 64 << 20))
  # And so is said later, where the agent is in already.
  attaches
  assert_equal "$(json 'd["was_so"]') $(left no-room)" "True $((64 << 20))"
  capture stasis attach "$TARGET"
  assert_contains "$out" "stayed with the driver when it came: no GPU memory for a copy"
  done_by suspend "$TARGET" --json
  # What its four threads have allocated for a moment is the agent's.
  (($(json 'd["direct_bytes"]') <= 16 << 20))
  done_by resume "$TARGET"
  ends_right
}

# --- Graphs

@test "a program that launches graphs of before is refused, and consent is right where they have no copy from the host" {
  start_target graph --size 96M
  refused 8 not-supported attach "$TARGET" --watch-graphs 4s
  assert_contains "$err" "makes or launches CUDA graphs"
  assert_contains "$err" "(every program runs on; the agent's library stays in process $TARGET, and does nothing)"
  assert_contains "$err" "--graphs-are-safe"
  target_goes_on
  # The hooks are in, and all is the driver's.
  assert_equal "$(path_in_ps)" driver
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" driver
  done_by resume "$TARGET"
  attaches
  (($(converted) > 0))
  target_goes_on
  cycle_by direct
  target_verifies
}

# bats test_tags=long
@test "a graph that is launched after the watch and before the gate closes is seen, too" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  # Two seconds after a round it gives the GPU other work, and six later it launches.
  start_target graph --size 96M --pause-ms 2000 --ahead-ms 6000
  local round tool
  round=$(target_round)
  STASIS_FAULT=attach.watched:stop stasis attach "$TARGET" --watch-graphs 4s >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  tool=$!
  wait_until 60 grep -q '^State:[[:space:]]*T' "/proc/$tool/status"
  assert_equal "$(target_round)" "$round"
  wait_until 60 target_is_past "$round"
  kill -CONT "$tool"
  wait "$tool" && return 1
  assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "makes or launches CUDA graphs"
  target_goes_on
  assert_equal "$(path_in_ps)" driver
}

# Its copies have the memory of before in them, too, whenever it is launched.
@test "a graph that is made after the hooks are in and before the exchange is not taken for safe" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  local tool
  start_script late_graph.py "$BATS_TEST_TMPDIR"
  touch "$BATS_TEST_TMPDIR/begin"
  wait_until 20 test ! -e "$BATS_TEST_TMPDIR/begin"
  # The hooks are in when the watch begins; the graph comes when it is over.
  STASIS_FAULT=attach.watched:stop stasis attach "$TARGET" --watch-graphs 500ms \
    >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  tool=$!
  at_end_kill "$tool"
  wait_until 60 grep -q '^State:[[:space:]]*T' "/proc/$tool/status"
  touch "$BATS_TEST_TMPDIR/make"
  wait_until 20 test ! -e "$BATS_TEST_TMPDIR/make"
  kill -CONT "$tool"
  status=0
  wait "$tool" || status=$?
  assert_equal "$status" 8 "$(<"$BATS_TEST_TMPDIR/said")"
  assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "makes or launches CUDA graphs"
  # Nor later: it may be launched at any time.
  refused 8 not-supported attach "$TARGET" --watch-graphs 500ms
  assert_contains "$err" "makes or launches CUDA graphs"
  script_goes_on
  done_by attach "$TARGET" --graphs-are-safe
  script_goes_on
}

# bats test_tags=long
@test "consent given wrongly ends a graph with a copy to the host as the driver does" {
  start_target graph-host --size 96M
  refused 8 not-supported attach "$TARGET" --watch-graphs 4s
  target_goes_on
  attaches
  wait_until 60 grep -q "719\|LAUNCH_FAILED" "$TARGET_LOG"
}

@test "a program that works and launches no graph is told of, and one that does nothing is not judged" {
  start_target memory --size 64M
  done_by attach "$TARGET" --watch-graphs 500ms --json
  assert_contains "$(json 'd["notes"]')" "neither made nor launched a CUDA graph"
  (($(converted) > 0))
  target_verifies
  start_target sleep --size 8M --pause-ms 3000
  refused 8 not-supported attach "$TARGET" --watch-graphs 1ms
  assert_contains "$err" "not known whether it uses CUDA graphs"
  assert_contains "$err" "watch it longer (--watch-graphs 60s) while it works"
}

# wants_word VERB...: stasis refuses it, says what was seen and what is not known, and names both words.
wants_word() {
  refused 8 not-supported "$@"
  assert_contains "$err" "process $TARGET ("
  assert_contains "$err" "--graphs-are-safe if the program uses no CUDA graphs, or none with a copy from or to the host"
  assert_contains "$err" "--watch-graphs 30s"
}

@test "without a word on its graphs a program is not taken, by no verb, and all is as it was" {
  STASIS_SIM_GPUS=8G
  export STASIS_SIM_GPUS
  start_target memory --size 8M
  local second=$TARGET verb
  done_by suspend "$second"
  start_target memory --size 64M
  wants_word attach "$TARGET"
  assert_contains "$err" "was watched for 0.5 s and neither made nor launched a CUDA graph, which does not show that"
  assert_contains "$err" "would end it with error 719"
  assert_contains "$err" "(every program runs on; the agent's library stays in process $TARGET, and does nothing)"
  # Nor as it is told in JSON, and however often it is asked.
  capture stasis attach "$TARGET" --json
  assert_equal "$status" 8
  assert_equal "$(json '[o["id"] for o in d["error"]["obstacles"]]')" "['attach-graphs-unknown']" "$out"
  for verb in suspend swap; do
    local -a arguments=("$TARGET")
    [[ $verb != swap ]] || arguments+=("$second")
    wants_word "$verb" "${arguments[@]}" --attach
    assert_contains "$err" "without --attach the driver moves its GPU memory"
    in_state running "$TARGET"
    in_state checkpointed "$second"
  done
  nothing_left
  assert_equal "$(path_in_ps)" driver
  target_goes_on
  cycle_by driver
  refused 2 usage attach "$TARGET" --watch-graphs 0
  # The word is what was missing.
  done_by swap "$TARGET" "$second" --attach --watch-graphs 500ms
  done_by swap "$second" "$TARGET"
  cycle_by direct
  # Where the agent is, none is needed.
  done_by attach "$TARGET"
  assert_contains "$out" "had its agent already"
  target_verifies
}

@test "dump --attach without a word on the graphs leaves the program running, and no image" {
  need_root "CRIU"
  start_target memory --size 8M
  wants_word dump "$TARGET" --images-dir "$image" --attach
  [[ ! -e $image ]]
  in_state running "$TARGET"
  target_verifies
}

# The one that a watch of half a second takes for one without: between two launches it gives the GPU other work.
@test "a program that launches its graph every few seconds, with a copy to the host, is never taken without a word" {
  start_target graph-host --size 9M --pause-ms 1000 --ahead-ms 4000
  local round saw=""
  round=$(target_round)
  while ! target_is_past "$round"; do
    wants_word attach "$TARGET"
    [[ $err != *"neither made nor launched a CUDA graph, which does not show"* ]] || saw=yes
    target_is_past "$round" || [[ -z $saw ]] || break
  done
  assert_equal "$saw" yes "an attempt between the work and the launch"
  # Its launch comes, and what it copies to the host is right.
  wait_until 60 target_is_past "$round"
  target_verifies
}

# --- Whom it refuses

@test "a driver whose entry points begin otherwise is left alone" {
  mkdir "$BATS_TEST_TMPDIR/other"
  cp "$STASIS_LIBCUDA" "$BATS_TEST_TMPDIR/other/libcuda.so.1"
  # mov %rsp, %rbp in its other form.
  python3 -IS - "$BATS_TEST_TMPDIR/other/libcuda.so.1" <<'END'
import sys
data = bytearray(open(sys.argv[1], "rb").read())
at = data.rindex(bytes.fromhex("554889e541544883ec08"))
data[at + 1:at + 4] = bytes.fromhex("488bec")
open(sys.argv[1], "wb").write(data)
END
  STASIS_LIBCUDA=$BATS_TEST_TMPDIR/other/libcuda.so.1 start_target memory --size 64M
  refused_alone 8 not-supported
  assert_contains "$err" "does not begin as those of driver 580 do"
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_verifies
}

@test "what is unusual is refused with the reason" {
  start_target memory --size 8M
  start_tracer
  refused_alone 7 busy
  assert_contains "$err" "traced by process"
  kill -KILL "$TRACER"
  wait_until 60 grep -q "^TracerPid:[[:space:]]*0" "/proc/$TARGET/status"
  done_by suspend "$TARGET"
  refused_alone 6 wrong-state
  done_by resume "$TARGET"
  target_verifies
  CUDA_INJECTION64_PATH=/tool.so start_target memory --size 8M
  refused_alone 8 not-supported
  assert_contains "$err" "a CUDA tool is at work"
  target_verifies
  STASIS_AGENT=off start_target memory --size 8M
  refused_alone 8 not-supported
  assert_contains "$err" "its environment has STASIS_AGENT=off"
  target_verifies
  start_target none
  refused 4 not-cuda attach "$TARGET"
}

@test "an agent that was started with the program and keeps out is told, and not taken for one" {
  local library=$STASIS_BUILD/lib/stasis/libstasis-preload.so
  STASIS_AGENT=off LD_PRELOAD=$library start_target memory --size 8M
  refused_alone 8 not-supported
  assert_contains "$err" "has the agent's library, and STASIS_AGENT=off in its environment"
  target_verifies
  CUDA_INJECTION64_PATH=/tool.so LD_PRELOAD=$library start_target memory --size 8M
  refused_alone 8 not-supported
  assert_contains "$err" "keeps out of the way of a CUDA tool"
  assert_equal "$(path_in_ps)" driver
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_verifies
}

@test "a filter that lets no thread be made is left alone" {
  need_root "reading a filter"
  start_program cuda-refusing
  refused 8 not-supported attach "$TARGET" --graphs-are-safe
  has_obstacle attach stasis attach "$TARGET" --graphs-are-safe
  ends_right
}

@test "a filter that ends the program for a call of the loader's or the agent's is left alone" {
  need_root "reading a filter"
  local call
  # memfd_create openat pread64 readlink getdents64 fcntl prlimit64 eventfd2 membarrier
  for call in 319 257 17 89 217 72 302 290 324; do
    start_program cuda-without "$call"
    capture timeout 60 stasis attach "$TARGET" --graphs-are-safe
    if ((status != 0)); then assert_contains "$err" "system call $call of"; fi
    ends_right
  done
}

@test "a filter of one thread alone, which the agent's hooks would run into, is found before anything is done" {
  need_root "reading a filter"
  local call
  for call in 319 290; do # memfd_create eventfd2
    start_program cuda-worker "$call"
    refused 8 not-supported attach "$TARGET" --graphs-are-safe
    assert_contains "$err" "system call $call of"
    assert_equal "$(grep -c "memfd:libstasis-attached" "/proc/$TARGET/maps")" 0
    ends_right
  done
}

@test "a filter that would keep the agent's threads from their names, or the C library from a thread, is refused" {
  need_root "reading a filter"
  local call
  for call in 157 435; do # prctl clone3
    start_program cuda-errno "$call"
    refused 8 not-supported attach "$TARGET" --graphs-are-safe
    assert_contains "$err" "system call $call of"
    [[ $err != *SELinux* ]]
    ends_right
  done
}

@test "a thread of the kernel's own (io_uring) is no hindrance, and one without a stack is named" {
  start_program cuda-sqpoll
  [[ $(<"$TARGET_LOG") != *"no io_uring"* ]] || skip "the kernel allows no io_uring"
  attaches
  done_by suspend "$TARGET" --json
  done_by resume "$TARGET"
  ends_right
  start_program cuda-stackless
  SECONDS=0
  refused_alone 7 timeout
  ((SECONDS < 5))
  assert_contains "$err" "has a stack that cannot be read (its stack pointer is 0x0)"
  ends_right
}

@test "a filter that ends the program for what the kernel makes of an interrupted wait is no hindrance" {
  need_root "reading a filter"
  start_program cuda-without 219 # restart_syscall
  attaches
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  attaches
  ends_right
}

@test "a program that waits for a child of vfork is told before anything stands still" {
  local verb
  start_program cuda-vfork
  for verb in attach suspend; do
    SECONDS=0
    refused 7 busy "$verb" "$TARGET"
    ((SECONDS < 6))
    assert_contains "$err" "nothing interrupts"
  done
  assert_equal "$(grep -c 'TracerPid:.0$' "/proc/$TARGET/status")" 1
}

@test "a program with numbers of its own, whose /proc has those of others, gets the agent" {
  need_root "namespaces"
  local rounds=$BATS_TEST_TMPDIR/numbers
  (exec_on_gpu setsid unshare --pid --fork --kill-child stasis-workload memory --size 64M --status "$rounds") \
    </dev/null >"$rounds.log" 2>&1 3>&- &
  TARGET=$! TARGET_STATUS=$rounds
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  attaches
  (($(converted) >= 32 << 20))
  cycle_by direct $((32 << 20))
}

@test "processes that may share GPU memory are refused" {
  start_target ipc
  TARGET_CHILD=$(children_of "$TARGET" | head -1)
  local code
  code=$(code_of "$TARGET_CHILD")
  refused_alone 8 not-supported
  assert_contains "$err" "may be another process's"
  assert_equal "$(code_of "$TARGET_CHILD")" "$code"
  target_goes_on
}

@test "a program whose GPU memory a network card may know is refused" {
  need_root "a /dev of its own"
  local program=$BATS_TEST_TMPDIR/with-card
  cat >"$program" <<END
#!/bin/bash
mount -t tmpfs none "$BATS_TEST_TMPDIR"/dev
for node in null zero urandom; do
  : >"$BATS_TEST_TMPDIR/dev/\$node"
  mount --bind "/dev/\$node" "$BATS_TEST_TMPDIR/dev/\$node"
done
: >"$BATS_TEST_TMPDIR/dev/gdrdrv"
mount --move "$BATS_TEST_TMPDIR/dev" /dev
exec 9</dev/gdrdrv stasis-workload memory --size 64M --status "$BATS_TEST_TMPDIR/card"
END
  chmod +x "$program"
  mkdir "$BATS_TEST_TMPDIR/dev"
  (exec_on_gpu setsid unshare -m --propagation private "$program") </dev/null >/dev/null 2>&1 3>&- &
  TARGET=$! TARGET_STATUS=$BATS_TEST_TMPDIR/card
  echo "$TARGET" >>"$targets"
  wait_until 60 grep -qs ok "$TARGET_STATUS"
  refused_alone 8 not-supported
  assert_contains "$err" "has /dev/gdrdrv open: a network card may know the addresses of its GPU memory"
  target_goes_on
}

# two_of COMMAND COMMAND: both in one tree, without agents; sets CHILDREN, the first one first.
two_of() {
  TARGET_LOG=$BATS_TEST_TMPDIR/two.log TARGET_STATUS=$BATS_TEST_TMPDIR/two
  : >"$TARGET_LOG"
  rm -f "$TARGET_STATUS"
  (exec_on_gpu setsid bash -c "$1 & $2 & wait") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 grep -qs ok "$TARGET_STATUS"
  wait_until 60 grep -qs ready "$TARGET_LOG"
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
}

@test "of a tree in which one cannot have it, no other is touched" {
  need_root "reading a filter"
  local child
  two_of "stasis-workload memory --size 64M --status $BATS_TEST_TMPDIR/two" "stasis-inside-target cuda-errno 157"
  refused 8 not-supported attach "$TARGET" --graphs-are-safe
  assert_contains "$err" "system call 157 of"
  assert_contains "$err" "(rolled back: every process is as it was)"
  for child in "${CHILDREN[@]}"; do
    assert_equal "$(grep -c "memfd:libstasis-attached" "/proc/$child/maps")" 0
  done
}

@test "what may not make memory executable by its own word is told as that" {
  start_program cuda-mdwe
  [[ $(<"$TARGET_LOG") != *"no mdwe"* ]] || skip "this kernel has no PR_SET_MDWE"
  refused 8 not-supported attach "$TARGET" --graphs-are-safe
  assert_contains "$err" PR_SET_MDWE
  [[ $err != *SELinux:* ]]
  ends_right
}

# --- Whatever becomes of the tool

@test "a program that ends before anything is done is told as ended, not as one with an agent" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  start_target memory --size 64M
  STASIS_FAULT=group.opened:target-dies capture stasis attach "$TARGET" --graphs-are-safe
  # As one that is gone, or that its parent has not collected yet.
  assert_equal "$status" 3 "$err"
  [[ $err == *ended*"[process-gone]"* || $err == *"has ended"*"[zombie]"* ]] || { echo "$err"; return 1; }
}

@test "a program that ends, or becomes another one, before its hooks are in is told as that" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  local fault tool
  for fault in attach.loaded attach.stopped; do
    start_program cuda-become /bin/sleep
    STASIS_FAULT=$fault:stop stasis attach "$TARGET" --graphs-are-safe >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
    tool=$!
    at_end_kill "$tool"
    wait_until 60 grep -q '^State:[[:space:]]*T' "/proc/$tool/status"
    if [[ $fault == attach.loaded ]]; then
      kill -TERM "$TARGET"
      wait_until 60 grep -q sleep "/proc/$TARGET/comm"
    else
      kill -KILL "$TARGET"
    fi
    kill -CONT "$tool"
    status=0
    wait "$tool" || status=$?
    assert_equal "$status" 3 "$fault: $(<"$BATS_TEST_TMPDIR/said")"
    assert_contains "$(<"$BATS_TEST_TMPDIR/said")" "[process-gone]"
    kill -KILL "$TARGET" 2>/dev/null || true
  done
  nothing_left
}

# stopped_at FAULT: attach is there when a signal stops the target, which is let go on when attach has ended; its status
# is in $status, and what it says in $err.
stopped_at() {
  local tool
  STASIS_FAULT=$1:stop stasis attach "$TARGET" --graphs-are-safe >"$BATS_TEST_TMPDIR/said" 2>&1 3>&- &
  tool=$!
  at_end_kill "$tool"
  wait_until 60 grep -q '^State:[[:space:]]*T' "/proc/$tool/status"
  kill -STOP "$TARGET"
  # One that the tool has stopped just then takes the signal later.
  wait_until 60 grep -q '^State:[[:space:]]*[Tt]' "/proc/$TARGET/status"
  kill -CONT "$tool"
  status=0
  SECONDS=0
  wait "$tool" || status=$?
  err=$(<"$BATS_TEST_TMPDIR/said")
  kill -CONT "$TARGET"
}

@test "a program that a signal stops before anything is done to it is left as it is" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  local fault
  start_target memory --size 64M
  for fault in group.opened attach.loaded attach.hooked; do
    stopped_at "$fault"
    assert_equal "$status" 7 "$fault: $err"
    assert_contains "$err" "is stopped by a signal ("
    assert_contains "$err" "kill -CONT $TARGET"
    nothing_left
    target_goes_on
  done
  attaches
  cycle_by direct
  target_verifies
}

@test "a program that a signal stops when its memory is the agent's is not waited for, and goes on by itself" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  start_target memory --size 64M
  stopped_at attach.exchanged
  ((SECONDS < 20))
  assert_equal "$status" 12 "$err"
  assert_contains "$err" "process $TARGET is stopped by a signal, and the agent in it with it"
  assert_contains "$err" "kill -CONT $TARGET"
  target_goes_on
  done_by recover "$TARGET"
  nothing_left
  attaches
  assert_equal "$(json 'd["was_so"]')" True
  cycle_by direct
  target_verifies
}

@test "the time for which the hooks are put in is part of the downtime" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  local tool
  start_target memory --size 64M
  STASIS_FAULT=attach.stopped:stop stasis attach "$TARGET" --graphs-are-safe --json \
    >"$BATS_TEST_TMPDIR/said" 2>/dev/null 3>&- &
  tool=$!
  wait_until 60 grep -q '^State:[[:space:]]*T' "/proc/$tool/status"
  sleep 1.5
  kill -CONT "$tool"
  wait "$tool"
  out=$(<"$BATS_TEST_TMPDIR/said")
  assert_equal "$(json 'd["standstill_seconds"] > 1.4')" True "$out"
}

# bats test_tags=long
@test "a tool that is killed at any step leaves the program running, and the next one goes on" {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
  # The matrix of faults has all of them, with a program of one thread.
  local fault code
  for fault in hooked_one:kill hooked:error drained:kill found:error exchanging:kill; do
    start_program blocks 8
    code=$(code_of)
    STASIS_FAULT=attach.$fault capture timeout 60 stasis attach "$TARGET" --graphs-are-safe
    ((status != 0))
    # An error before all hooks are in takes them out.
    [[ $fault != hooked:error ]] || assert_equal "$(code_of)" "$code" "code of the driver"
    [[ $fault == *:error ]] || done_by recover --all
    attaches
    done_by suspend "$TARGET" --json
    assert_equal "$(json 'd["path"]')" direct "$fault"
    done_by resume "$TARGET"
    ends_right
  done
}
