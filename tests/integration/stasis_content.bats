#!/usr/bin/env bats
# Dumps of programs that have the agent: the content of their GPU memory goes straight into the image,
# and no process has it from then on. On the simulated driver with the real CRIU.
# Long because each test dumps the same kind of program, and reads its image with the same helpers.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
}
teardown() { end_stasis; }

# start_agent KIND [ARGUMENT...]: as start_target, with the agent in it.
start_agent() { LD_PRELOAD=$agent start_target "$@"; }

# Bytes of CRIU's files, and of the content, as they lie there.
criu_bytes() { du -sb "$image/criu" | cut -f1; }
content_bytes() { du -sb "$image/gpu" | cut -f1; }

killed_at() {
  STASIS_FAULT=$1:kill capture timeout 60 stasis "${@:2}"
  assert_equal "$status" 137 "$1"
}
need_fault_points() {
  [[ $(stasis list-fault-points) == *'"built_in": true'* ]] || skip "this build has no fault points"
}

partial_images() { compgen -G "$image.partial-*" || true; }

@test "the content goes into the image past the process, which stays small" {
  start_agent memory --size 64M
  dump_it --json
  assert_equal "$(json 'd["path"], d["direct_bytes"] >= 64 << 20')" "direct True"
  (($(content_bytes) > 60000000))
  (($(criu_bytes) < 32 << 20)) || { echo "CRIU's files have $(criu_bytes) bytes" >&2; return 1; }
  done_by inspect "$image" --verify
  restore_it --json
  assert_equal "$(json 'd["path"], d["direct_bytes"] >= 64 << 20')" "direct True"
  target_goes_on
  restored_verifies
  nothing_left
}

@test "a job that goes on gets its memory back from the image, again and again" {
  start_agent memory --size 24M
  local i
  for i in 1 2 3; do
    done_by dump "$TARGET" --images-dir "$image" --leave-running --force
    target_goes_on
  done
  in_state running
  kill -KILL "$TARGET"
  wait "$TARGET" || true
  restore_it
  target_goes_on
  restored_verifies
  nothing_left
}

@test "one that stays suspended keeps its content, and needs no image" {
  start_agent memory --size 24M
  done_by dump "$TARGET" --images-dir "$image" --leave-suspended
  [[ ! -e $image/gpu ]]
  rm -r "$image"
  done_by resume "$TARGET"
  target_goes_on
  target_verifies
}

@test "the processes of a tree have a stream each" {
  LD_PRELOAD=$agent start_tree --size 12M
  dump_it --json
  assert_equal "$(json 'd["direct_bytes"] >= 20 << 20')" True
  restore_it
  target_goes_on
  restored_verifies 3
}

@test "compressed or past the page cache, it comes back the same" {
  local options
  for options in "--compress lz4" "--compress zstd --direct-io" "--sync none --direct-io"; do
    start_agent memory --size 16M
    # shellcheck disable=SC2086 # words
    dump_it --force $options
    restore_it
    target_goes_on
    restored_verifies
  done
}

@test "a job that ends goes past the page cache on its way to the disk, one that runs on does not" {
  dd if=/dev/zero of="$BATS_TEST_TMPDIR/probe" bs=4096 count=1 oflag=direct status=none ||
    skip "this file system has no direct I/O"
  start_agent memory --size 16M
  local options
  for options in --leave-running "--leave-running --sync none"; do
    # shellcheck disable=SC2086 # words
    done_by dump "$TARGET" --images-dir "$image" --force --json $options
    assert_equal "$(json 'd["direct_io"]')" False "$options"
  done
  dump_it --force --json
  assert_equal "$(json 'd["direct_io"]')" True
  restore_it
  target_goes_on
  dump_it --force --json --no-direct-io
  assert_equal "$(json 'd["direct_io"]')" False
  restore_it
  target_goes_on
  restored_verifies
}

