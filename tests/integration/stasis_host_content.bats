#!/usr/bin/env bats
# Host memory that goes into an image past CRIU, and comes back, on the simulated driver and real CRIU.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "CRIU"
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
}
teardown() {
  end_stasis
  [ -z "${disk:-}" ] || rm -rf "$disk"
}

# start_program MIB [FILE]: host_memory.py, or another.
start_program() { start_script "${2:-host_memory.py}" "$1"; }
runs_on() { script_goes_on; }

# It, and its child.
end_all() {
  kill -KILL -- "-$TARGET"
  wait_until 60 group_is_gone
}
group_is_gone() { ! pgrep -g "$TARGET" >/dev/null && number_is_free; }

host_bytes() { python3 -IS "$BATS_TEST_DIRNAME/../image/read_image.py" "${1:-$image}" | python3 -IS -c 'import json, sys; d = json.load(sys.stdin)["host_content"]; print(d["bytes"] if d else 0)'; }
encodings() { python3 -IS "$BATS_TEST_DIRNAME/../image/read_image.py" "$image" | python3 -IS -c 'import json, sys; print(json.load(sys.stdin)["host_content"]["encodings"])'; }
pages_bytes() { cat "${1:-$image}"/criu/pages-*.img | wc -c; }

@test "host memory of every kind is as it was, dumped and restored again and again" {
  local i
  start_program 24
  for ((i = 0; i < $(times 2 3); ++i)); do
    dump_it --host-memory parallel --force
    # Of the dense region what was written, but for blocks in which it has read what it has made zeros since; the
    # others are only read for the most part, or a child's, too, or locked. Of what is mapped as shared that which no
    # other has touched, but for what was never written: before the first restore and after it.
    echo "past CRIU: $(host_bytes) bytes"
    (($(host_bytes) >= (14 + 17 + 19) << 20 && $(host_bytes) <= (36 + 24 + 20) << 20))
    done_by verify --images-dir "$image"
    done_by inspect --images-dir "$image"
    restore_it
    runs_on
  done
}

@test "of each kind of mapping plain memory alone goes past CRIU, and all are as they were" {
  local i kinds=$BATS_TEST_TMPDIR/kinds expected
  start_script host_kinds.py "$kinds"
  # Advice that this kernel does not take has no mapping.
  expected=$(for i in plain dontfork mergeable hugepage nohugepage random sequential moved noreserve shared nameless; do
    ! grep -q "^$i " "$kinds" || echo "$i"
  done)
  for i in 1 2; do
    dump_it --host-memory parallel --force
    assert_equal "$(python3 -S "$BATS_TEST_DIRNAME/host_kinds.py" --past "$image" "$kinds")" "$expected"
    restore_it
    script_goes_on
  done
}

# KiB that the program and its child have, a page of both counted once.
anonymous_of_both() {
  cat "/proc/$TARGET/smaps_rollup" "/proc/$(children_of "$TARGET")/smaps_rollup" | awk '/^Pss_Anon:/ { sum += $2 } END { print sum }'
}

@test "verify, inspect and report name it, and what the program shares with its child is still shared" {
  local before page=$BATS_TEST_TMPDIR/report.html named
  start_program 24
  before=$(anonymous_of_both)
  dump_it --host-memory parallel
  named="$(host_bytes)"
  ((named >= 14 << 20))
  done_by verify "$image" --json
  assert_equal "$(json '(d["host_content"]["bytes"], [p["bytes"] for p in d["host_content"]["processes"]])')" "($named, [$named])"
  done_by verify "$image"
  assert_contains "$out" " MiB of host memory in "
  done_by inspect "$image" --json
  assert_equal "$(json '(d["host_content"]["bytes"], d["host_content"]["processes"][0]["pid"])')" "($named, $TARGET)"
  done_by inspect "$image"
  assert_contains "$out" " MiB of host memory in "
  done_by report "$image" -o "$page"
  grep -qF "Host memory, large" "$page"
  restore_it
  # 48 MiB are shared. A few pages of them have been written meanwhile.
  echo "KiB: $before before, $(anonymous_of_both) after"
  (($(anonymous_of_both) < before + (12 << 10)))
  runs_on
}

