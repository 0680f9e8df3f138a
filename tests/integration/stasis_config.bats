#!/usr/bin/env bats
# Defaults of a site and of a user: which file is read, what wins, and whose file is not believed.

load helpers
load stasis_lib

setup() {
  setup_stasis
  CONFIG=$BATS_TEST_TMPDIR/config
  export STASIS_CONFIG=$CONFIG
}
teardown() { end_stasis; }

@test "a file sets defaults, a verb's section is stronger, and the command line strongest" {
  printf 'driver-timeout = "7s"\n[dump]\ncompress = "lz4"\nsync = "none"\n' >"$CONFIG"
  done_by config
  assert_equal "$(head -1 <<<"$out")" "$CONFIG: read"
  grep -qE "^all +--driver-timeout +7s +$CONFIG\$" <<<"$out"
  grep -qE "^dump +--compress +lz4 +$CONFIG\$" <<<"$out"
  done_by config dump
  [[ $out == *"--compress"* ]]
  done_by config suspend
  [[ $out != *"--compress"* && $out == *"--driver-timeout"* ]]
  refused 2 usage config dmup
  start_target memory --size 1M
  need_root "CRIU"
  done_by dump "$TARGET" "$image" --leave-running
  done_by inspect "$image" --json || ((status == 11))
  assert_equal "$(json 'd["sync"]')" none
  done_by dump "$TARGET" "$image-2" --leave-running --sync disk
  done_by inspect "$image-2" --json || ((status == 11))
  assert_equal "$(json 'd["sync"]')" disk
}

@test "config VERB leaves out what that verb has no option for" {
  printf 'grace = "90s"\ndriver-timeout = "7s"\n' >"$CONFIG"
  done_by config
  [[ $out == *"--grace"* && $out == *"--driver-timeout"* ]]
  done_by config run
  [[ $out == *"--grace"* ]]
  done_by config dump
  [[ $out != *"--grace"* && $out == *"--driver-timeout"* ]]
  done_by config dump --json
  assert_equal "$(json '[one["option"] for one in d["values"]]')" "['driver-timeout']"
}

@test "the environment is stronger than a file, and that is shown" {
  printf 'criu = "/nonexistent/criu"\n' >"$CONFIG"
  STASIS_CRIU='' capture stasis doctor --no-trial
  assert_contains "$out" "/nonexistent/criu"
  STASIS_CRIU=/other/criu capture stasis doctor --no-trial
  assert_contains "$out" "/other/criu"
  STASIS_CRIU=/other/criu capture stasis config
  assert_contains "$out" "STASIS_CRIU is stronger"
}

@test "a user's file is stronger than nothing, and is found by its place" {
  unset STASIS_CONFIG
  mkdir -p "$BATS_TEST_TMPDIR/home/.config/stasis" "$BATS_TEST_TMPDIR/other/stasis"
  printf '[ps]\ncolumns = ["pid", "state"]\n' >"$BATS_TEST_TMPDIR/home/.config/stasis/config"
  printf '[ps]\ncolumns = ["state", "pid"]\n' >"$BATS_TEST_TMPDIR/other/stasis/config"
  start_target idle
  HOME=$BATS_TEST_TMPDIR/home XDG_CONFIG_HOME='' capture stasis ps
  assert_equal "$(head -1 <<<"$out" | tr -s ' ')" "PID STATE"
  HOME=$BATS_TEST_TMPDIR/home XDG_CONFIG_HOME=$BATS_TEST_TMPDIR/other capture stasis ps
  assert_equal "$(head -1 <<<"$out" | tr -s ' ')" "STATE PID"
  HOME=$BATS_TEST_TMPDIR/home STASIS_CONFIG='' capture stasis ps
  assert_contains "$(head -1 <<<"$out")" "COMMAND"
}

@test "an option that needs or excludes another one is left out, not an error" {
  printf '[run]\nkeep = 7\n[dump]\nleave-running = true\n' >"$CONFIG"
  capture stasis run -- true
  ((status == 0))
  start_target memory --size 1M
  need_root "CRIU"
  done_by dump "$TARGET" "$image" --leave-suspended
  assert_contains "$out" "is suspended"
  done_by resume "$TARGET"
  done_by dump "$TARGET" "$image-2"
  assert_contains "$out" "it runs on"
}

@test "on a narrow terminal each value's place stands below it, and is not cut" {
  printf '[dump]\ncompress = "lz4"\n' >"$CONFIG"
  script -qec "stty cols 50; stasis config" /dev/null </dev/null >"$BATS_TEST_TMPDIR/shown" 3>&-
  tr -d '\r' <"$BATS_TEST_TMPDIR/shown" | grep -qxE "  $CONFIG"
  [[ $(<"$BATS_TEST_TMPDIR/shown") != *…* ]]
}

