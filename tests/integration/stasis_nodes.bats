#!/usr/bin/env bats
# A job of several nodes, each a PID, mount, network and UTS namespace of this machine with GPUs of its
# own (simulated), and a tool in each: together quiesced, or together on. The ranks of all nodes wait for
# each other on their GPUs, every round.

load helpers
load stasis_lib
load stasis_nodes_lib

setup() { setup_nodes; }
teardown() { end_stasis; }

# start_nodes COUNT RANKS [ARGUMENT...]: nodes with so many ranks each. Sets NODES to the host's numbers
# of their first processes, each number 1 on its node.
start_nodes() {
  local count=$1 each=$2 i unshare
  shift 2
  NODES=()
  : >"$BATS_TEST_TMPDIR/meeting"
  for ((i = 0; i < count; i++)); do
    mkdir -p "$BATS_TEST_TMPDIR/sim$i" "$BATS_TEST_TMPDIR/state$i"
    # shellcheck disable=SC2016
    (
      export STASIS_SIM_DIR=$BATS_TEST_TMPDIR/sim$i
      exec_on_gpu setsid unshare --pid --fork --kill-child --mount-proc --net --uts bash -c '
        hostname "node$1"
        end() { kill -TERM $(jobs -p); }
        trap end TERM
        for ((r = 0; r < $2; r++)); do
          stasis-workload rank --meeting "$4/meeting" --rank $(($1 * $2 + r)) --ranks $(($2 * $3)) --seed 7 \
            --pause-ms 2 --status "$4/status$1.$r" "${@:5}" &
        done
        wait; wait' bash "$i" "$each" "$count" "$BATS_TEST_TMPDIR" "$@"
    ) </dev/null >"$BATS_TEST_TMPDIR/node$i.log" 2>&1 3>&- &
    unshare=$!
    echo "$unshare" >>"$targets"
    wait_until 60 has_child "$unshare"
    NODES+=("$(children_of "$unshare")")
  done
  at_end_kill "${NODES[@]}"
  RANKS=$each
  wait_until 60 all_are_past 0
}
again_and_again() {
  local n
  for ((n = 0; n < $1; n++)); do
    together 0 suspend --timeout 30s
    all_are_free
    together 0 resume
    all_go_on
  done
  [[ ! -e $group ]]
  all_verify
}

@test "a job of three nodes is suspended and resumed together, again and again" {
  start_nodes 3 1 --size 256K
  again_and_again "$(times 4 10)"
}

@test "a job of three nodes with two ranks each, by their agents" {
  LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_nodes 3 2 --size 4M
  again_and_again "$(times 2 5)"
  said 0 "resumed"
}

# bats test_tags=long
@test "a job of three nodes is suspended and resumed together a hundred times" {
  start_nodes 3 1 --size 256K
  again_and_again 100
}

@test "without one of its parts a job runs on, and those that came are named" {
  start_nodes 3 1 --size 256K
  TOOLS=()
  begin 0 suspend --timeout 4s
  begin 2 suspend --timeout 4s
  come_to 7 0 2
  said 0 "2 of 3 parts have come within 4000 ms: node0, node2"
  said 2 "2 of 3 parts have come within 4000 ms: node0, node2"
  all_go_on
  none_is_free
  nothing_left_anywhere
  together 0 suspend --timeout 30s
  # And one that cannot come is named when the others are brought back, which are.
  TOOLS=()
  begin 0 resume --timeout 4s
  begin 2 resume --timeout 4s
  come_to 7 0 2
  said 0 "2 of 3 parts have come"
  said 0 "process 1 runs"
  TOOLS=()
  PARTS=1 begin 1 resume
  come_to 0 1
  all_go_on
  all_verify
}

# fails_at FAULT: node 1 has the fault, the others have come; none is suspended afterwards.
fails_at() {
  TOOLS=()
  begin 0 suspend --timeout 5s
  begin 2 suspend --timeout 5s
  wait_until 60 test -e "$group/part.node0" -a -e "$group/part.node2"
  STASIS_FAULT=$1 begin 1 suspend --timeout 5s
  come_to 7 0 2
  said 0 node1
  said 2 node1
}

@test "what fails on one node, at any step, brings all back" {
  start_nodes 3 1 --size 256K
  for at in group.opened lock.after park.after checkpoint.before checkpoint.after suspend.verified; do
    fails_at "$at:error"
    come_to 1 1
    all_go_on
    none_is_free
    nothing_left_anywhere
  done
  together 0 suspend --timeout 30s
  all_are_free
  together 0 resume
  all_verify
}

