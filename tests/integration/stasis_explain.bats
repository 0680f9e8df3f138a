#!/usr/bin/env bats
# stasis explain, the catalogue of errors, and the page that is made of it.

load helpers
load stasis_lib

setup() { setup_stasis; }
teardown() { end_stasis; }

@test "every error code is listed, explained, and in the page with its exit status" {
  capture stasis explain --json
  assert_equal "$status" 0
  local code exit_status all page=$BATS_TEST_DIRNAME/../../docs/errors.md
  all=$(json '"\n".join(e["code"] + " " + str(e["exit_status"]) for e in d["errors"])')
  (($(wc -l <<<"$all") > 30))
  capture stasis explain
  while read -r code exit_status; do
    [[ $out == *$'\n'"$code "* ]]
  done <<<"$all"
  for code in $(cut -d' ' -f1 <<<"$all"); do
    capture stasis explain "$code"
    assert_equal "$status" 0
    [[ $out == "$code (exit status "* ]]
    grep -q "^| \`$code\` | " "$page"
  done
}

# Asserted by name, in a test of the programs: `refused STATUS CODE`, `answered ... CODE`, `[CODE]`, `"code")' CODE`, or
# what C, C++ and Python call it.
happens() {
  local name=${1//-/_} camel
  camel=$(sed -E 's/(^|-)(.)/\U\2/g' <<<"$1")
  grep -rqE "(refused|refused_by|answered \S+ \S+) [0-9]+ $1( |$)|\[$1\]|\[.code.\].* $1$|STASIS_${name^^}\b|stasis\.$camel\b|ErrorCode::k$camel\b" \
    "$source/tests/integration" "$source/tests/python" "$source/tests/capi" "$source"/src/criu/*_integrationtest.cc
}

@test "each code of the catalogue is made to happen by a test" {
  local code missing='' source=$BATS_TEST_DIRNAME/../..
  capture stasis explain --json
  for code in $(json '" ".join(e["code"] for e in d["errors"])'); do
    happens "$code" || missing+=" $code"
  done
  assert_equal "$missing" "" "never made to happen"
}

@test "each id of an obstacle is explained, in the page, and used" {
  capture stasis explain --json
  assert_equal "$status" 0
  local id meaning all unused='' page=$BATS_TEST_DIRNAME/../../docs/errors.md source=$BATS_TEST_DIRNAME/../../src
  all=$(json '"\n".join(o["id"] + " " + o["meaning"] for o in d["obstacles"])')
  (($(wc -l <<<"$all") > 70))
  while read -r id meaning; do
    grep -qF "| \`$id\` | $meaning |" "$page"
    # One that is used and not in the list does not compile.
    grep -rqF --include='*.cc' "\"$id\"" "$source" "$source/../plugins" || unused+=" $id"
  done <<<"$all"
  assert_equal "$unused" "" "in the list and not used"
  capture stasis explain managed-memory
  assert_equal "$status" 0
  [[ $out == managed-memory*cudaMallocManaged* ]]
  capture stasis explain --json NCCL
  assert_equal "$(json 'd["found"][0]["id"]')" nccl
}

@test "docs/errors.md is what tools/errors-page makes of the catalogue" {
  cp -r "$BATS_TEST_DIRNAME/../../tools" "$BATS_TEST_TMPDIR/tools"
  mkdir "$BATS_TEST_TMPDIR/docs"
  "$BATS_TEST_TMPDIR/tools/errors-page" --build "$STASIS_BUILD"
  diff "$BATS_TEST_DIRNAME/../../docs/errors.md" "$BATS_TEST_TMPDIR/docs/errors.md"
}

@test "a code that there is not is answered with the one that was meant" {
  refused 2 usage explain Image-corupt
  assert_contains "$err" "'Image-corupt' is unknown; did you mean 'image-corrupt'?"
  refused 2 usage explain own-netwrok
  assert_contains "$err" "did you mean 'own-network'?"
  # A whole message has its code at its end.
  done_by explain "stasis: error: no job has the name x [no-such-process]"
  assert_contains "$out" "no-such-process (exit status 3)"
  refused 2 usage explain nosuchthing
  [[ $err != *"did you mean"* ]]
}

@test "an answer of the driver is explained by its number, for each call" {
  capture stasis explain 801
  assert_equal "$status" 0
  [[ $out == *"801 of the driver at checkpoint: not-supported"*"managed memory"*"801 of the driver: not-supported"*"CUDA IPC"* ]]
  [[ $out != *"{"* ]]
  capture stasis explain 600 --json
  assert_equal "$(json 'd["found"][0]["code"]')" timeout
  # By CUDA's name of it, too.
  capture stasis explain cuda_error_not_supported
  [[ $out == "CUDA_ERROR_NOT_SUPPORTED of the driver at checkpoint: not-supported"*"managed memory"* ]]
  capture stasis explain CUDA_ERROR_ECC_UNCORRECTABLE
  [[ $out == "CUDA_ERROR_ECC_UNCORRECTABLE of the driver: driver-error"* ]]
  refused 2 usage explain CUDA_SUCCESS
  # And by the CUDA runtime's, whose number is the same.
  capture stasis explain cudaErrorMemoryAllocation
  [[ $out == "CUDA_ERROR_OUT_OF_MEMORY (cudaErrorMemoryAllocation) of the driver at checkpoint: out-of-host-memory"*"of the driver: out-of-gpu-memory"* ]]
  capture stasis explain cudaerrorlaunchfailure --json
  assert_equal "$(json '[(one["number"], one["code"]) for one in d["found"]]')" "[(0, 'driver-error')]"
  refused 2 usage explain cudaErrorNoSuchThing
  # One that is not in the table, an exit status of ours, and what is neither.
  capture stasis explain 77
  [[ $out == "77 of the driver: driver-error"*dmesg* ]]
  capture stasis explain 10
  [[ $out == *"10 as an exit status of stasis:"*image-corrupt* ]]
  for number in 0 -1; do
    capture stasis explain -- "$number"
    assert_equal "$status" 2
  done
}

@test "each check of inspect is explained" {
  local id
  for id in $(stasis explain --json | python3 -IS -c 'import json, sys; print(*(c["id"] for c in json.load(sys.stdin)["checks"]))'); do
    done_by explain "$id"
    [[ $out == "$id"* ]]
  done
  done_by explain tcp-ports
  assert_contains "$out" "a check of \`stasis inspect\` and restore: the TCP ports are free"
  refused 2 usage explain proces-numbers
  assert_contains "$err" "did you mean 'process-numbers'?"
}

@test "what stasis run ends with is explained" {
  capture stasis explain 75
  assert_contains "$out" "75 as an exit status of stasis run: the job was saved and has ended"
  capture stasis explain 137
  assert_contains "$out" "137 as an exit status of stasis run: signal 9 (SIGKILL) ended the command, or \`stasis dump\` did"
  capture stasis explain 127 --json
  assert_equal "$(json '[f["meaning"] for f in d["found"] if f.get("verb") == "run"]')" "['there is no such command']"
  capture stasis explain 128
  [[ $out != *"stasis run"* ]]
}

@test "a line of CRIU's log is explained, whole or in part, in one word or several" {
  capture stasis explain '(00.070934) Error (criu/sk-inet.c:188): inet: Connected TCP socket, consider using --tcp-established option.'
  assert_equal "$status" 0
  [[ $out == "criu-failed: inet: Connected TCP socket"*"--tcp-established"* ]]
  capture stasis explain No space left on device
  assert_equal "$status" 0
  [[ $out == no-space:* ]]
  capture stasis explain --json Dumping FAILED.
  assert_equal "$status" 2
  assert_equal "$(json 'd["error"]["code"]')" usage
}

# answered FAULT VERB STATUS CODE TEXT: the driver's answer is told for what it is, and the process stays as it was.
answered() {
  local was
  was=$(state_of)
  STASIS_SIM_FAULTS=$1 refused "$3" "$4" "$2" "$TARGET"
  assert_contains "$err" "$5"
  assert_contains "$err" "what to do: "
  assert_equal "$(state_of)" "$was" "after $1"
  all="$all $1:$2"
}

@test "each answer of the driver is told for what it is, and leaves the process as it was" {
  local all=''
  start_target memory --size 1M
  answered lock:error=1 suspend 8 driver-error "could not lock"
  answered lock:error=2 suspend 11 out-of-gpu-memory "nvidia-smi shows who uses it"
  answered lock:error=100 suspend 11 gpu-mismatch "CUDA_VISIBLE_DEVICES"
  answered lock:error=304 suspend 8 driver-error "alive and may be traced"
  answered lock:error=401 suspend 6 wrong-state "does not allow lock"
  answered "lock:timeout" suspend 7 timeout "--timeout"
  answered lock:error=800 suspend 5 not-permitted "persistence mode"
  answered lock:error=801 suspend 8 not-supported "shared between processes"
  answered lock:error=803 suspend 8 driver-unsupported "different versions"
  answered lock:error=999 suspend 8 driver-error "dmesg"
  answered checkpoint:error=1 suspend 8 driver-error "could not checkpoint"
  answered checkpoint:error=2 suspend 11 out-of-host-memory "raise the limit of its cgroup"
  answered checkpoint:error=304 suspend 8 driver-error "crashed in the driver"
  answered checkpoint:error=800 suspend 5 not-permitted "does not permit checkpoint"
  answered checkpoint:error=801 suspend 8 not-supported "cudaMallocManaged"
  answered checkpoint:error=999 suspend 8 not-supported "gives no reason"
  target_goes_on
  done_by suspend "$TARGET"
  answered restore:error=1 resume 8 not-supported "CUDA IPC"
  STASIS_SIM_FAULTS="restore:error=1" capture stasis resume "$TARGET" --json
  assert_equal "$(json '[(o["id"], o["pid"]) for o in d["error"]["obstacles"]]')" "[('shared-gpu-memory', $TARGET)]" "$out"
  answered restore:error=2 resume 11 out-of-gpu-memory "not enough GPU memory"
  answered restore:error=100 resume 11 gpu-mismatch "sees no GPU"
  answered restore:error=304 resume 8 driver-error "earlier restore"
  answered restore:error=800 resume 5 not-permitted "does not permit restore"
  answered restore:error=801 resume 8 not-supported "NCCL"
  answered restore:error=999 resume 8 driver-error "could not restore"
  (($(wc -w <<<"$all") == 23))
  done_by resume "$TARGET"
  target_verifies
}

@test "logs reads what runc and crun leave: dump.log beside CRIU's files, or alone in their work path" {
  local folder=$BATS_TEST_TMPDIR/work
  mkdir "$folder"
  refused 10 image-incomplete logs "$folder"
  printf '%s\n' "(00.010000) Error (criu/sk-inet.c:198): inet: Connected TCP socket, consider using --tcp-established option." \
    "(00.020000) Error (criu/cr-dump.c:2111): Dumping FAILED." >"$folder/dump.log"
  capture stasis logs "$folder"
  ((status == 0))
  assert_contains "$out" "$folder/dump.log"
  assert_contains "$out" "Connected TCP socket"
  assert_contains "$out" "what to do: "
  # No link of another's, and nothing that is no log.
  ln -s /etc/passwd "$folder/restore.log"
  echo "Error (x): y" >"$folder/notes.txt"
  echo "Error (x): y" >"$folder/daemon.log"
  capture stasis logs "$folder" --json
  assert_equal "$(json 'len(d["logs"]), d["logs"][0]["diagnosis"]["code"]')" "1 criu-failed"
}