@test "the heap of brk goes past CRIU, but for its beginning" {
  start_program 96 host_heap.py
  dump_it
  (($(host_bytes) >= 76 << 20 && $(pages_bytes) < 48 << 20))
  restore_it
  runs_on
  done_by dump "$TARGET" --images-dir "$image" --force --leave-running
  (($(host_bytes) >= 76 << 20))
  runs_on
}

@test "the arenas of threads go past CRIU, too, compressed with lz4" {
  start_program 96 host_arenas.py
  dump_it --compress lz4
  echo "past CRIU: $(host_bytes) bytes; by CRIU: $(pages_bytes) bytes"
  (($(host_bytes) >= 76 << 20 && $(pages_bytes) < 48 << 20))
  assert_contains "$(encodings)" 2
  [[ $err != *"nothing is compressed"* ]]
  assert_contains "$err" "only large host memory is compressed"
  restore_it
  runs_on
}

@test "pinned memory, however it was made, goes past CRIU" {
  start_target pinned --size 72M --pause-ms 300
  dump_it
  echo "past CRIU: $(host_bytes) bytes; by CRIU: $(pages_bytes) bytes"
  # But for blocks at the ends that are not whole.
  (($(host_bytes) >= 68 << 20 && $(pages_bytes) < 12 << 20))
  restore_it
  target_goes_on
  dump_it --force
  (($(host_bytes) >= 68 << 20 && $(pages_bytes) < 12 << 20))
  restore_it
  target_goes_on
  restored_verifies
}

@test "what is in huge pages comes back in huge pages" {
  huge() { awk '/^AnonHugePages:/ { print $2 }' "/proc/$TARGET/smaps_rollup"; }
  local before
  start_program 96 host_huge.py
  before=$(huge)
  ((before > 0)) || skip "the kernel has no huge pages to give"
  dump_it
  (($(host_bytes) >= 92 << 20))
  restore_it
  (($(huge) >= before * 3 / 4))
  runs_on
}

@test "with the agent inside, and compressed, it is so as well" {
  LD_PRELOAD=$agent start_program 96
  dump_it --host-memory parallel --compress zstd
  (($(host_bytes) >= 64 << 20))
  restore_it
  runs_on
  # By itself: there is enough of it.
  dump_it --force
  (($(host_bytes) >= 64 << 20))
  restore_it
  runs_on
}

@test "CRIU moves what is little, what is to stay, and all if it is told to" {
  start_program 4
  dump_it
  assert_equal "$(host_bytes)" 0
  restore_it
  runs_on
  end_all
  start_program 24
  done_by dump "$TARGET" --images-dir "$image" --force --leave-running
  assert_equal "$(host_bytes)" 0
  runs_on
  done_by dump "$TARGET" --images-dir "$image" --force --leave-suspended --host-memory parallel
  (($(host_bytes) > 8 << 20))
  done_by resume "$TARGET"
  runs_on
  dump_it --force --host-memory criu
  assert_equal "$(host_bytes)" 0
  restore_it
  runs_on
}

@test "a job that goes on keeps it, saved again and again, and only what is new is written" {
  local i base=() after
  start_program 96
  for i in 1 2 3; do
    done_by dump "$TARGET" --images-dir "$image.$i" --leave-running "${base[@]}" --json
    (($(host_bytes "$image.$i") >= 64 << 20))
    ((i == 1 || $(json 'd["written_bytes"]') < $(json 'd["image_bytes"]') - (40 << 20)))
    runs_on
    base=(--base "$image.$i")
  done
  after=$(target_round)
  end_all
  for i in 3 1; do
    done_by restore --images-dir "$image.$i" --detach
    runs_on
    (($(target_round) < after + 20))
    end_all
  done
}

