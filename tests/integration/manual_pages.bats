#!/usr/bin/env bats
# Man pages and completions are those of the program, and can be used; so is "did you mean".

load helpers
load stasis_lib

setup() {
  setup_stasis
  DOCS=$BATS_TEST_DIRNAME/../../docs
}
teardown() { end_stasis; }

# completed WORD...: what bash offers for the last one.
completed() {
  bash -c '. "$1"; shift; compopt() { :; }; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _stasis; printf "%s\n" "${COMPREPLY[@]}"' \
    bash "$DOCS/completions/stasis.bash" "$@"
}

@test "man pages and completions are what tools/manual-pages makes of the program" {
  mkdir "$BATS_TEST_TMPDIR/docs"
  cp -r "$BATS_TEST_DIRNAME/../../tools" "$BATS_TEST_TMPDIR/tools"
  "$BATS_TEST_TMPDIR/tools/manual-pages" --build "$STASIS_BUILD"
  mv "$BATS_TEST_TMPDIR/docs/man"/*.1 "$BATS_TEST_TMPDIR/"
  diff -r "$DOCS/completions" "$BATS_TEST_TMPDIR/docs/completions"
  local page
  for page in "$BATS_TEST_TMPDIR"/*.1; do
    diff "$DOCS/man/${page##*/}" "$page"
  done
  # cuda-checkpoint, stasis-get-criu and stasis-task are no verbs.
  assert_equal "$(ls "$DOCS"/man/*.1 | wc -l)" "$(($(ls "$BATS_TEST_TMPDIR"/*.1 | wc -l) + 3))"
}

@test "each verb and each of its options stands in its man page" {
  local verb option seen=0
  for verb in $(stasis --help | awk '/^Verbs:/ { on = 1; next } /^[A-Z]/ { on = 0 } on && /^  [a-z]/ { print $1 }'); do
    grep -qF "stasis\\-$verb" "$DOCS/man/stasis.1"
    for option in $(stasis "$verb" --help | grep -oE '(^|,)  ?-[-a-z,]+|,--[a-z-]+' | tr -d ' ' | tr ',' '\n' | grep '^--' | sort -u); do
      grep -qF -- "\\fB${option//-/\\-}\\fR" "$DOCS/man/stasis-$verb.1"
      seen=$((seen + 1))
    done
  done
  ((seen > 60))
  for option in $(cuda-checkpoint --help | grep -oE -- '^--[a-z-]+' | sort -u); do
    grep -qF -- "${option//-/\\-}" "$DOCS/man/cuda-checkpoint.1"
  done
  local page source=$BATS_TEST_DIRNAME/../..
  for page in tools/get-criu:stasis-get-criu deploy/slurm/stasis-task:stasis-task; do
    for option in $("$source/${page%:*}" --help | grep -oE -- '--[a-z][a-z0-9-]+' | sort -u); do
      grep -qF -- "${option//-/\\-}" "$DOCS/man/${page#*:}.1" || { echo "$option is not in the man page of ${page#*:}" >&2; return 1; }
    done
  done
}

@test "headings are those that were written" {
  assert_equal "$(grep -h '^\.SH' "$DOCS"/man/stasis*.1 | sort -u | tr '\n' ' ')" \
    ".SH ARGUMENTS .SH DESCRIPTION .SH ENVIRONMENT .SH EXAMPLES .SH EXIT STATUS .SH NAME .SH OPTIONS .SH OPTIONS FOR CRIU .SH OPTIONS FOR JOBS .SH SEE ALSO .SH SYNOPSIS .SH VERBS "
}