@test "compression is for what goes past the driver, and says so where nothing does" {
  start_target memory --size 4M
  done_by dump "$TARGET" --images-dir "$image" --compress lz4
  assert_contains "$err" "nothing is compressed"
}

@test "a base is for what goes past the driver, and says so where nothing does" {
  start_agent memory --size 16M
  done_by dump "$TARGET" --images-dir "$image" --leave-running
  local path
  for path in driver direct; do
    done_by dump "$TARGET" --images-dir "$image-$path" --base "$image" --leave-running --path "$path"
    if [[ $path == driver ]]; then
      assert_contains "$err" "nothing is deduplicated against $image: no GPU memory"
    else
      [[ $err != *"deduplicated"* ]] || { echo "$err" >&2; return 1; }
    fi
  done
  start_target memory --size 4M
  done_by dump "$TARGET" --images-dir "$image-plain" --base "$image" --json
  assert_contains "$(json 'd["notes"]')" "nothing is deduplicated against $image: no GPU memory"
}

# --- Damage

@test "content that proves wrong is named, and nothing is left of what was restored from it" {
  start_agent memory --size 16M
  dump_it
  local data
  data=$(compgen -G "$image/gpu/data-*" | head -1)
  cp "$data" "$BATS_TEST_TMPDIR/good"
  spoil_byte "$data" 5000
  refused 10 image-corrupt restore --images-dir "$image" --detach
  assert_contains "$err" "gpu/data-"
  wait_until 60 number_is_free
  gpu_is_free
  truncate -s 4096 "$data"
  refused 10 image-corrupt restore --images-dir "$image" --detach
  wait_until 60 number_is_free
  cp "$BATS_TEST_TMPDIR/good" "$data"
  restore_it
  target_goes_on
  restored_verifies
  nothing_left
}

@test "--verify first finds damage before anything is made, --verify late when it is needed" {
  start_agent memory --size 16M
  dump_it
  local file when
  for file in gpu/data-00 criu/pages-1.img; do
    spoil_byte "$image/$file" 100
    for when in first late; do
      refused 10 image-corrupt restore --images-dir "$image" --detach --verify "$when" --trace "$BATS_TEST_TMPDIR/trace"
      assert_contains "$err" "$file"
      [[ $when == first ]] || assert_contains "$err" "was ended"
      status=0
      grep -q '"name":"criu"' "$BATS_TEST_TMPDIR/trace" || status=$?
      [[ $when:$status == first:1 || $when:$status == late:0 ]] || { echo "$file, $when: $status" >&2; return 1; }
      number_is_free
    done
    spoil_byte "$image/$file" 100
  done
  refused 2 usage restore --images-dir "$image" --verify never
  restore_it --verify first
  target_goes_on
  restored_verifies
  nothing_left
}

# Its threads run when the driver has let them go, while the content is still on its way; what is in
# the memory by then none of them can come to.
@test "a program whose content proves wrong at its end has not worked on what came before" {
  start_agent memory --size 64M
  dump_it
  local data before fault
  data=$(compgen -G "$image/gpu/data-*" | head -1)
  before=$(target_round)
  cp "$TARGET_LOG" "$BATS_TEST_TMPDIR/log"
  spoil_byte "$data" $(($(stat -c %s "$data") - 5000))
  for fault in "" import:error=999; do  # by the mover, and by the agent alone
    STASIS_SIM_FAULTS=$fault refused 10 image-corrupt restore --images-dir "$image" --detach
    assert_contains "$err" "gpu/data-"
    assert_contains "$err" "the restored tree was ended"
    number_is_free
    gpu_is_free
    assert_equal "$(target_round)" "$before"
    diff "$BATS_TEST_TMPDIR/log" "$TARGET_LOG"
  done
  nothing_left
}