@test "what is deduplicated beside a base is told apart from what is not" {
  start_program 96
  done_by dump "$TARGET" --images-dir "$image.1" --leave-running
  done_by dump "$TARGET" --images-dir "$image.2" --leave-running --base "$image.1" --json
  (($(json 'd["written_bytes"]') < $(json 'd["image_bytes"]') - (40 << 20)))
  [[ $out != *"nothing"* ]]
  assert_contains "$(json 'd["notes"]')" "all GPU memory is written, and none of it deduplicated against $image.1"
  done_by dump "$TARGET" --images-dir "$image.3" --leave-running --base "$image.1" --path driver --json
  (($(json 'd["written_bytes"]') < $(json 'd["image_bytes"]') - (40 << 20)))
  assert_contains "$(json 'd["notes"]')" "only large host memory is deduplicated against $image.1"
  runs_on
}

@test "what is damaged in the host memory of a base is told" {
  start_program 96
  done_by dump "$TARGET" --images-dir "$image.1" --leave-running
  printf 'x' | dd of="$image.1/host/data-00" bs=1 seek=12345 conv=notrunc status=none
  done_by dump "$TARGET" --images-dir "$image.2" --leave-running --base "$image.1" --json
  assert_contains "$(json 'd["notes"]')" "$image.1 is damaged, and what is in that file is written anew: host/data-00: chunk"
  runs_on
}

@test "what another process of the tree writes into it until CRIU stops both is as it was when it had stopped both" {
  local i
  start_program 64 host_other.py
  for ((i = 0; i < $(times 2 3); ++i)); do
    dump_it --host-memory parallel --force
    (($(host_bytes) >= 48 << 20))
    restore_it
    runs_on
  done
}

@test "what the driver saves of a program that it moves itself goes past CRIU, too" {
  start_target memory --size 80M
  dump_it
  echo "past CRIU: $(host_bytes) bytes; by CRIU: $(pages_bytes) bytes; $out$err"
  (($(host_bytes) > 64 << 20 && $(pages_bytes) < 64 << 20))
  restore_it
  restored_verifies
}

# suspended_goes_past_criu: the target's.
suspended_goes_past_criu() {
  done_by suspend "$TARGET"
  # Left as it was, which is suspended.
  done_by dump "$TARGET" --images-dir "$image" --force --leave-running
  echo "past CRIU: $(host_bytes) bytes; by CRIU: $(pages_bytes) bytes; $out$err"
  (($(host_bytes) >= 64 << 20))
  in_state checkpointed "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  done_by suspend "$TARGET"
  dump_it --force
  echo "past CRIU: $(host_bytes) bytes; by CRIU: $(pages_bytes) bytes; $out$err"
  (($(host_bytes) >= 64 << 20))
  restore_it
  in_state checkpointed "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
}

@test "a program that was suspended before goes past CRIU, too, and comes back suspended" {
  start_target memory --size 80M
  suspended_goes_past_criu
  restored_verifies
  LD_PRELOAD=$agent start_target memory --size 80M
  suspended_goes_past_criu
  restored_verifies
}

@test "one that another tool has suspended, whose threads may run, is left to CRIU" {
  start_target memory --size 80M
  # There is a place for its threads, in which none waits.
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  stasis-raw-driver --pid "$TARGET" lock checkpoint
  dump_it
  assert_equal "$(host_bytes)" 0
  restore_it
  stasis-raw-driver --pid "$TARGET" restore unlock
  target_goes_on
  restored_verifies
}

# bats test_tags=long
@test "a dump that fails or is killed leaves the processes as they were, with all their memory" {
  local point way
  start_program 24
  for point in host.hidden host.saved dump.complete; do
    for way in "" --leave-running --leave-suspended; do
      STASIS_FAULT=$point:error capture stasis dump "$TARGET" --images-dir "$image" --host-memory parallel $way
      ((status != 0))
      # A job that goes on does so before its image is complete.
      [[ $err == *"as it was"* || $err == *"the job runs on"* ]]
      runs_on
      [[ ! -e $image ]]
      STASIS_FAULT=$point:kill capture stasis dump "$TARGET" --images-dir "$image" --host-memory parallel $way
      assert_equal "$status" 137 "$point"
      done_by recover "$TARGET"
      runs_on
      rm -rf "$image"
    done
  done
  dump_it --host-memory parallel --force
  restore_it
  runs_on
  STASIS_FAULT=host.hidden:target-dies capture stasis dump "$TARGET" --images-dir "$image.2" --host-memory parallel
  ((status != 0))
  wait_until 60 number_is_free
  [[ ! -e $image.2 ]]
  done_by recover --all
  assert_contains "$out$err" "nothing to recover"
}

