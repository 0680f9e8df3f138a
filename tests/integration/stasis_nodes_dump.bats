#!/usr/bin/env bats
# A job of several nodes is dumped and restored: all parts, or none.

load helpers
load stasis_lib
load stasis_nodes_lib

setup() { setup_nodes; }
teardown() {
  end_stasis
  # Of a test: a folder of real devices is not empty.
  rmdir /dev/infiniband 2>/dev/null || true
}

no_image() {
  local i
  for i in "${!NODES[@]}"; do
    [[ ! -e $(image_of "$i") && -z $(compgen -G "$(image_of "$i").partial*") ]] || { echo "there is an image of node $i" >&2; return 1; }
  done
}
remove_images() { for i in "${!NODES[@]}"; do rm -r "$(image_of "$i")"; done; }

there_and_back() {
  local n
  for ((n = 0; n < $1; n++)); do
    together 0 dump --timeout 30s --sync none
    none_runs
    all_are_free
    together 0 restore
    all_go_on
    [[ ! -e $group ]]
    remove_images
  done
  together 0 dump --timeout 30s --leave-running
  all_go_on
  nothing_left_anywhere
  joined_verify
}

@test "a job of three nodes is dumped and restored together, with what is on the way between them" {
  start_joined_nodes 3 --size 256K --talk
  there_and_back "$(times 2 3)"
}

@test "the same by their agents, and by two dumps with the same directory" {
  RANK_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so start_joined_nodes 2 --size 4M --talk
  there_and_back 2
}

@test "what one part still sends while another is saved already is not lost" {
  start_joined_nodes 2 --size 256K --talk
  TOOLS=()
  begin 0 dump --timeout 30s --sync none
  STASIS_FAULT=part.locked:stop begin 1 dump --timeout 30s --sync none
  wait_until 60 is_stopped
  # The criu of node 1 waits, and so its rank's child goes on, while node 0 is saved.
  for criu in $(children_of "$stopped"); do [[ $(cat "/proc/$criu/comm") != criu ]] || break; done
  kill -STOP "$criu"
  kill -CONT "$stopped"
  wait_until 60 test -e "$(image_of 0)/manifest.json"
  sleep 0.5
  kill -CONT "$criu"
  come_to 0 0 1
  together 0 restore
  all_go_on
  joined_verify
}

# bats test_tags=long
@test "a job of three nodes is dumped and restored together twenty times" {
  start_joined_nodes 3 --size 256K --talk
  there_and_back 20
}

# A stand-in: RDMA devices are told by their name.
@test "a part with an RDMA device open is refused, and one whose process is not there; all go on" {
  BEFORE_RANK='[[ $1 == 0 ]] || { mkdir -p /dev/infiniband; mount -t tmpfs rdma /dev/infiniband; exec 9<>/dev/infiniband/uverbs0; }' \
    start_joined_nodes 2 --size 256K
  together 8 suspend --timeout 30s
  said 0 "part node1"
  said 1 "NCCL_IB_DISABLE=1"
  together 8 dump --timeout 30s
  TOOLS=()
  begin 0 dump --timeout 30s
  local root=${ROOTS[1]}
  ROOTS[1]=4000000
  begin 1 dump --timeout 30s
  ROOTS[1]=$root
  come_to 3 1
  wait "${TOOLS[0]}" && return 1
  said 0 "given up by part node1: "
  all_go_on
  none_is_free
  together 0 suspend --timeout 30s --ignore-obstacles
  together 0 resume
  all_go_on
  joined_verify
}

@test "connections that lead to none of the parts: refused, unless the user keeps or drops them" {
  start_joined_nodes 3 --size 256K
  unset "NODES[2]"
  together 9 dump --timeout 30s --sync none
  said 0 "a TCP connection of part node0 (10.77.0.1:7000 10.77.0.3:"
  said 1 "leads to no other part"
  all_go_on
  nothing_left_anywhere
  # To restore a part alone its connections have to be given up.
  together 0 dump --timeout 30s --sync none --leave-running --tcp-established --network-lock skip
  all_go_on
  run on_node 0 stasis restore --detach --images-dir "$(image_of 0)"
  assert_equal "$status" 2
  assert_contains "$output" "is part node0 of 2"
}