# killed_at STEP...: the tool of node 1, which does not lead.
killed_at() {
  local at
  for at in "$@"; do
    fails_at "$at:kill"
    come_to 137 1
    on_node 1 stasis recover --all >/dev/null 2>&1
    all_go_on
    none_is_free
    rm -r "$group"
  done
}
# leads_and_is_killed_at STEP...
leads_and_is_killed_at() {
  local at
  for at in "$@"; do
    TOOLS=()
    STASIS_FAULT=$at:kill begin 1 suspend --timeout 5s
    wait_until 60 test -e "$group/lead"
    begin 0 suspend --timeout 5s
    begin 2 suspend --timeout 5s
    come_to 7 0 2
    come_to 137 1
    said 0 node1
    said 2 node1
    on_node 1 stasis recover --all >/dev/null 2>&1
    all_go_on
    none_is_free
    rm -r "$group"
  done
}

# The others wait ten seconds for each.
@test "a tool that is killed: the others go on, and recover mends its part" {
  start_nodes 3 1 --size 256K
  killed_at lock.after
  leads_and_is_killed_at checkpoint.after
  all_verify
}

# bats test_tags=long
@test "a tool that is killed, at any step: the same" {
  start_nodes 3 1 --size 256K
  killed_at group.opened checkpoint.after suspend.verified
  leads_and_is_killed_at lock.after
  all_verify
}

@test "a tool that stands still for some seconds is waited for; one that does so for long is given up, and goes back" {
  start_nodes 3 1 --size 256K
  for seconds in 3 13; do
    TOOLS=()
    begin 0 suspend --timeout 30s
    STASIS_FAULT=checkpoint.after:stop begin 1 suspend --timeout 30s
    begin 2 suspend --timeout 30s
    wait_until 60 is_stopped
    sleep "$seconds"
    kill -CONT "$stopped"
    if ((seconds == 3)); then
      come_to 0 0 1 2
      all_are_free
      together 0 resume
    else
      come_to 7 0 1 2
      said 0 "nothing was heard of part node1"
      none_is_free
    fi
    all_go_on
    [[ ! -e $group ]]
  done
  all_verify
}
@test "a signal to one of the tools lets all go on" {
  start_nodes 3 1 --size 256K
  TOOLS=()
  begin 0 suspend --timeout 30s
  STASIS_SIM_FAULTS=checkpoint:delay=3s begin 1 suspend --timeout 30s
  begin 2 suspend --timeout 30s
  wait_until 60 grep -qs still "$group/rest"
  pkill_tool 2
  for i in 0 1 2; do wait "${TOOLS[$i]}" && return 1; done
  all_go_on
  none_is_free
  nothing_left_anywhere
  all_verify
}
# Of the tool on that node, which `timeout` passes on.
pkill_tool() {
  local status
  for status in /proc/[0-9]*/status; do
    grep -qs '^Name:.timeout$' "$status" || continue
    status=${status%/status}
    tr '\0' ' ' <"$status/cmdline" | grep -q -- "--part node$1 " || continue
    kill -TERM "${status#/proc/}"
    return
  done
  return 1
}

@test "a part that has no driver, or whose process is not there, tells the others" {
  start_nodes 2 1 --size 256K
  TOOLS=()
  begin 0 suspend
  STASIS_LIBCUDA=/nonexistent begin 1 suspend
  come_to 8 1
  wait "${TOOLS[0]}" && return 1
  said 0 "given up by part node1: "
  TOOLS=()
  begin 0 suspend
  ROOTS=([1]=4000000)
  begin 1 suspend
  ROOTS=()
  come_to 3 1
  wait "${TOOLS[0]}" && return 1
  said 0 "given up by part node1: "
  none_is_free
  all_go_on
  all_verify
}

@test "options of a group" {
  refused 2 usage suspend 1 --group "$group"
  refused 2 usage suspend 1 --parts 2
  refused 2 usage suspend 1 --group "$group" --parts 0
  refused 2 usage suspend 1 --group "$group" --parts 2 --part a/b
  refused 2 usage suspend 1 --group "$group" --parts 2 --attach
  start_target memory --size 4M
  mkdir -m 777 "$group"
  refused 5 not-permitted suspend "$TARGET" --group "$group" --parts 1
  rmdir "$group"
  done_by suspend "$TARGET" --group "$group" --parts 1
  gpu_is_free
  done_by resume "$TARGET" --group "$group" --parts 1
  target_verifies
}