@test "man pages are without a warning" {
  command -v groff >/dev/null || skip "no groff"
  local page
  for page in "$DOCS"/man/*; do
    assert_equal "$(groff -man -Tutf8 -ww -z "$page" 2>&1)" "" "$page"
  done
  groff -man -Tutf8 -P-c -P-b -P-o -P-u "$DOCS/man/stasis-dump.1" | grep -q -- '--images-dir'
}

@test "bash completes verbs, options, values and processes" {
  [[ $(completed stasis du) == dump ]]
  [[ $(completed stasis dump --leave-) == *--leave-running*--leave-suspended* ]]
  [[ $(completed stasis dump --sync '') == *disk*none* ]]
  # "=" is a word of its own to bash.
  [[ $(completed stasis dump --sync = d) == disk ]]
  [[ $(completed stasis dump --sync =) == *disk*none* ]]
  [[ $(completed stasis -v dum) == dump ]]
  mkdir "$BATS_TEST_TMPDIR/image-of-mine"
  [[ $(completed stasis inspect "$BATS_TEST_TMPDIR/image") == "$BATS_TEST_TMPDIR/image-of-mine" ]]
  [[ $(completed stasis restore -D "$BATS_TEST_TMPDIR/image") == "$BATS_TEST_TMPDIR/image-of-mine" ]]
  start_target memory --size 1M
  [[ $'\n'$(completed stasis suspend '')$'\n' == *$'\n'"$TARGET"$'\n'* ]]
}

@test "zsh and fish can read their completions" {
  if command -v zsh >/dev/null; then zsh -n "$DOCS/completions/_stasis"; fi
  if command -v fish >/dev/null; then
    fish --no-execute "$DOCS/completions/stasis.fish"
    offered() { fish -c "source '$DOCS/completions/stasis.fish'; complete -C '$1'"; }
    [[ $(offered 'stasis du') == dump* ]]
    [[ $(offered 'stasis --vers') == --version* ]]
    [[ $(offered 'stasis -v dump --leave-r') == --leave-running* ]]
    assert_equal "$(offered 'stasis dump --sync ' | cut -f1 | tr '\n' ' ')" "disk none "
    assert_equal "$(offered 'stasis explain dump --le')" ""
  fi
  command -v zsh >/dev/null || command -v fish >/dev/null || skip "neither zsh nor fish"
}

@test "a verb or an option that there is not is answered with the one that was meant" {
  refused 2 usage dmup 1
  assert_contains "$err" "there is no verb 'dmup'; did you mean 'dump'?"
  refused 2 usage dump 1 --images-dri=/x
  assert_contains "$err" "there is no option '--images-dri'; did you mean '--images-dir'?"
  [[ $err != *"one process or job"* ]]
  refused 2 usage restore --leave-suspend -D /x
  assert_contains "$err" "did you mean '--leave-suspended'?"
  refused 2 usage frobnicate
  assert_contains "$err" "there is no verb 'frobnicate'"
  [[ $err != *"did you mean"* ]]
  refused 2 usage DUMP 1 /x
  assert_contains "$err" "there is no verb 'DUMP'; did you mean 'dump'?"
  # Of a value that is missing no word on how many there may be.
  refused 2 usage suspend 1 --timeout
  assert_contains "$err" "--timeout needs a value: TIME"
  [[ $err != *"one process or job"* ]]
  refused 2 usage restore --verify
  assert_contains "$err" "--verify needs a value: one of first, late"
  [[ $err != *"the directory once"* ]]
  # In other programs' words.
  refused 2 usage checkpoint 1 image
  assert_contains "$err" "there is no verb 'checkpoint'; did you mean 'dump'?"
  refused 2 usage help list
  assert_contains "$err" "there is no verb 'list'; did you mean 'ps'?"
  refused 2 usage config dmup
  assert_contains "$err" "there is no verb 'dmup'; did you mean 'dump'?"
  # Not what means the opposite; what alone begins so; and no value taken for an option.
  refused 2 usage unsuspend 1
  [[ $err != *"did you mean"* ]]
  refused 2 usage dump 1 --images /x
  assert_contains "$err" "did you mean '--images-dir'?"
  refused 2 usage dump -D --foo
  [[ $err != *"--foo"* ]]
  refused 2 usage -- dump 1
  [[ $err != *"did you mean"* ]]
  refused 2 usage --config x # not an option that is hidden
  [[ $err != *"did you mean"* ]]
  refused 2 usage --versoin
  assert_contains "$err" "did you mean '--version'?"
  refused 2 usage --jsno ps
  refused 2 usage dump
  assert_contains "$err" "required"
}

@test "each verb has usage and three examples, and every example is one that the program takes" {
  local verb words
  stasis describe-command-line >"$BATS_TEST_TMPDIR/known"
  python3 -IS -c 'import json, sys
for verb in json.load(sys.stdin)["verbs"]:
    assert len(verb["examples"]) == 3, verb["name"]
    for example in verb["examples"]:
        print(example["command"])' <"$BATS_TEST_TMPDIR/known" >"$BATS_TEST_TMPDIR/examples"
  # Of what a `run` starts nothing is here; all others name jobs and images that are not there.
  while IFS= read -r words; do
    [[ $words != "stasis run "* && $words != *"ps --watch"* ]] || continue
    capture timeout 60 bash -c "cd '$BATS_TEST_TMPDIR' && $words </dev/null"
    [[ $err != *"[usage]"* ]] || { echo "$words: $err" >&2 && return 1; }
  done <"$BATS_TEST_TMPDIR/examples"
  for verb in suspend dump run; do
    capture stasis help "$verb"
    assert_contains "$out" "Usage: stasis $verb [OPTION]... "
    assert_contains "$out" "Examples:
  stasis $verb "
  done
}

@test "no help text has the names of CLI11's types, and none is wider than 80 columns" {
  local verb
  for verb in $(python3 -IS -c 'import json, sys; print(*(v["name"] for v in json.load(sys.stdin)["verbs"]))' \
    < <(stasis describe-command-line)); do
    capture stasis "$verb" --help
    ! grep -E ' \.\.\.( |$)|TEXT|INT|FLOAT|UINT|\[OPTIONS\]|SUBCOMMAND|Positionals|REQUIRED|\.\.\. \.\.\.|->' <<<"$out" || return 1
    assert_equal "$(grep -E '^.{81}' <<<"$out" || true)" ""
  done
}

@test "no message names a page of the source, which packages do not have" {
  local program
  for program in "$STASIS_BUILD"/bin/{stasis,cuda-checkpoint} "$STASIS_BUILD/lib/libstasis.so.0"; do
    assert_equal "$(grep -aoE '.{20}docs/[a-z-]+\.md' "$program" || true)" "" "$program"
  done
}

@test "the statuses of a man page begin with what 0 means" {
  local page
  for page in "$DOCS"/man/stasis-{dump,run,ps}.1 "$DOCS/man/stasis.1"; do
    assert_contains "$(grep -A1 '^.SH EXIT STATUS' "$page")" $'STATUS\n0 done, 1 failed'
  done
}

@test "an option that may be repeated takes one value each time, and not the word behind it" {
  local value
  for value in --external='mnt[/x]:y' "--external mnt[/x]:y"; do
    # shellcheck disable=SC2086 # an option and its value
    refused 2 usage dump 1 "$BATS_TEST_TMPDIR/image" $value nonsense
    assert_contains "$err" "one argument too many: nonsense"
  done
  for value in "--external mnt[y]:/x" "--inherit-fd fd[1]:pipe:[1]" "--map-address 10.0.0.5=10.0.0.9"; do
    # shellcheck disable=SC2086
    refused 2 usage restore "$BATS_TEST_TMPDIR/image" $value nonsense
    assert_contains "$err" "one argument too many: nonsense"
    # Twice is well.
    # shellcheck disable=SC2086
    refused 10 image-incomplete restore $value $value "$BATS_TEST_TMPDIR/image"
  done
}

@test "the counter's help has values by their names, and examples" {
  capture stasis-counter --help
  assert_contains "$out" "--port PORT "
  assert_contains "$out" "--gpu-memory SIZE "
  assert_contains "$out" "stasis-counter --ask 8123"
  [[ $out != *UINT* && $out != *Excludes* ]]
}

@test "help, version and their mistakes are answered" {
  done_by help suspend
  assert_contains "$out" "Usage: stasis suspend"
  done_by version
  assert_equal "${out%$'\n'}" "$(stasis -V)"
  refused_by 1 io bash -c 'stasis version >/dev/full'
  [[ $err != *"stasis ps"* ]]
  refused 2 usage help dmup
  assert_contains "$err" "did you mean 'dump'?"
  refused 2 usage suspend 1 2
  assert_contains "$err" "one argument too many: 2"
  refused 2 usage dump 1
  assert_contains "$err" "DIR is required"
  assert_contains "$err" "stasis dump [OPTION]... PID DIR"
  refused 2 usage dump 1 x --sync twice
  assert_contains "$err" "'twice' is not allowed; use disk or none"
  refused 2 usage run --keep 0 -D x -- true
  assert_contains "$err" "'0' is no whole number from 1 to 1000"
}

@test "each --verify says what it compares, and when" {
  local verb
  for verb in inspect report; do
    done_by "$verb" --help
    assert_contains "$(tr -s ' \n' ' ' <<<"$out")" "also compare GPU memory and pages with their checksums, as \`stasis verify\` does"
  done
  done_by restore --help
  assert_contains "$(tr -s ' \n' ' ' <<<"$out")" "when GPU memory and pages are compared with their checksums; first: before anything is made; late: as they are read"
}

@test "names of options from earlier versions go on working, and no page has them" {
  refused 3 no-such-process suspend 999999 --force
  refused 3 no-such-process dump 999999 "$image" --ignore-undumpable
  ! grep -r -e 'ignore-undumpable' -e 'undumpable.R' "$DOCS/man" "$DOCS/completions" || return 1
  capture stasis suspend --help
  [[ $out != *"--force"* ]]
}
