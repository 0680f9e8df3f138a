#!/usr/bin/env bats
# What stasis doctor says of namespaces and cgroups of the tree.

load helpers
load stasis_lib
load doctor_lib

setup() { setup_doctor; }
teardown() { end_doctor; }

@test "told: what a restore of a network namespace leaves out" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  (exec_on_gpu setsid unshare --net stasis-workload memory --size 1M --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights own-network)" yellow
  # From within it is not CRIU's affair.
  capture nsenter --target "$TARGET" --net stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights own-network)" ""
}

@test "devices and routes of its own network that no restore brings back are told" {
  need_root "network namespaces"
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  (exec_on_gpu setsid unshare --net stasis-workload memory --size 1M --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  inside() { nsenter --target "$TARGET" --net "$@"; }
  inside ip link add name inner type veth peer name outer
  inside ip address add 10.77.0.1/24 dev inner
  inside ip link set inner up
  inside ip link set outer up
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights network-route)" ""
  [[ $out != *"connects with nothing"* ]] || return 1
  inside ip link set outer down
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights network-route)" red
  assert_contains "$out" "no restore succeeds: inner"
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  inside ip address flush dev inner
  inside unshare --net sleep 300 3>&- &
  local other=$!
  echo "$other" >>"$targets"
  wait_until 60 test "$(readlink "/proc/$TARGET/ns/net")" != "$(readlink "/proc/$other/ns/net")"
  inside ip link set outer netns "$other"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_contains "$out" "connects with nothing: inner (veth)"
  if ! inside ip link add name above link inner type macvlan mode bridge; then skip "no macvlan here"; fi
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "that a restore cannot make: above (macvlan)"
  target_goes_on
}

@test "user and mount namespaces of its own are refused, and one of cgroups is told" {
  need_root "namespaces"
  local how
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  for how in "--user --map-root-user" --mount --cgroup; do
    # Opened in it: no file of it is on a mount of before.
    # shellcheck disable=SC2016,SC2086 # words; of the inner shell
    (exec_on_gpu setsid unshare $how bash -c 'for fd in {3..30}; do eval "exec $fd>&-"; done; exec </dev/null >"$1" 2>&1
      exec stasis-workload memory --size 1M --status "$2"' - "$TARGET_LOG" "$TARGET_STATUS") </dev/null >/dev/null 2>&1 3>&- &
    TARGET=$!
    echo "$TARGET" >>"$targets"
    wait_until 60 target_is_up
    capture stasis doctor "$TARGET" --no-trial --json
    case $how in
      --cgroup) assert_equal "$(lights cgroup)" yellow ;;
      --mount) assert_equal "$(lights namespace)" red ;;
      *) assert_equal "$(lights user-namespace)" red ;;
    esac
    [[ $how == --cgroup ]] || refused 9 undumpable dump "$TARGET" --images-dir "$image"
    target_goes_on
    if [[ $how == --mount ]]; then
      capture nsenter --target "$TARGET" --mount stasis doctor "$TARGET" --no-trial --json
      assert_equal "$(lights namespace)" ""
    fi
    end_targets
    rm "$TARGET_STATUS"
  done
}

@test "red: a PID namespace without its first process" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  # shellcheck disable=SC2016
  (exec_on_gpu unshare --pid --fork --kill-child bash -c 'setsid stasis-workload memory --size 1M --status "$1" & wait' \
    bash "$TARGET_STATUS") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 target_is_up
  TARGET=$(pgrep -f "stasis-workload memory --size 1M --status $TARGET_STATUS" | tail -n 1)
  undumpable pid-namespace "whose first process is not part of the tree"
}

# A restore gave it another number, and refused its own image after the job was gone.
@test "red: the first process of a PID namespace, from outside" {
  TARGET_STATUS=$BATS_TEST_TMPDIR/status TARGET_LOG=$BATS_TEST_TMPDIR/log
  # shellcheck disable=SC2016
  (exec_on_gpu unshare --pid --fork --kill-child stasis-workload memory --size 1M --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  at_end_kill $!
  wait_until 60 target_is_up
  TARGET=$(pgrep -f "^stasis-workload memory --size 1M --status $TARGET_STATUS" | tail -n 1)
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights pid-namespace)" red
  refused 9 undumpable dump "$TARGET" --images-dir "$image"
  assert_contains "$err" "is the first process of a container's PID namespace"
  unharmed
}

# bats test_tags=long
@test "yellow: a restore from a cgroup that has no room for as many processes" {
  local group=/sys/fs/cgroup/pids/stasis-test-${BATS_RUN_TMPDIR##*/}
  [[ -d /sys/fs/cgroup/pids ]] || group=/sys/fs/cgroup/stasis-test-${BATS_RUN_TMPDIR##*/}
  mkdir "$group" 2>/dev/null || skip "no cgroup can be made here"
  cgroups+=("$group")
  start_with 'import threading
for _ in range(40): threading.Thread(target=lambda: time.sleep(300), daemon=True).start()'
  echo 30 2>/dev/null >"$group/pids.max" || skip "no limit of processes can be set here"
  # shellcheck disable=SC2016
  local inside=(bash -c 'echo $$ >"$1/cgroup.procs" && shift && exec stasis "$@"' bash "$group")
  capture "${inside[@]}" doctor "$TARGET" --no-trial --json
  assert_equal "$(lights limit-processes)" yellow
  assert_equal "$(json "[f['light'] for f in d['machine'] if f['id'] == 'limit-processes']")" "['yellow']"
  capture stasis doctor "$TARGET" --no-trial --json
  assert_equal "$(lights limit-processes)" green
  dump_it
  capture "${inside[@]}" restore --images-dir "$image" --detach
  ((status != 0))
  restore_it
  target_goes_on
}
