#!/usr/bin/env bats
# A job of several nodes whose tools meet at a TCP address, of the first node, with a secret that they share.

load helpers
load stasis_lib
load stasis_nodes_lib

setup() {
  setup_nodes
  group=tcp://10.77.0.1:7001
  secret_of_group=$BATS_TEST_TMPDIR/secret
  (umask 077; head -c 32 /dev/urandom >"$secret_of_group")
}
teardown() { end_stasis; }

# there_and_back ROUNDS
there_and_back() {
  local n
  for ((n = 0; n < $1; n++)); do
    together 0 suspend --timeout 30s
    all_are_free
    together 0 resume
    all_go_on
  done
}

@test "a job of three nodes is suspended, resumed, dumped and restored by tools that meet at an address" {
  start_joined_nodes 3 --size 256K --talk
  there_and_back 2
  together 0 dump --timeout 30s --sync none
  none_runs
  all_are_free
  together 0 restore
  all_go_on
  nothing_left_anywhere
  joined_verify
}

# serves_and_is_killed_at STEP...: the tool of the node that has the address; the others wait 15 seconds.
serves_and_is_killed_at() {
  local at
  for at in "$@"; do
    TOOLS=()
    STASIS_FAULT=$at:kill begin 0 suspend --timeout 30s
    begin 1 suspend --timeout 30s
    come_to 137 0
    come_to 7 1
    said 1 "nothing was heard of part node0"
    said 1 "the other parts could not be told"
    on_node 0 stasis recover --all >/dev/null 2>&1
    all_go_on
    none_is_free
    nothing_left_anywhere
  done
}

@test "another secret, none, and one that others may read are refused, and a tool that is killed leaves the others running" {
  start_joined_nodes 2 --size 256K
  (umask 077; head -c 32 /dev/urandom >"$BATS_TEST_TMPDIR/other")
  TOOLS=()
  begin 0 suspend --timeout 6s
  secret_of_group=$BATS_TEST_TMPDIR/other begin 1 suspend --timeout 30s
  come_to 5 1
  said 1 "what answers at tcp://10.77.0.1:7001 has another secret"
  said 1 "give all parts the same secret"
  come_to 7 0
  said 0 "1 of 2 parts have come within 6000 ms: node0"
  none_is_free
  chmod 644 "$BATS_TEST_TMPDIR/other"
  secret_of_group=$BATS_TEST_TMPDIR/other begin 1 suspend
  come_to 5 1
  said 1 "others may know it"
  secret_of_group='' begin 1 suspend
  come_to 2 1
  said 1 "head -c 32 /dev/urandom"
  begin 1 suspend --timeout 1s
  come_to 7 1
  said 1 "no part answers at tcp://10.77.0.1:7001: Connection refused"
  group=tcp://10.77.0.1 begin 1 suspend
  come_to 2 1
  group=$BATS_TEST_TMPDIR/group begin 1 suspend
  come_to 2 1
  said 1 "has no secret"
  all_go_on
  nothing_left_anywhere
  serves_and_is_killed_at lock.after
  joined_verify
}

# bats test_tags=long
@test "the tool that serves is killed at any step: all go on" {
  start_joined_nodes 2 --size 256K
  serves_and_is_killed_at checkpoint.after suspend.verified
  there_and_back 1
  joined_verify
}

# bats test_tags=long
@test "the tool that serves, and one that does not, stand still for some seconds, and are waited for" {
  start_joined_nodes 2 --size 256K
  for i in 0 1; do
    TOOLS=()
    STASIS_FAULT=checkpoint.after:stop begin $i suspend --timeout 30s
    begin $((1 - i)) suspend --timeout 30s
    wait_until 60 is_stopped
    sleep 4
    kill -CONT "$stopped"
    come_to 0 0 1
    all_are_free
    together 0 resume
    all_go_on
  done
  joined_verify
}

# bats test_tags=long
@test "a network that is cut for some seconds is waited for; one that stays so brings all back" {
  start_joined_nodes 2 --size 256K
  for seconds in 3 20; do
    TOOLS=()
    # Neither has said that it is done.
    local held=()
    for i in 0 1; do
      STASIS_FAULT=checkpoint.after:stop begin $i suspend --timeout 30s
    done
    wait_until 60 are_stopped 2
    cut_off 1
    kill -CONT "${held[@]}"
    if ((seconds == 3)); then
      sleep 3
      join_again 1
      come_to 0 0 1
      all_are_free
      together 0 resume
    else
      come_to 7 0 1
      said 0 "nothing was heard of part node1"
      said 1 "the other parts could not be told"
      join_again 1
      none_is_free
    fi
    all_go_on
    nothing_left_anywhere
  done
  joined_verify
}

# bats test_tags=long
@test "a job of three nodes meets at an address fifty times" {
  start_joined_nodes 3 --size 256K --talk
  there_and_back 50
  joined_verify
}