@test "a mistake in a file is refused with the file, and the call that sets no file goes on" {
  printf '[dump]\ncompres = "lz4"\n' >"$CONFIG"
  refused 2 usage ps
  assert_contains "$err" "$CONFIG:2: 'dump' has no option 'compres' to set; did you mean 'compress'?"
  refused 2 usage config
  STASIS_CONFIG='' done_by ps
  printf '[dmup]\ncompress = "lz4"\n' >"$CONFIG"
  refused 2 usage ps
  assert_contains "$err" "there is no verb 'dmup'; did you mean 'dump'?"
  printf '[dump]\ncompress = "lzz"\n' >"$CONFIG"
  refused 2 usage dump 1 "$image"
  assert_contains "$err" "$CONFIG: --compress: 'lzz'"
  refused 2 usage config
  # Of one call alone.
  printf 'name = "all-the-same"\n' >"$CONFIG"
  refused 2 usage ps
  # The user's word on one program, too.
  local word
  for word in 'graphs-are-safe = true' 'watch-graphs = "30s"' 'attach = true' 'ignore-obstacles = true'; do
    printf '[suspend]\n%s\n' "$word" >"$CONFIG"
    refused 2 usage ps
  done
  # What the command line has wrong is not the file's.
  printf '[dump]\ncompress = "lz4"\n' >"$CONFIG"
  refused 2 usage dump 1 "$image" --compress lzz
  [[ $err != *"$CONFIG"* ]]
  capture stasis dump --help
  ((status == 0))
}

@test "a file that is no TOML is refused with the line, and not as an option that no verb has" {
  printf 'driver-timeout = "7s"\na b c\n' >"$CONFIG"
  refused 2 usage ps
  assert_contains "$err" "$CONFIG:2: 'a b c' is no line of TOML: one is KEY = VALUE or [VERB]"
  printf 'Host: *\n' >"$CONFIG"
  refused 2 usage config
  assert_contains "$err" "is no line of TOML"
  printf '\x7fELF\x02\x01\x01 \xff\n' >"$CONFIG"
  refused 2 usage config
  assert_contains "$err" "is no line of TOML"
}

@test "config shows the variables that the commands read, below the options of verbs" {
  printf '[dump]\ncompress = "lz4"\n' >"$CONFIG"
  STASIS_RING=32M STASIS_BUILD=/somewhere STASIS_ALL_TESTS=1 capture stasis config
  assert_equal "$status" 0
  grep -qE '^VARIABLE +VALUE$' <<<"$out"
  grep -qE '^STASIS_RING +32M$' <<<"$out"
  grep -qE '^STASIS_SIM_DIR +/' <<<"$out"
  [[ $out != *STASIS_BUILD* && $out != *STASIS_ALL_TESTS* && $out != *"all "* ]]
  STASIS_RING=32M STASIS_BUILD=/somewhere capture stasis config --json
  assert_equal "$(json '[one["name"] for one in d["environment"] if one["name"] in ("STASIS_RING", "STASIS_BUILD")]')" "['STASIS_RING']"
}

@test "root reads no file that another user could have written, nor one that is none" {
  need_root "files of another user"
  local folder=$BATS_TEST_TMPDIR/theirs why
  not_read() {
    capture stasis config --json
    ((status == 0))
    assert_equal "$(json 'd["files"][0]["read"], d["values"]')" "False []"
    capture stasis recover --all
    assert_contains "$err" "is not read: "
  }
  mkdir "$folder"
  printf 'criu = "/tmp/evil"\n' >"$folder/config"
  export STASIS_CONFIG=$folder/config
  done_by config
  assert_contains "$out" "/tmp/evil"
  chown 65533 "$folder/config"
  not_read
  chown 0 "$folder/config"
  chmod 666 "$folder/config"
  not_read
  chmod 644 "$folder/config"
  chown 65533 "$folder"
  not_read
  # A link of theirs to a file of root's.
  ln -s "$CONFIG" "$folder/link"
  printf 'criu = "/tmp/evil"\n' >"$CONFIG"
  STASIS_CONFIG=$folder/link not_read
  chown 0 "$folder"
  chown -h 65533 "$folder/link"
  STASIS_CONFIG=$folder/link not_read
  # Nor does it wait for what is no file.
  mkfifo "$folder/fifo"
  STASIS_CONFIG=$folder/fifo not_read
  head -c 70000 /dev/zero >"$folder/large"
  STASIS_CONFIG=$folder/large not_read
  assert_contains "$err" "is larger than 65536 bytes"
}
