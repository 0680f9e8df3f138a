# Ranks that write into each other's memory (stasis_sharing.bats, stasis_sharing_back.bats).

# start_ranks COUNT [ARGUMENT...]: under the agent, with what NCCL has open unless $LIKE is empty. Sets TARGET to their parent and CHILDREN to them.
start_ranks() {
  local count=$1
  shift
  LD_PRELOAD=$agent start_target collective --children "$count" --size ${SIZE:-256K} --pause-ms 2 --sharing ${LIKE---like-nccl} "$@"
  mapfile -t CHILDREN < <(children_of "$TARGET")
  assert_equal "${#CHILDREN[@]}" "$count" "ranks"
  at_end_kill "${CHILDREN[@]}"
  target_goes_on
}