@test "what criu alone restores lacks its memory: it stands still, and no tool lets it run" {
  start_program 24
  dump_it --host-memory parallel
  cp -r "$image" "$image.copy"
  (cd "$image.copy/criu" && "$STASIS_CRIU" restore -D "$image.copy/criu" -o "$BATS_TEST_TMPDIR/restore.log" --shell-job --restore-detached)
  refused 6 wrong-state resume "$TARGET"
  assert_contains "$err" "stasis restore"
  capture cuda-checkpoint --action restore --pid "$TARGET"
  ((status != 0))
  refused 6 wrong-state dump "$TARGET" --images-dir "$image.2"
  kill -KILL "$TARGET"
  end_all
  restore_it
  runs_on
}

# Earlier versions gave the memory up until they had written it back, and said so in the mapping of parked threads by another
# word (kAwayMark and kSavedMark of src/proc/parking.cc).
@test "an image of a version that gave memory up is restored, with its memory" {
  start_program 24
  dump_it --host-memory parallel
  python3 -S "$BATS_TEST_DIRNAME/edit_pages.py" "$image" 5aa5a3a1b1c7d39d 5aa5a3a1b1c7d39b
  done_by verify --images-dir "$image"
  restore_it --leave-suspended
  done_by resume "$TARGET"
  runs_on
  # And what criu alone makes of it lacks the memory.
  end_all
  (cd "$image/criu" && "$STASIS_CRIU" restore -D "$image/criu" -o "$BATS_TEST_TMPDIR/restore.log" --shell-job --restore-detached)
  refused 6 wrong-state resume "$TARGET"
}

@test "damaged host memory in an image is found, by restore and by verify, and nothing runs" {
  start_program 24
  dump_it --host-memory parallel
  printf 'x' | dd of="$image/host/data-00" bs=1 seek=12345 conv=notrunc status=none
  refused 10 image-corrupt restore --images-dir "$image" --detach
  assert_contains "$err" "host/data-00" " of its host memory, in the file "
  number_is_free
  refused 10 image-corrupt verify --images-dir "$image"
  rm "$image/host/index"
  capture stasis restore --images-dir "$image" --detach
  ((status != 0))
  number_is_free
}

@test "host memory whose places lie over each other, beside its units or beyond memory is refused before there is a process" {
  local wrong sound=$BATS_TEST_TMPDIR/sound
  # wrongly STATEMENT: the image is as it was dumped, but for that.
  wrongly() {
    cp "$sound/manifest.json" "$image/"
    cp "$sound/index" "$image/host/"
    python3 -S "$BATS_TEST_DIRNAME/edit_host_index.py" "$image" "$1"
  }
  start_program 16
  dump_it --host-memory parallel
  mkdir "$sound"
  cp "$image/manifest.json" "$image/host/index" "$sound/"
  for wrong in 'ranges[1][2] = ranges[0][2]' 'ranges[0][2] += 4096' 'ranges[0][2] = 2**64 - 262144' 'ranges[0][1] += 262144'; do
    wrongly "$wrong"
    refused 10 image-corrupt restore --images-dir "$image" --detach
    assert_contains "$err" "host/index"
    number_is_free
    capture python3 -IS "$BATS_TEST_DIRNAME/../image/read_image.py" "$image"
    assert_equal "$status" 1 "$wrong"
  done
  refused 10 image-corrupt verify "$image"
  # It has no such memory: only seen when it is written.
  wrongly 'ranges[0][2] = 1 << 40'
  refused 10 image-corrupt restore --images-dir "$image" --detach
  assert_contains "$err" "host/index"
  wait_until 60 number_is_free
  wrongly ''
  restore_it
  runs_on
}