@test "where the network is cut the tools do not quiesce the job, and it goes on; later they dump and restore it all the same" {
  start_joined_nodes 2 --size 256K --talk
  cut_off 1
  together 7 dump --timeout 5s --sync none
  said 0 "node1"
  said 0 "was not quiesced within 5000 ms"
  none_is_free
  no_image
  join_again 1
  all_go_on
  TOOLS=()
  begin 0 dump --timeout 30s --sync none
  STASIS_SIM_FAULTS=checkpoint:delay=2s begin 1 dump --timeout 30s --sync none
  wait_until 60 grep -qs still "$group/rest"
  cut_off 1
  come_to 0 0 1
  none_runs
  together 0 restore
  join_again 1
  all_go_on
  joined_verify
}

@test "a part that is slow is waited for" {
  start_joined_nodes 2 --size 256K
  TOOLS=()
  begin 0 dump --timeout 30s --sync none
  STASIS_SIM_FAULTS=checkpoint:delay=3s begin 1 dump --timeout 30s --sync none
  come_to 0 0 1
  none_runs
  TOOLS=()
  begin 0 restore
  STASIS_SIM_FAULTS=restore:delay=3s begin 1 restore
  come_to 0 0 1
  all_go_on
  joined_verify
}

@test "what fails on one node, at any step of a dump, brings all back, and there is no image" {
  start_joined_nodes 2 --size 256K
  for at in group.opened $(sometimes checkpoint.after part.locked criu.post-dump) image.manifest dump.complete dump.ending; do
    TOOLS=()
    begin 0 dump --timeout 30s --sync none
    wait_until 60 test -e "$group/part.node0"
    STASIS_FAULT=$at:error begin 1 dump --timeout 30s --sync none
    come_to 7 0 || come_to 1 0
    come_to 1 1
    said 0 node1
    all_go_on
    none_is_free
    no_image
    nothing_left_anywhere
  done
  together 0 dump --timeout 30s --sync none
  for at in restore.verified $(sometimes criu.post-restore) restore.held $(sometimes restore.adopted) restore.back; do
    TOOLS=()
    begin 0 restore
    wait_until 60 test -e "$group/part.node0"
    STASIS_FAULT=$at:error begin 1 restore
    come_to 7 0 || come_to 1 0
    come_to 1 1
    said 0 node1
    none_runs
    all_are_free
    nothing_left_anywhere
  done
  together 0 restore
  all_go_on
  joined_verify
}

@test "a dump's tool that is killed: the others go on without an image, or all are dumped" {
  start_joined_nodes 2 --size 256K
  for at in checkpoint.after $(sometimes part.locked) dump.complete; do
    TOOLS=()
    begin 0 dump --timeout 30s --sync none
    wait_until 60 test -e "$group/part.node0"
    STASIS_FAULT=$at:kill begin 1 dump --timeout 30s --sync none
    come_to 7 0
    come_to 137 1
    said 0 "nothing was heard of part node1"
    capture on_node 1 stasis recover --all
    all_go_on
    none_is_free
    if [[ $at == dump.complete ]]; then
      # It is that part's, and complete.
      assert_contains "$out$err" "$(image_of 1) is complete and is kept"
      rm -r "$(image_of 1)"
    fi
    no_image
    rm -r "$group"
  done
  # All images are whole: that part's is one of them.
  TOOLS=()
  begin 0 dump --timeout 30s --sync none
  STASIS_FAULT=dump.finish:kill begin 1 dump --timeout 30s --sync none
  come_to 0 0
  come_to 137 1
  on_node 1 stasis recover --all >/dev/null 2>&1
  none_runs
  rm -r "$group"
  together 0 restore
  all_go_on
  joined_verify
}

@test "parts of different dumps are not restored together, nor one that is none" {
  start_joined_nodes 2 --size 256K
  together 0 dump --timeout 30s --sync none --leave-running
  mv "$(image_of 0)" "$(image_of 0).first"
  rm -r "$(image_of 1)"
  together 0 dump --timeout 30s --sync none
  mv "$(image_of 0)" "$(image_of 0).second"
  mv "$(image_of 0).first" "$(image_of 0)"
  together 2 restore
  said 0 "of different dumps"
  none_runs
  PARTS=3 begin 1 restore
  come_to 2 1
  said 1 "is the image of part node1 of 2"
  rm -r "$(image_of 0)"
  mv "$(image_of 0).second" "$(image_of 0)"
  # The other hears it.
  mv "$(image_of 0)" "$(image_of 0).away"
  together 10 restore
  said 0 "there is no image"
  said 1 "given up by part node0: there is no image"
  none_runs
  mv "$(image_of 0).away" "$(image_of 0)"
  # One that does not come.
  begin 0 restore --timeout 2s
  come_to 7 0
  said 0 "1 of 2 parts have come"
  none_runs
  together 0 restore
  all_go_on
  joined_verify
}