@test "what proves wrong when a program is resumed leaves it standing, and says how to end it or to go on" {
  start_agent memory --size 16M
  dump_it
  restore_it --leave-suspended
  cp "$image/gpu/data-00" "$BATS_TEST_TMPDIR/good"
  spoil_byte "$image/gpu/data-00" 100
  local verb
  for verb in resume recover; do
    refused 12 not-rolled-back "$verb" "$TARGET"
    assert_contains "$err" "gpu/data-00"
    assert_contains "$err" "kill -9 $TARGET"
    assert_contains "$err" "stasis recover $TARGET"
    stands_still
  done
  cp "$BATS_TEST_TMPDIR/good" "$image/gpu/data-00"
  done_by recover "$TARGET"
  target_goes_on
  restored_verifies
  nothing_left
}

@test "a resume that is killed of what was restored to be suspended is finished, by recover and by another" {
  local point rest
  start_agent memory --size 4M
  for point in $(sometimes resume.planned) restore.before restore.after; do
    for rest in "recover --all" "resume $TARGET"; do
      dump_it --force
      restore_it --leave-suspended
      STASIS_FAULT=$point:kill capture stasis resume "$TARGET"
      assert_equal "$status" 137
      # shellcheck disable=SC2086
      done_by $rest
      in_state running
      target_goes_on
      nothing_left
    done
  done
  restored_verifies
}

@test "ps does not promise that a program goes on by itself whose content is in an image" {
  export STASIS_SIM_GPUS=1x256M
  start_agent memory --size 64M
  dump_it
  restore_it --leave-suspended
  let_go_without_room "\`stasis recover $TARGET\`"
  local verb
  for verb in nothing recover; do # which has no room either
    [[ $verb == nothing ]] || capture stasis recover "$TARGET"
    done_by ps
    grep -q "^$TARGET .* waiting  *direct  " <<<"$out" || { echo "$out" >&2; return 1; }
    assert_contains "$err" "stands still until \`stasis recover $TARGET\`"
  done
  kill -KILL "$HOG"
  wait "$HOG" 2>/dev/null || true
  done_by recover "$TARGET"
  target_goes_on
  done_by ps
  grep -q "^$TARGET .* running  *direct  " <<<"$out"
  [[ $err != *"process $TARGET stands still"* ]]
  restored_verifies
}

@test "content of another dump is not taken" {
  start_agent memory --size 16M
  dump_it
  mv "$image/gpu" "$BATS_TEST_TMPDIR/gpu"
  refused 10 image-corrupt restore --images-dir "$image" --detach
  local first=$TARGET
  start_agent memory --size 16M
  done_by dump "$TARGET" --images-dir "$image-2"
  cp -r "$image-2/gpu" "$image/gpu"
  TARGET=$first
  refused 10 image-corrupt restore --images-dir "$image" --detach
  wait_until 60 number_is_free
  # Nor is it looked for elsewhere when the manifest knows of none.
  python3 -IS "$BATS_TEST_DIRNAME/edit_manifest.py" "$image" \
    "del m['gpu_content']; m['requires'] = []; m['total_bytes'] = sum(f['size'] for f in m['files'])"
  refused 10 image-corrupt restore --images-dir "$image" --detach
  assert_contains "$err" "its parts are not of the same dump"
  [[ $err != *"is intact"* && $err != *"stasis recover"* ]] || { echo "$err" >&2; return 1; }
  wait_until 60 number_is_free
}

# --- Failures: the content is in the unfinished image alone.

@test "when CRIU fails, the memory comes back from the half image, which then goes" {
  need_fault_points
  start_agent memory --size 24M
  STASIS_FAULT=criu.started:criu-dies capture timeout 60 stasis dump "$TARGET" --images-dir "$image"
  ((status != 0))
  assert_contains "$err" "rolled back"
  [[ $err != *"copy by themselves"* ]]
  in_state running
  target_goes_on
  no_image
  target_verifies
  nothing_left
}

