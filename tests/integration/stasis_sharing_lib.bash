# Programs that share GPU memory. A file of tests loads helpers, stasis_lib and this, and has
#   setup() { setup_sharing; }
#   teardown() { end_stasis; }

setup_sharing() {
  setup_stasis
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
  export STASIS_SIM_EXPORTS_RESTORED_BELOW=2M # what the driver has moved cannot be given out any more
}

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