# Where the loader took the rest of the path for another library, found from where criu was started.
@test "in a folder with a blank in its name criu loads nothing of ours, and saves all" {
  local there="$BATS_TEST_TMPDIR/a folder"
  mkdir -p "$there/bin" "$there/lib/stasis" "$BATS_TEST_TMPDIR/cwd/folder/lib/stasis"
  cp "$STASIS_BUILD/bin/stasis" "$there/bin/"
  cp "$STASIS_BUILD"/lib/stasis/*.so "$STASIS_BUILD"/lib/stasis/stasis-* "$there/lib/stasis/"
  cat >"$BATS_TEST_TMPDIR/planted.c" <<'END'
#include <fcntl.h>
#include <stdlib.h>
__attribute__((constructor)) static void planted(void) { creat(getenv("PLANTED"), 0600); }
END
  gcc -shared -fPIC -o "$BATS_TEST_TMPDIR/cwd/folder/lib/stasis/libstasis-inside-criu.so" "$BATS_TEST_TMPDIR/planted.c"
  start_program 24
  cd "$BATS_TEST_TMPDIR/cwd"
  PLANTED=$BATS_TEST_TMPDIR/was_loaded capture "$there/bin/stasis" dump "$TARGET" --images-dir "$image" --leave-running --host-memory parallel
  assert_equal "$status" 0
  [[ ! -e $BATS_TEST_TMPDIR/was_loaded ]]
  assert_contains "$err" "LD_PRELOAD cannot hold"
  assert_equal "$(host_bytes)" 0
  runs_on
}

# The script has the library that is meant for criu, and starts criu without it.
@test "a criu that a script starts saves all, and what it has saved is not in the image twice" {
  start_program 24
  dump_it --host-memory parallel --criu "$(criu_by_number)"
  assert_contains "$err" "CRIU saves all host memory: $BATS_TEST_TMPDIR/criu loads no library of ours"
  assert_equal "$(host_bytes)" 0
  restore_it
  runs_on
}

# Of 64 MiB three pages in four, which are small when compressed.
@test "a restore under a memory limit counts what it fills, not what the image stores of it" {
  start_program 64 host_sparse.py
  done_by dump "$TARGET" --images-dir "$image" --host-memory parallel --compress zstd
  wait_until 60 number_is_free
  (($(du -s --block-size=1 "$image/host" | cut -f1) < 16 << 20))
  make_memory_cgroup $((40 << 20))
  # shellcheck disable=SC2016
  local within=(bash -c 'echo $$ >"$1/cgroup.procs" && exec timeout 60 stasis "${@:2}"' bash "$CGROUP")
  refused_by 11 out-of-host-memory "${within[@]}" restore --images-dir "$image" --detach
  number_is_free
  # Pages of zeros are not filled.
  limit_cgroup $(($(pages_bytes) + (58 << 20)))
  capture "${within[@]}" inspect --images-dir "$image" --json
  assert_equal "$(json '[c["ok"] for c in d["checks"] if c["id"] == "host-memory"]')" "[True]" "$out"
  done_by restore --images-dir "$image" --detach
  runs_on
}

@test "a restore into a control group of its own in which the kernel kills it for want of memory says so" {
  make_memory_cgroup $((1 << 30))
  # Its files are not in memory, which counts.
  disk=$(mktemp -d /var/tmp/stasis-test.XXXXXX)
  image=$disk/image
  BEFORE="bash $BATS_TEST_TMPDIR/within $CGROUP"
  # shellcheck disable=SC2016
  echo 'echo $$ >"$1/cgroup.procs"; exec "${@:2}"' >"$BATS_TEST_TMPDIR/within"
  # Of which CRIU moves less than that.
  start_program 320 host_heap.py
  dump_it
  limit_cgroup $((160 << 20))
  capture stasis restore --images-dir "$image" --detach --manage-cgroups none
  ((status != 0))
  assert_contains "$err" "want of memory"
  number_is_free
  limit_cgroup $((1 << 30))
  restore_it
  runs_on
}
