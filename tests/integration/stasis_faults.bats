#!/usr/bin/env bats
# Fault points by themselves, and what tests/integration/fault_matrix.py cannot say of a single process: a tree
# of which a killed dump has ended a part; which tool is refused while another works.

load helpers
load stasis_lib

setup() {
  setup_stasis
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
}
teardown() { end_stasis; }

@test "a fault that cannot be is refused, and one that is not reached is told" {
  start_target memory --size 4M
  STASIS_FAULT=lock.befor:kill refused 2 usage suspend "$TARGET"
  STASIS_FAULT=lock.before:explode refused 2 usage suspend "$TARGET"
  STASIS_FAULT=journal.finish:error refused 2 usage suspend "$TARGET"
  in_state running
  STASIS_FAULT=criu.started:kill done_by suspend "$TARGET"
  assert_contains "$err" "criu.started was not reached"
  done_by resume "$TARGET"
  STASIS_FAULT=lock.after:error refused 1 internal suspend "$TARGET"
  assert_contains "$err" lock.after
  in_state running
  target_verifies
}

# becomes_another_at POINT VERB...: of two processes that use CUDA, the second becomes another program when the tool has
# come there. Sets $status, $out and $err.
becomes_another_at() {
  local point=$1 tool
  shift
  start_script becomes_another.py
  WORKER=$(children_of "$TARGET")
  at_end_kill "$WORKER"
  STASIS_FAULT=$point:stop timeout -k 5 60 stasis "$@" "$TARGET" >"$BATS_TEST_TMPDIR/tool.out" 2>"$BATS_TEST_TMPDIR/tool.err" 3>&- &
  tool=$!
  wait_until 60 stopped_below "$tool"
  kill -USR1 "$WORKER"
  wait_until 60 is_sleep "$WORKER"
  kill -CONT "$(pgrep -P "$tool")"
  status=0
  wait "$tool" || status=$?
  err=$(<"$BATS_TEST_TMPDIR/tool.err")
}
is_sleep() { [[ $(<"/proc/$1/comm") == sleep ]]; }

@test "a process that becomes another program before the lock is not taken for one that has ended" {
  need_root "CRIU"
  local way
  for way in "stasis run --" ""; do
    BEFORE=$way becomes_another_at group.opened dump --images-dir "$image"
    ((status == 0)) || { echo "$err" >&2; return 1; }
    assert_contains "$err" "process $WORKER (python3) has just become another program (exec); the dump is tried again"
    wait_until 60 number_is_free
    restore_it
    target_goes_on
    is_sleep "$WORKER"
    end_targets
    rm -r "$image"
    BEFORE=$way becomes_another_at group.opened suspend
    ((status == 0)) || { echo "$err" >&2; return 1; }
    assert_contains "$err" "has just become another program (exec)"
    in_state checkpointed
    done_by resume "$TARGET"
    target_goes_on
    end_targets
  done
}

@test "a dump that was killed when its tree had begun to end is finished by recover" {
  need_root "CRIU"
  start_tree --size 4M
  STASIS_FAULT=dump.ending:kill capture timeout 60 stasis dump "$TARGET" --images-dir "$image"
  assert_equal "$status" 137
  # It missed the answer and lets the tree go.
  wait_until 60 untraced
  # As if it had been killed in the middle of ending it. The root would end itself when it sees that.
  kill -STOP "$TARGET"
  kill -KILL "${CHILDREN[0]}"
  refused 7 busy suspend "$TARGET"
  assert_contains "$err" "stasis recover $TARGET"
  done_by recover --all
  assert_contains "$out" "past the point of no return"
  wait_until 60 number_is_free
  for child in "${CHILDREN[@]}"; do wait_until 60 number_is_free "$child"; done
  nothing_left
  restore_it
  target_goes_on
  restored_verifies 3
}

untraced() { grep -q "^TracerPid:[[:space:]]*0" "/proc/$TARGET/status"; }

@test "what lives of a tree whose image was replaced by another one is brought back, and not ended" {
  need_root "CRIU"
  start_tree --size 4M
  STASIS_FAULT=dump.ending:kill capture timeout 60 stasis dump "$TARGET" --images-dir "$image"
  assert_equal "$status" 137
  wait_until 60 untraced
  rm -r "$image"
  stasis-make-image "$image"
  kill -STOP "$TARGET"
  kill -KILL "${CHILDREN[0]}"
  done_by recover --all
  assert_contains "$out" "${CHILDREN[1]} is running"
  in_state running "${CHILDREN[1]}"
  nothing_left
}