@test "a full disk ends the dump, not the job" {
  need_fault_points
  start_agent memory --size 48M
  mkdir "$BATS_TEST_TMPDIR/disk"
  mount -t tmpfs -o size=140m tmpfs "$BATS_TEST_TMPDIR/disk"
  echo "$BATS_TEST_TMPDIR/disk" >>"$BATS_TEST_TMPDIR/mounts"
  # What is taken between the look at the free space and the writing.
  STASIS_FAULT=direct.closed:disk-full STASIS_FAULT_FILL=$BATS_TEST_TMPDIR/disk \
    refused 11 no-space dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/disk/image"
  in_state running
  target_goes_on
  assert_equal "$(compgen -G "$BATS_TEST_TMPDIR/disk/image*" || true)" ""
  target_verifies
}

@test "a file system that reports no sizes is not taken for a full one" {
  start_agent memory --size 16M
  mkdir "$BATS_TEST_TMPDIR/disk"
  mount -t ramfs ramfs "$BATS_TEST_TMPDIR/disk" || skip "no ramfs can be mounted here"
  echo "$BATS_TEST_TMPDIR/disk" >>"$BATS_TEST_TMPDIR/mounts"
  image=$BATS_TEST_TMPDIR/disk/image
  dump_it
  done_by verify "$image"
  restore_it
  target_goes_on
  restored_verifies
}

@test "what others have put beside a half image keeps no recover from its work" {
  need_fault_points
  mkdir -m 777 "$BATS_TEST_TMPDIR/open"
  image=$BATS_TEST_TMPDIR/open/image
  mkdir "$image.partial-00"
  echo stays >"$image.partial-00/letters"
  start_agent memory --size 24M
  killed_at criu.started dump "$TARGET" --images-dir "$image"
  done_by recover --all
  assert_contains "$err" "what a killed dump has left stays: cannot remove $image.partial-00"
  target_goes_on
  assert_equal "$(ls "$BATS_TEST_TMPDIR/open")" image.partial-00
  assert_equal "$(cat "$image.partial-00/letters")" stays
  capture stasis recover --all
  assert_contains "$out$err" "nothing to recover"
  target_verifies
}

@test "a killed dump is recovered though the folder of its image has gone, of living programs and of dead ones" {
  need_fault_points
  for each in living dead; do
    mkdir "$BATS_TEST_TMPDIR/goes"
    start_agent memory --size 24M
    killed_at criu.started dump "$TARGET" --images-dir "$BATS_TEST_TMPDIR/goes/image"
    rm -r "$BATS_TEST_TMPDIR/goes"
    [ $each = living ] || end_targets
    done_by recover --all
    assert_contains "$err" "the folder to which the killed dump wrote is not there: $BATS_TEST_TMPDIR/goes"
    capture stasis recover --all
    assert_contains "$out$err" "nothing to recover"
    [ $each = dead ] || { target_goes_on && target_verifies; } || return 1
  done
}

# bats test_tags=long
@test "a dump that is killed at any step leaves a job that recover makes run" {
  need_fault_points
  start_agent memory --size 24M
  local point
  for point in direct.prepared direct.closed direct.copied; do
    killed_at "$point" dump "$TARGET" --images-dir "$image"
    # The agent sees to it.
    target_goes_on
    done_by recover --all
    nothing_left
  done
  for point in direct.emptied direct.held checkpoint.after criu.started criu.post-dump image.manifest-written \
    image.named dump.complete; do
    killed_at "$point" dump "$TARGET" --images-dir "$image"
    if [[ $point == direct.emptied ]]; then
      stands_still
      refused 7 busy suspend "$TARGET"
      refused 7 busy dump "$TARGET" --images-dir "$image-2"
    fi
    done_by recover --all
    in_state running
    target_goes_on
    # Whole, it stays.
    case $point in image.named | dump.complete) rm -r "$image" ;; *) no_image ;; esac
    nothing_left
  done
  for point in image.committed direct.refill direct.refilled direct.filled; do
    killed_at "$point" dump "$TARGET" --images-dir "$image" --leave-running --force
    done_by recover --all
    in_state running
    target_goes_on
  done
  target_verifies
  nothing_left
}

