# Nodes of a job as namespaces of this machine, with simulated GPUs of their own, and a tool in each.
# NODES: the host's numbers of their first processes. ROOTS: what the tools act on, by its number on its
# node [1]. RANKS: how many there are on each. group: where the tools meet; secret_of_group: the file of
# its secret, if it is an address.

setup_nodes() {
  setup_stasis
  need_root "namespaces"
  unshare --pid --fork --mount-proc --net --uts true 2>/dev/null || skip "no namespaces can be made here"
  group=$BATS_TEST_TMPDIR/group
}

has_child() { [[ -n $(children_of "$1") ]]; }
all_are_past() {
  local i r
  for ((i = 0; i < ${#NODES[@]}; i++)); do
    for ((r = 0; r < RANKS; r++)); do
      (($(target_round "$BATS_TEST_TMPDIR/status$i.$r" 2>/dev/null || echo 0) > $1)) || return 1
    done
  done
}
# What the ranks' children tell each other besides (--talk) comes, too.
talk_goes_on() {
  local i=0 file
  for file in "$BATS_TEST_TMPDIR"/status*.talk.*; do
    [[ ! -e $file || $(cat "$file") > ${talked[i++]} ]] || return 1
  done
}
all_go_on() {
  local before file talked=()
  for file in "$BATS_TEST_TMPDIR"/status*.talk.*; do [[ ! -e $file ]] || talked+=("$(cat "$file")"); done
  before=$(target_round "$BATS_TEST_TMPDIR/status0.0")
  wait_until 60 all_are_past $((before + 1)) || {
    tail -n 3 "$BATS_TEST_TMPDIR"/node*.log >&2
    return 1
  }
  wait_until 60 talk_goes_on || { echo "the ranks' children hear nothing of each other" >&2; return 1; }
}

# on_node I COMMAND...
on_node() {
  STASIS_SIM_DIR=$BATS_TEST_TMPDIR/sim$1 STASIS_STATE_DIR=$BATS_TEST_TMPDIR/state$1 \
    nsenter --target "${NODES[$1]}" --pid --mount --net --uts "${@:2}"
}
image_of() { echo "$BATS_TEST_TMPDIR/image$1"; }
# begin I VERB ARGUMENT...: that node's tool, as a part; a dump to image_of I, and a restore from there.
begin() {
  local i=$1 verb=$2
  shift 2
  local subject=("${ROOTS[$i]:-1}")
  [[ $verb != restore ]] || subject=(--detach)
  [[ -z ${secret_of_group:-} ]] || subject+=(--group-secret "$secret_of_group")
  [[ $verb != restore && $verb != dump ]] || subject+=(--images-dir "$(image_of "$i")")
  on_node "$i" timeout -k 5 120 stasis "$verb" "${subject[@]}" --group "$group" --parts "${PARTS:-${#NODES[@]}}" --part "node$i" "$@" \
    </dev/null >"$BATS_TEST_TMPDIR/out$i" 2>&1 3>&- &
  TOOLS[i]=$!
}
# come_to STATUS [I...]: those tools end with that status.
come_to() {
  local expected=$1 i got
  shift
  for i in "$@"; do
    got=0
    wait "${TOOLS[$i]}" || got=$?
    ((got == expected)) || {
      echo "node $i: status $got, expected $expected" >&2
      cat "$BATS_TEST_TMPDIR"/out* >&2
      return 1
    }
  done
}
# together STATUS VERB ARGUMENT...: by all nodes.
together() {
  local status=$1 i
  shift
  TOOLS=()
  for i in "${!NODES[@]}"; do begin "$i" "$@"; done
  come_to "$status" "${!NODES[@]}"
}
said() { assert_contains "$(cat "$BATS_TEST_TMPDIR/out$1")" "$2"; }
used_on() { STASIS_SIM_DIR=$BATS_TEST_TMPDIR/sim$1 gpu_used; }
all_are_free() { for i in "${!NODES[@]}"; do assert_equal "$(used_on "$i")" 0 "GPU memory in use on node $i"; done; }
none_is_free() { for i in "${!NODES[@]}"; do (($(used_on "$i") > 0)) || { echo "node $i is suspended" >&2; return 1; }; done; }
all_verify() {
  local i node
  kill -TERM "${NODES[@]}"
  for node in "${NODES[@]}"; do wait_until 30 number_is_free "$node"; done
  for i in "${!NODES[@]}"; do
    assert_equal "$(grep -c '^verified' "$BATS_TEST_TMPDIR/node$i.log")" "$RANKS" "verified on node $i" || {
      cat "$BATS_TEST_TMPDIR/node$i.log" >&2
      return 1
    }
  done
}
nothing_left_anywhere() {
  local i
  [[ ! -e $group ]] || { ls "$group" >&2; return 1; }
  for i in "${!NODES[@]}"; do
    assert_equal "$(find "$BATS_TEST_TMPDIR/state$i" -name '*.json' -path '*/[0-9]*@*.json' -not -path '*suspended*')" ""
  done
}

# are_stopped COUNT: so many tools are that a fault point has stopped. Sets `held` to them.
are_stopped() {
  local status
  held=()
  for status in /proc/[0-9]*/status; do
    { grep -q '^Name:.stasis$' "$status" && grep -q '^State:.T' "$status"; } 2>/dev/null || continue
    held+=("${status//[^0-9]/}")
  done
  ((${#held[@]} >= $1))
}
# Sets `stopped` to such a tool.
is_stopped() { local held && are_stopped 1 && stopped=${held[0]}; }

# --- Nodes that are dumped: the job of a node has a number of its own, and a network joins them.

# start_network COUNT: a hub, with an interface for each node to come. Sets HUB.
start_network() {
  (exec unshare --net sleep 600) </dev/null >/dev/null 2>&1 3>&- &
  HUB=$!
  echo "$HUB" >>"$targets"
  wait_until 60 has_network_of_its_own "$HUB"
  at_hub ip link add name hub type bridge 2>/dev/null || skip "this kernel joins no networks (bridge)"
  at_hub ip link set hub up
}
has_network_of_its_own() {
  local network
  network=$(readlink "/proc/$1/ns/net") && [[ -n $network && $network != "$(readlink /proc/self/ns/net)" ]]
}
at_hub() { nsenter --target "$HUB" --net "$@"; }
# join_network I: node I gets the address 10.77.0.(I+1).
join_network() {
  at_hub ip link add name "port$1" type veth peer name cable netns "${NODES[$1]}" 2>/dev/null ||
    skip "this kernel joins no networks (veth)"
  at_hub ip link set "port$1" master hub up
  nsenter --target "${NODES[$1]}" --net ip address add "10.77.0.$(($1 + 1))/24" dev cable
  nsenter --target "${NODES[$1]}" --net ip link set lo up
  nsenter --target "${NODES[$1]}" --net ip link set cable up
}
cut_off() { at_hub ip link set "port$1" down; }
join_again() { at_hub ip link set "port$1" up; }

# start_joined_nodes COUNT [ARGUMENT...]: with a rank each, which meet by TCP in every round; RANK_PRELOAD
# is their LD_PRELOAD, BEFORE_RANK what the shell of a node ($1) does before.
start_joined_nodes() {
  local count=$1 i unshare
  shift
  NODES=() ROOTS=() RANKS=1
  start_network
  for ((i = 0; i < count; i++)); do
    mkdir -p "$BATS_TEST_TMPDIR/sim$i" "$BATS_TEST_TMPDIR/state$i"
    # shellcheck disable=SC2016
    (
      export STASIS_SIM_DIR=$BATS_TEST_TMPDIR/sim$i
      exec_on_gpu setsid unshare --pid --fork --kill-child --mount-proc --net --uts bash -c '
        # What is open on mounts of before, CRIU does not find here.
        for fd in /proc/$$/fd/*; do ((${fd##*/} <= 2)) || eval "exec ${fd##*/}>&-"; done
        hostname "node$1"
        while [[ ! -e $3/go ]]; do sleep 0.05; done
        # A number that a tool of the restore does not have.
        echo 3000 >/proc/sys/kernel/ns_last_pid
        eval "${BEFORE_RANK:-}"
        LD_PRELOAD=$4 setsid stasis-workload rank --meeting tcp:10.77.0.1:7000 --rank "$1" --ranks "$2" \
          --seed 7 --pause-ms 2 --status "$3/status$1.0" "${@:5}" </dev/null >"$3/rank$1.log" 2>&1 &
        echo $! >"$3/pid$1"
        while :; do sleep 0.2; done' bash "$i" "$count" "$BATS_TEST_TMPDIR" "${RANK_PRELOAD:-}" "$@"
    ) </dev/null >"$BATS_TEST_TMPDIR/node$i.log" 2>&1 3>&- &
    unshare=$!
    echo "$unshare" >>"$targets"
    wait_until 60 has_child "$unshare"
    NODES+=("$(children_of "$unshare")")
    at_end_kill "${NODES[@]}"
    join_network "$i"
  done
  : >"$BATS_TEST_TMPDIR/go"
  for ((i = 0; i < count; i++)); do
    wait_until 60 test -s "$BATS_TEST_TMPDIR/pid$i"
    ROOTS+=("$(cat "$BATS_TEST_TMPDIR/pid$i")")
  done
  wait_until 60 all_are_past 0
}
runs_on() { nsenter --target "${NODES[$1]}" --pid --mount test -e "/proc/${ROOTS[$1]}"; }
# Ended, and its number free again or soon: the shell of its node has yet to hear of it.
has_ended_on() {
  local state
  state=$(nsenter --target "${NODES[$1]}" --pid --mount sed -n 's/^State:\t//p' "/proc/${ROOTS[$1]}/status" 2>/dev/null) || return 0
  [[ -z $state || $state == Z* ]]
}
none_runs() {
  local i
  for i in "${!NODES[@]}"; do
    has_ended_on "$i" || { echo "the rank of node $i is there" >&2; return 1; }
    wait_until 60 eval "! runs_on $i"
  done
}
joined_verify() {
  local i
  for i in "${!NODES[@]}"; do nsenter --target "${NODES[$i]}" --pid --mount kill -TERM "${ROOTS[$i]}" 2>/dev/null || true; done
  for i in "${!NODES[@]}"; do
    wait_until 60 has_verified "$i" || { cat "$BATS_TEST_TMPDIR"/rank*.log >&2; return 1; }
  done
}
has_verified() { grep -q '^verified' "$BATS_TEST_TMPDIR/rank$1.log"; }