@test "a dump that was killed when its tree still lived whole is undone by recover, and the image is kept" {
  need_root "CRIU"
  start_tree --size 4M
  STASIS_FAULT=dump.ending:kill capture timeout 60 stasis dump "$TARGET" --images-dir "$image"
  done_by recover "$TARGET"
  assert_contains "$out" "is complete and is kept"
  in_state running "${CHILDREN[@]}"
  nothing_left
  target_goes_on
  target_verifies
}

@test "the second tool is refused, by each verb, until the first has ended or is recovered" {
  start_target memory --size 4M
  STASIS_SIM_FAULTS="checkpoint:delay=120s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$!
  at_end_kill "$tool"
  wait_until 60 works_on_it "$tool"
  for verb in suspend resume recover "dump --images-dir $image"; do
    # shellcheck disable=SC2086
    refused 7 busy $verb "$TARGET"
    assert_contains "$err" "stasis suspend\` (process $tool)"
  done
  done_by recover --all
  assert_contains "$out" "nothing to recover"
  no_image
  kill -KILL "$tool"
  wait "$tool" 2>/dev/null || true
  done_by recover --all
  in_state running
  nothing_left
  target_goes_on
  target_verifies
}

@test "a worker that was left in the middle of a system call of ours goes on after recover, with no record of it" {
  need_root "CRIU"
  start_target loader
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  STASIS_FAULT=replace.file:kill capture timeout 60 stasis dump "$TARGET" --images-dir "$image"
  assert_equal "$status" 137
  rm "$STASIS_STATE_DIR"/*.json
  done_by recover "$TARGET"
  in_state running
  target_goes_on
  target_verifies
}

@test "a recover that is at work is named itself, and not the dead whose work it does" {
  start_target memory --size 4M
  STASIS_FAULT=suspend.verified:kill capture stasis suspend "$TARGET"
  assert_equal "$status" 137
  STASIS_SIM_FAULTS="restore:delay=120s" stasis recover "$TARGET" >/dev/null 2>&1 3>&- &
  local tool=$!
  at_end_kill "$tool"
  wait_until 60 held_up
  local verb
  for verb in recover suspend; do
    refused 7 busy "$verb" "$TARGET"
    assert_contains "$err" "\`stasis recover\` (process $tool) is working on process $TARGET"
  done
  kill -KILL "$tool"
  wait "$tool" 2>/dev/null || true
  done_by recover "$TARGET"
  target_goes_on
  target_verifies
}

@test "where the state directory is full a suspended process is resumed all the same" {
  need_root "a small file system"
  local verb
  start_target memory --size 4M
  export STASIS_STATE_DIR=$BATS_TEST_TMPDIR/small
  mkdir -m 700 "$STASIS_STATE_DIR"
  mount -t tmpfs -o size=16k,mode=0700 none "$STASIS_STATE_DIR"
  echo "$STASIS_STATE_DIR" >>"$BATS_TEST_TMPDIR/mounts"
  for verb in resume recover; do
    done_by suspend "$TARGET"
    dd if=/dev/zero of="$STASIS_STATE_DIR/fill" bs=4k 2>/dev/null || true
    done_by "$verb" "$TARGET"
    assert_contains "$err" "full, or read-only"
    in_state running
    rm "$STASIS_STATE_DIR/fill"
  done
  target_goes_on
}

@test "where the state directory has become read-only a suspended process is resumed all the same" {
  need_root "a small file system"
  local verb
  start_target memory --size 4M
  export STASIS_STATE_DIR=$BATS_TEST_TMPDIR/small
  mkdir -m 700 "$STASIS_STATE_DIR"
  mount -t tmpfs -o size=1m,mode=0700 none "$STASIS_STATE_DIR"
  echo "$STASIS_STATE_DIR" >>"$BATS_TEST_TMPDIR/mounts"
  for verb in resume recover; do
    done_by suspend "$TARGET"
    mount -o remount,ro "$STASIS_STATE_DIR"
    capture stasis suspend "$TARGET"
    assert_contains "$err" "name another state directory by STASIS_STATE_DIR"
    done_by "$verb" "$TARGET"
    assert_contains "$err" "full, or read-only"
    in_state running
    mount -o remount,rw "$STASIS_STATE_DIR"
  done
  target_goes_on
}

@test "ps does not list the stasis that moves the memory of a program" {
  start_target memory --size 200M
  (for _ in 1 2; do stasis suspend "$TARGET" && stasis resume "$TARGET"; done) >/dev/null 2>&1 3>&- &
  local tool=$! seen=0
  while kill -0 "$tool" 2>/dev/null; do
    capture stasis ps
    assert_contains "$out" "$TARGET"
    [[ $out != *"stasis suspend $TARGET"* && $out != *"stasis resume $TARGET"* ]]
    seen=$((seen + 1))
  done
  wait "$tool"
  ((seen > 0))
}

@test "root does not run a criu that another user has put there" {
  need_root "two users"
  local home=$BATS_TEST_TMPDIR/home
  mkdir -p "$home/.cache/stasis/criu/usr/sbin"
  printf '#!/bin/sh\nid >%s/ran\n' "$BATS_TEST_TMPDIR" >"$home/.cache/stasis/criu/usr/sbin/criu"
  chmod 755 "$home/.cache/stasis/criu/usr/sbin/criu"
  chown -R 65534 "$home"
  STASIS_CRIU='' XDG_CACHE_HOME='' HOME=$home capture unshare --mount sh -c '
    mkdir "$1/empty"
    for sbin in /usr/sbin /opt/stasis/criu; do ! [ -e $sbin/criu ] && ! [ -e $sbin/usr/sbin/criu ] || mount --bind "$1/empty" $sbin; done
    exec stasis doctor --no-trial --json' sh "$BATS_TEST_TMPDIR"
  [[ ! -e $BATS_TEST_TMPDIR/ran ]]
  assert_contains "$out" "belongs to user 65534"
}

@test "root runs no criu to which another user's link leads, whatever it leads to now" {
  need_root "two users"
  local home=$BATS_TEST_TMPDIR/home roots=$BATS_TEST_TMPDIR/roots
  mkdir -p "$home/.cache/stasis/criu/usr/sbin" "$roots"
  # Root's own, which says that it was run. Between the look and the start the user could put
  # another one in the place of the link.
  printf '#!/bin/sh\nid >%s/ran\n' "$BATS_TEST_TMPDIR" >"$roots/criu"
  chmod 755 "$roots/criu"
  ln -s "$roots/criu" "$home/.cache/stasis/criu/usr/sbin/criu"
  chown -hR 65534 "$home"
  STASIS_CRIU='' XDG_CACHE_HOME='' HOME=$home capture unshare --mount sh -c '
    mkdir "$1/empty"
    for sbin in /usr/sbin /opt/stasis/criu; do ! [ -e $sbin/criu ] && ! [ -e $sbin/usr/sbin/criu ] || mount --bind "$1/empty" $sbin; done
    exec stasis doctor --no-trial --json' sh "$BATS_TEST_TMPDIR"
  [[ ! -e $BATS_TEST_TMPDIR/ran ]]
  assert_contains "$out" "is not run: $home belongs to user 65534"
}

@test "of a criu that root's link leads to, the file itself is run" {
  need_root "two users"
  STASIS_CRIU='' XDG_CACHE_HOME='' HOME=/nowhere capture unshare --mount sh -c '
    mount -t tmpfs -o mode=755 none /opt
    umask 022
    mkdir -p /opt/stasis/criu/usr/sbin /opt/real
    printf "#!/bin/sh\nexit 1\n" >/opt/real/criu
    chmod 755 /opt/real/criu
    ln -s ../../../../real/criu /opt/stasis/criu/usr/sbin/criu
    exec stasis doctor --no-trial --json'
  assert_contains "$out" "/opt/real/criu does not answer"
}

@test "in a namespace of a user, the criu of the system is run" {
  need_root "two users"
  local criu=$BATS_TEST_TMPDIR/criu
  cp "$STASIS_CRIU" "$criu"
  STASIS_CRIU='' XDG_CACHE_HOME='' HOME=/nowhere capture unshare --mount sh -c '
    mount -t tmpfs -o mode=755 none /opt
    umask 022
    mkdir -p /opt/stasis/criu/usr/sbin && install -m 755 "$1" /opt/stasis/criu/usr/sbin/criu
    exec setpriv --reuid 65533 --regid 65533 --clear-groups unshare --user --map-root-user stasis doctor --no-trial --json' sh "$criu"
  [[ $out != *"belongs to user"* ]]
  assert_contains "$out" "/opt/stasis/criu/usr/sbin/criu"
}

@test "two tools with state directories of their own, as root and a user have, do not work on one process at once" {
  start_target memory --size 20M
  mkdir -m 700 "$BATS_TEST_TMPDIR/other"
  STASIS_SIM_FAULTS="checkpoint:delay=2s" stasis suspend "$TARGET" >/dev/null 2>&1 3>&- &
  local first=$!
  wait_until 60 held_up
  STASIS_STATE_DIR=$BATS_TEST_TMPDIR/other refused 7 busy suspend "$TARGET"
  wait "$first"
  in_state checkpointed
  STASIS_STATE_DIR=$BATS_TEST_TMPDIR/other done_by resume "$TARGET"
  target_goes_on
}