@test "without a mover the agent brings the content of an image in" {
  start_agent memory --size 24M
  dump_it
  STASIS_SIM_FAULTS=import:error=999 done_by restore --images-dir "$image" --detach
  assert_contains "$err" "copy by themselves"
  target_goes_on
  restored_verifies
}

# --- Restored to be suspended

@test "restored to stay suspended, it needs its image until it is resumed" {
  start_agent memory --size 24M
  dump_it
  restore_it --leave-suspended
  in_state checkpointed
  gpu_is_free
  refused 7 busy dump "$TARGET" --images-dir "$image-2"
  mv "$image" "$image-moved"
  refused 6 wrong-state resume "$TARGET"
  assert_contains "$err" "image"
  in_state checkpointed
  # That the record is lost is no loss of the job. What is no image, or has nothing of it, is refused.
  rm "$STASIS_STATE_DIR"/*.suspended
  refused 6 wrong-state resume "$TARGET"
  assert_contains "$err" "stasis resume $TARGET --images-dir DIR"
  refused 10 image-incomplete resume "$TARGET" --images-dir "$BATS_TEST_TMPDIR/driver"
  in_state checkpointed
  done_by resume "$TARGET" --images-dir "$image-moved" --json
  assert_equal "$(json 'd["path"]')" direct
  target_goes_on
  restored_verifies
  nothing_left
}

# TARGET runs, by the driver's account, and stands still: what it was resumed from was damaged, and its image moved.
resumed_in_vain() {
  start_agent memory --size 24M
  dump_it
  restore_it --leave-suspended
  mv "$image" "$image-moved"
  cp -a "$image-moved" "$image-copy"
  spoil_byte "$(compgen -G "$image-copy/gpu/data-*" | head -1)" 5000
  refused 12 not-rolled-back resume "$TARGET" --images-dir "$image-copy"
}

@test "brought back in vain from a damaged copy, it is brought back from a whole one" {
  local verb
  resumed_in_vain
  mkdir "$image-empty"
  for verb in suspend resume "resume --images-dir $image-empty"; do
    # shellcheck disable=SC2086 # words
    refused 7 busy $verb "$TARGET"
    assert_contains "$err" "stasis resume $TARGET --images-dir DIR"
  done
  refused 6 wrong-state recover "$TARGET"
  assert_contains "$err" "stasis resume $TARGET --images-dir DIR"
  done_by resume "$TARGET" --images-dir "$image-moved"
  target_goes_on
  restored_verifies
  nothing_left
}

@test "brought back in vain from a damaged copy, it runs also where the next resume is cut short" {
  need_fault_points
  resumed_in_vain
  STASIS_FAULT=resume.planned:error capture stasis resume "$TARGET" --images-dir "$image-moved"
  ((status != 0))
  target_goes_on
  restored_verifies
  nothing_left
}

@test "an empty directory, or one without GPU memory, is no image to resume from" {
  start_agent memory --size 16M
  dump_it
  restore_it --leave-suspended
  mkdir "$image-empty"
  refused 10 image-incomplete resume "$TARGET" --images-dir "$image-empty"
  assert_contains "$err" "$image-empty holds no content of GPU memory"
  rm "$image/gpu/index"
  refused 10 image-incomplete resume "$TARGET" --images-dir "$image"
  in_state checkpointed
}

# --- Several jobs, one name

@test "what one job needs of a killed dump is not removed with what another has left there" {
  need_fault_points
  start_agent memory --size 16M
  local first=$TARGET
  killed_at direct.held dump "$TARGET" --images-dir "$image"
  start_agent memory --size 16M
  killed_at direct.held dump "$TARGET" --images-dir "$image"
  done_by recover "$TARGET"
  target_goes_on
  assert_equal "$(partial_images | wc -l)" 1
  target_verifies
  capture stasis restore --images-dir "$image"
  assert_contains "$err" "stasis recover --all"
  done_by recover "$first"
  in_state running "$first"
  nothing_left
}

@test "an image that a suspended job needs is not replaced" {
  start_agent memory --size 16M
  dump_it
  restore_it --leave-suspended
  local first=$TARGET
  start_agent memory --size 16M
  refused 7 busy dump "$TARGET" --images-dir "$image" --force
  assert_contains "$err" "stasis resume $first"
  target_goes_on
  target_verifies
  done_by resume "$first"
  in_state running "$first"
  nothing_left
  kill -KILL "$first"
}

# bats test_tags=long
@test "a pipe beside the image does not keep recover waiting" {
  need_fault_points
  start_agent memory --size 16M
  killed_at direct.held dump "$TARGET" --images-dir "$image"
  mkdir -p "$image.partial-0123456789abcdef/gpu"
  mkfifo "$image.partial-0123456789abcdef/gpu/index"
  done_by recover --all
  target_goes_on
  target_verifies
}

@test "criu by itself is kept from dumping a job without its memory" {
  start_agent memory --size 16M
  dump_it
  restore_it --leave-suspended
  mkdir "$BATS_TEST_TMPDIR/plain"
  capture "$(real_criu)" dump -t "$TARGET" -D "$BATS_TEST_TMPDIR/plain" --shell-job -L "$STASIS_BUILD/lib/stasis/criu" -v4 -o log
  ((status != 0))
  grep -q "is in an image of Stasis" "$BATS_TEST_TMPDIR/plain/log"
  done_by resume "$TARGET"
  target_goes_on
  restored_verifies
}

# --- What was done when

@test "a trace of several programs has a row for the agent of each" {
  LD_PRELOAD=$agent start_tree --size 12M
  local verb pid does
  for verb in suspend resume; do
    does="hold the program back"
    [[ $verb == suspend ]] || does="take its device memory again"
    done_by "$verb" "$TARGET" --trace "$BATS_TEST_TMPDIR/trace"
    trace "$BATS_TEST_TMPDIR/trace" "agent:$does"
    for pid in "${CHILDREN[@]}"; do grep -q "agent of process $pid" "$BATS_TEST_TMPDIR/trace"; done
  done
}

@test "a trace has the phases and what was done in them, also of a verb that fails" {
  start_agent memory --size 16M
  local after phases
  for after in --leave-running --kill; do
    rm -rf "$image"
    done_by dump "$TARGET" --images-dir "$image" --json --trace "$BATS_TEST_TMPDIR/trace" ${after#--kill}
    trace "$BATS_TEST_TMPDIR/trace" "phase:copy out" "phase:criu" "driver:checkpoint" "mover:copy out" \
      "agent:give its device memory back" "criu:criu until post-dump" "image:complete the content"
    # All that it tells of itself.
    mapfile -t phases < <(json '"\n".join("phase:" + p["name"] for p in d["phases"])')
    ((${#phases[@]} > 8))
    trace "$BATS_TEST_TMPDIR/trace" "${phases[@]}"
  done
  wait_until 60 number_is_free
  restore_it --trace "$BATS_TEST_TMPDIR/trace"
  trace "$BATS_TEST_TMPDIR/trace" "driver:restore" "mover:copy in" "criu:our answer to post-restore"
  STASIS_SIM_FAULTS=checkpoint:error=999 capture timeout 60 stasis suspend "$TARGET" --path driver --trace "$BATS_TEST_TMPDIR/trace"
  ((status != 0))
  trace "$BATS_TEST_TMPDIR/trace" "phase:lock" "driver:lock" "driver:unlock"
  capture timeout 60 stasis suspend "$TARGET" --trace /no/such/place
  assert_contains "$err" "no trace"
  assert_equal "$status" 0
  capture timeout 60 stasis doctor "$TARGET" --no-trial --trace "$BATS_TEST_TMPDIR/trace"
  trace "$BATS_TEST_TMPDIR/trace" "phase:machine" "phase:processes"
}

@test "a trace has what recover does, with --all too" {
  need_fault_points
  start_agent memory --size 16M
  local who
  for who in "$TARGET" --all; do
    killed_at direct.held suspend "$TARGET"
    rm -f "$BATS_TEST_TMPDIR/trace"
    done_by recover "$who" --trace "$BATS_TEST_TMPDIR/trace"
    trace "$BATS_TEST_TMPDIR/trace" "phase:copy in" "mover:copy in" "agent:take its device memory again"
    target_goes_on
  done
}

@test "a trace that cannot be written is told with --json too, and does not keep the tool waiting" {
  start_agent memory --size 16M
  capture timeout 60 stasis suspend "$TARGET" --json --trace /dev/full
  assert_equal "$status" 0
  assert_contains "$err" "no trace: cannot write /dev/full"
  capture timeout 60 stasis resume "$TARGET" -q --trace "$BATS_TEST_TMPDIR"
  assert_equal "$status" 0
  assert_contains "$err" "no trace: cannot open $BATS_TEST_TMPDIR"
  mkfifo "$BATS_TEST_TMPDIR/pipe"
  capture timeout -s KILL 60 stasis suspend "$TARGET" --trace "$BATS_TEST_TMPDIR/pipe"
  assert_equal "$status" 0
  assert_contains "$err" "no trace: cannot open $BATS_TEST_TMPDIR/pipe"
  # One that is full, with a reader.
  exec {full}<>"$BATS_TEST_TMPDIR/pipe"
  dd if=/dev/zero of="$BATS_TEST_TMPDIR/pipe" bs=64k count=1 oflag=nonblock status=none
  capture timeout -s KILL 60 stasis resume "$TARGET" --trace "$BATS_TEST_TMPDIR/pipe"
  assert_equal "$status" 0
  assert_contains "$err" "no program has read from it"
  exec {full}>&-
  done_by suspend "$TARGET"
  done_by resume "$TARGET" --trace >(cat >"$BATS_TEST_TMPDIR/trace")
  wait_until 60 grep -q traceEvents "$BATS_TEST_TMPDIR/trace"
  target_verifies
}

# Which another user has put there, so that root writes over what it leads to.
@test "a trace follows no link of another user, and is written into no file of another" {
  start_agent memory --size 16M
  local theirs=$BATS_TEST_TMPDIR/theirs precious=$BATS_TEST_TMPDIR/precious verb name reader
  mkdir "$theirs"
  chmod 755 "$BATS_TEST_TMPDIR"
  echo precious >"$precious"
  ln -s "$precious" "$theirs/trace"
  ln -s "$BATS_TEST_TMPDIR" "$theirs/folder"
  ln "$precious" "$theirs/name"
  mkfifo "$theirs/pipe"
  exec {reader}<>"$theirs/pipe"
  chown -hR 65433 "$theirs"
  chown 0 "$theirs/name"
  for name in trace folder/precious name pipe; do
    verb=suspend
    [[ $name != folder/* && $name != pipe ]] || verb=resume
    capture timeout -s KILL 60 stasis "$verb" "$TARGET" --trace "$theirs/$name"
    assert_equal "$status" 0
    assert_contains "$err" "no trace: cannot write $theirs/$name: "
    assert_equal "$(<"$precious")" precious "$name"
  done
  exec {reader}>&-
  # The same by a link in a folder of all users, which is one's own.
  mkdir -m 1777 "$BATS_TEST_TMPDIR/all"
  ln -s "$precious" "$BATS_TEST_TMPDIR/all/theirs"
  chown -h 65433 "$BATS_TEST_TMPDIR/all/theirs"
  ln -s "$BATS_TEST_TMPDIR/own" "$BATS_TEST_TMPDIR/all/own"
  capture timeout -s KILL 60 stasis suspend "$TARGET" --trace "$BATS_TEST_TMPDIR/all/theirs"
  assert_contains "$err" "all/theirs belongs to user 65433"
  assert_equal "$(<"$precious")" precious
  done_by resume "$TARGET" --trace "$BATS_TEST_TMPDIR/all/own"
  grep -q traceEvents "$BATS_TEST_TMPDIR/own"
  # A file of his folder that is ours, and one that is made there.
  done_by suspend "$TARGET" --trace "$theirs/new"
  grep -q traceEvents "$theirs/new"
  done_by resume "$TARGET" --trace "$theirs/new"
  grep -q traceEvents "$theirs/new"
  # He who has called sudo may do what root may.
  SUDO_UID=65433 SUDO_GID=65433 done_by suspend "$TARGET" --trace "$theirs/trace"
  grep -q traceEvents "$precious"
  done_by resume "$TARGET"
  target_verifies
}

@test "what reads an image has a trace, and a restore that stays has it before the program ends" {
  start_agent memory --size 16M
  dump_it
  local verb
  for verb in verify "inspect --verify" "report --verify --output $BATS_TEST_TMPDIR/page"; do
    # shellcheck disable=SC2086 # words
    capture stasis $verb "$image" --trace "$BATS_TEST_TMPDIR/trace"
    assert_equal "$status" 0 "$verb"
    trace "$BATS_TEST_TMPDIR/trace" "phase:look" "phase:verify" "image:verify files" "image:verify content"
    rm "$BATS_TEST_TMPDIR/trace"
  done
  stasis restore --images-dir "$image" --trace "$BATS_TEST_TMPDIR/trace" >/dev/null 2>&1 3>&- &
  local tool=$!
  wait_until 60 grep -qs traceEvents "$BATS_TEST_TMPDIR/trace"
  trace "$BATS_TEST_TMPDIR/trace" "phase:criu" "driver:restore" "mover:copy in" "image:verify files"
  kill -TERM "$TARGET"
  wait "$tool"
  # That in which it ends, too.
  spoil_byte "$image/gpu/data-00" 5000
  refused 10 image-corrupt verify "$image" --trace "$BATS_TEST_TMPDIR/trace"
  trace "$BATS_TEST_TMPDIR/trace" "phase:verify" "image:verify content"
}

@test "all of an image is on the disk before it has its name and the job is ended" {
  start_agent memory --size 24M
  local log=$BATS_TEST_TMPDIR/synced file
  LD_PRELOAD=$STASIS_BUILD/tests/sync_log.so SYNC_LOG=$log done_by dump "$TARGET" --images-dir "$image"
  # Up to that, by the name that it has meanwhile.
  sed "/^rename ${image##*/}$/q" "$log" >"$log.before"
  assert_equal "$(tail -n 1 "$log.before")" "rename ${image##*/}"
  sed -n "s|^fsync $image\.partial-[^/]*/*||p" "$log.before" >"$log.names"
  (cd "$image" && find manifest.json criu gpu -type f -printf '%p\n') >"$log.wanted"
  (($(wc -l <"$log.wanted") > 10))
  # The folders too, and the image itself, whose name there is empty.
  printf '%s\n' gpu criu '' >>"$log.wanted"
  while read -r file; do
    grep -qxF -e "$file" "$log.names" || { echo "'$file' was not on the disk before" >&2; return 1; }
  done <"$log.wanted"
  # And the name itself.
  grep -qxF "fsync ${image%/*}" <(sed "1,/^rename ${image##*/}$/d" "$log")
}

@test "with --sync none the tool does not wait for the disk" {
  start_agent memory --size 24M
  local log=$BATS_TEST_TMPDIR/synced
  LD_PRELOAD=$STASIS_BUILD/tests/sync_log.so SYNC_LOG=$log done_by dump "$TARGET" --images-dir "$image" --sync none
  grep -qx "rename ${image##*/}" "$log"
  [[ $(<"$log") != *"fsync $image"* ]]
}
