#!/usr/bin/env bats
# plugins/criu, in the real CRIU, on the simulated driver: plain `criu dump` and `criu restore`.
#
# The cases "stuck:" are those in which CRIU's own plugin was seen to leave a job locked or without
# its GPU, or CRIU saying that all is well. After each one no process is stuck, and CRIU's exit status
# tells what happened.
# Long because each case starts criu by hand with the same helpers.

load helpers
load stasis_lib
load agent_target_lib

setup() {
  setup_stasis
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
  need_root "CRIU"
  plugin=$STASIS_BUILD/lib/stasis/criu
  [[ -e $plugin/cuda_plugin.so ]] || {
    echo "there is no plugin at $plugin: tools/get-criu --headers, then configure again" >&2
    return 1
  }
  mkdir "$image"
}
teardown() {
  end_stasis
  if [[ -e $BATS_TEST_TMPDIR/folders ]]; then xargs rm -rf <"$BATS_TEST_TMPDIR/folders"; fi
}

# criu VERB ARGUMENT...: sets status; its log is in $image/VERB.log. By the user of the array criu_as.
criu() {
  local verb=$1
  shift
  capture timeout -k 5 90 ${criu_as+"${criu_as[@]}"} "$(real_criu)" "$verb" --images-dir "$image" --log-file "$verb.log" -v4 \
    --libdir "$plugin" "$@"
}

# The same, and it succeeds, or fails and says so.
criu_does() {
  criu "$@"
  ((status == 0)) && return
  printf 'criu %s: status %s\n%s%s' "$*" "$status" "$out" "$err" >&2
  grep -hE 'Error|cuda_plugin' "$image/$1.log" >&2
  return 1
}
criu_fails() {
  criu "$@"
  ((status != 0 && status != 124 && status != 137)) && return
  printf 'criu %s: status %s\n' "$*" "$status" >&2
  grep -hE 'Error|cuda_plugin' "$image/$1.log" >&2
  return 1
}

# criu_works FAULT VERB ARGUMENT...: criu, in $tool, has come to the call of the driver that the fault draws out.
criu_works() {
  local fault=$1 verb=$2
  shift 2
  (STASIS_SIM_FAULTS=$fault exec "$(real_criu)" "$verb" "$@" --images-dir "$image" --log-file "$verb.log" -v4 \
    --libdir "$plugin" >/dev/null 2>&1 3>&-) &
  tool=$!
  at_end_kill "$tool"
  wait_until 60 works_on_it "$tool"
}
# The same, and is killed there.
killed_while_it_works() {
  local tool
  criu_works "$@"
  kill -KILL "$tool"
  wait "$tool" || true
}

# logged VERB TEXT: our words in CRIU's log.
logged() { assert_contains "$(grep -h cuda_plugin: "$image/$1.log")" "$2"; }

# The number of a session is free only when its last process has gone.
dump_target() {
  criu_does dump --tree "$TARGET" "$@"
  local pid
  for pid in "$TARGET" ${CHILDREN+"${CHILDREN[@]}"}; do wait_until 60 number_is_free "$pid"; done
  wait_until 60 session_is_free
}
# Also of children that have ended and are not collected yet.
session_is_free() { ! pgrep -s "$TARGET" >/dev/null; }
restore_target() { criu_does restore --restore-detached "$@"; }

# fails COMMAND...: a "!" in front of a command does not make a test fail.
fails() {
  ! "$@" || {
    echo "this should fail: $*" >&2
    return 1
  }
}

names_plugin() { grep -q cuda_plugin "$image/inventory.img"; }

# No process is locked, stopped or held, the workload goes on and finds all its memory right, and no
# operation is on record.
unharmed() {
  in_state running "$@"
  target_goes_on
  target_verifies
  nothing_left
}

# start_counter: sets TARGET and PORT.
start_counter() {
  local log=$BATS_TEST_TMPDIR/counter.log
  (exec_on_gpu setsid stasis-counter --gpu-memory 32M) </dev/null >"$log" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 grep -q listening "$log"
  PORT=$(sed 's/.*://' "$log")
}
ask() { timeout 60 stasis-counter --ask "$PORT"; }

# script ACTION COMMAND: a script for CRIU's --action-script.
script() {
  printf '#!/bin/bash\nif [ "$CRTOOLS_SCRIPT_ACTION" = %s ]; then %s; fi\n' "$1" "$2" \
    >"$BATS_TEST_TMPDIR/script"
  chmod +x "$BATS_TEST_TMPDIR/script"
}

# --- there and back

@test "the counter: 101, criu dump, gone, GPU free, criu restore, 102" {
  start_counter
  assert_equal "$(ask)" 101
  dump_target
  gpu_is_free
  names_plugin
  nothing_left
  restore_target
  assert_equal "$(ask)" 102
  (($(gpu_used) > 32 << 20))
  in_state running
  nothing_left
}

@test "a tree of two CUDA processes and one without goes there and back" {
  start_tree --size 8M
  dump_target
  gpu_is_free
  restore_target
  logged restore "2 process(es) restored"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  restored_verifies 3
  nothing_left
}

@test "there and back: workers that were forked from a process with CUDA" {
  start_target loader
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  criu_does dump --tree "$TARGET" --leave-running
  in_state running
  target_goes_on
  rm -r "$image" && mkdir "$image"
  dump_target
  gpu_is_free
  restore_target
  in_state running
  target_goes_on
  restored_verifies
  nothing_left
}

# CRIU stops the threads one after the other, and what was locked goes on forking until then.
# bats test_tags=long
@test "workers that are forked between the lock and the stop make the dump fail, and say so" {
  start_target loader --restless
  local i
  for i in 1 2 3 4 5; do
    criu dump --tree "$TARGET"
    ((status == 0)) || break
    restore_target
  done
  ((status != 0)) || skip "no worker came at the wrong moment"
  ((status == 1))
  [[ $(grep -h cuda_plugin: "$image/dump.log") =~ "dump once more"|"is held by" ]]
  unharmed
}

# bats test_tags=long
@test "there and back: threads that ask the driver all the time" {
  start_target poll --own-us 20
  dump_target
  restore_target
  target_goes_on
  restored_verifies
}

@test "an image of a tree without CUDA does not name the plugin, and needs no driver" {
  start_target none
  dump_target
  fails names_plugin
  [[ ! -e $image/cuda-plugin.json ]]
  STASIS_LIBCUDA=/nonexistent restore_target
  target_goes_on
  restored_verifies
}

@test "where there is no driver, a tree without CUDA is dumped all the same" {
  start_target none
  STASIS_LIBCUDA=/nonexistent dump_target
  fails names_plugin
}

@test "there and back: a program that the agent was brought to" {
  start_target memory --size 64M
  done_by attach "$TARGET" --graphs-are-safe
  dump_target
  gpu_is_free
  restore_target
  target_goes_on
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" direct
  done_by resume "$TARGET"
  target_goes_on
  restored_verifies 1
  nothing_left
}

has_agent() { grep -q memfd:stasis-agent "/proc/$1/maps"; }
# begin_attach [TIME [COMMAND...]]: criu, in $tool, by that command, watches TARGET for its graphs.
begin_attach() {
  (STASIS_ATTACH=watch-graphs=${1:-1h} exec "${@:2}" "$(real_criu)" dump --tree "$TARGET" --images-dir "$image" -v4 \
    --log-file dump.log --libdir "$plugin" --leave-running >/dev/null 2>&1 3>&-) &
  tool=$!
  at_end_kill "$tool"
  wait_until 60 has_agent "$TARGET"
}

@test "STASIS_ATTACH brings the agent to a program that runs without it, and saves it" {
  start_target memory --size 64M
  # CRIU's alarm, which ends a dump, counts what comes after.
  STASIS_ATTACH=watch-graphs=1500ms criu_does dump --tree "$TARGET" --leave-running --timeout 1 -v2
  logged dump "stasis attach: process $TARGET"
  in_state running
  target_goes_on
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" direct
  done_by resume "$TARGET"
  rm -rf "$image"
  mkdir "$image"
  # It has one now.
  STASIS_ATTACH=watch-graphs=1h dump_target
  gpu_is_free
  restore_target
  target_goes_on
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" direct
  done_by resume "$TARGET"
  restored_verifies 1
  nothing_left
}

@test "STASIS_ATTACH asks nothing of a tree without CUDA, or that is suspended" {
  export STASIS_ATTACH=graphs-are-safe
  setsid sleep 600 </dev/null >/dev/null 2>&1 3>&- &
  at_end_kill $!
  criu_does dump --tree $! --leave-running
  start_target memory --size 8M
  done_by suspend "$TARGET"
  rm -rf "$image"
  mkdir "$image"
  criu_does dump --tree "$TARGET" --leave-running
  done_by resume "$TARGET"
  unharmed
  fails has_agent "$TARGET"
}

@test "where STASIS_ATTACH cannot be done there is no dump, the program goes on, and the log says why" {
  start_target graph --size 8M
  local word
  for word in 1 watch-graphs graphs-are-safe=1; do
    STASIS_ATTACH=$word criu_fails dump --tree "$TARGET"
    logged dump "[usage]; what to do: let it be graphs-are-safe"
  done
  STASIS_ATTACH=watch-graphs=soon criu_fails dump --tree "$TARGET"
  logged dump "'soon' is no duration"
  STASIS_ATTACH=watch-graphs=4s criu_fails dump --tree "$TARGET"
  logged dump "makes or launches CUDA graphs"
  logged dump "if the program has none such: STASIS_ATTACH=graphs-are-safe; without STASIS_ATTACH the driver saves"
  in_state running
  target_goes_on
  # A driver that hangs, for as long as criu's environment says.
  STASIS_DRIVER_TIMEOUT=1000 STASIS_SIM_FAULTS="lock:hang" STASIS_ATTACH=graphs-are-safe \
    criu_fails dump --tree "$TARGET"
  logged dump "no answer within"
  logged dump "give it more time with STASIS_DRIVER_TIMEOUT in criu's environment"
  done_by recover "$TARGET"
  # Installed without the command line.
  cp "$plugin/cuda_plugin.so" "$BATS_TEST_TMPDIR"
  plugin=$BATS_TEST_TMPDIR STASIS_ATTACH=graphs-are-safe criu_fails dump --tree "$TARGET"
  logged dump "there is no program"
  in_state running
  target_goes_on
  criu_does dump --tree "$TARGET" --leave-running
  unharmed
}

@test "criu is killed while the agent is brought to a program: nothing stays" {
  start_target memory --size 64M
  local tool child
  begin_attach
  child=$(children_of "$tool")
  kill -KILL "$tool"
  wait "$tool" || true
  wait_until 20 number_is_free "$child"
  in_state running
  target_goes_on
  done_by attach "$TARGET" --graphs-are-safe
  unharmed
}

@test "STASIS_ATTACH: criu under nohup goes on when its terminal is closed" {
  start_target memory --size 64M
  local tool
  begin_attach 1500ms nohup
  kill -HUP "$tool" "$(children_of "$tool")"
  wait "$tool" || { grep -h cuda_plugin "$image/dump.log" >&2 && return 1; }
  unharmed
}

@test "STASIS_ATTACH: criu's --timeout is the time of the attach, too" {
  # As if a kernel took longer than the ten seconds that it has by itself.
  printf '[attach]\ntimeout = 300\n' >"$BATS_TEST_TMPDIR/config"
  export STASIS_CONFIG=$BATS_TEST_TMPDIR/config STASIS_ATTACH=graphs-are-safe
  # Nor does it end before the attach is over where a machine at work takes seconds to come to that.
  start_target spin --busy-ms 3000
  criu_fails dump --tree "$TARGET"
  logged dump "give it more time (--timeout)"
  criu_does dump --tree "$TARGET" --leave-running --timeout 20
  has_agent "$TARGET"
  unharmed
}

@test "STASIS_ATTACH: the program is found where the plugin is a link" {
  start_target memory --size 8M
  ln -s "$plugin/cuda_plugin.so" "$BATS_TEST_TMPDIR"
  plugin=$BATS_TEST_TMPDIR STASIS_ATTACH=graphs-are-safe criu_does dump --tree "$TARGET" --leave-running
  has_agent "$TARGET"
  unharmed
}

@test "STASIS_ATTACH: a remedy names what helps this dump" {
  start_target ipc
  STASIS_ATTACH=graphs-are-safe criu_fails dump --tree "$TARGET"
  logged dump "if they share none: STASIS_IGNORE_OBSTACLES=1 in criu's environment"
  # It is refused without that as well.
  fails logged dump "without STASIS_ATTACH"
  target_goes_on
  start_target memory --size 8M
  local tool status=0
  begin_attach
  kill -KILL "$(children_of "$tool")"
  wait "$tool" || status=$?
  assert_equal "$status" 1
  logged dump "it was ended by signal 9"
  logged dump "run \`stasis recover $TARGET\`"
  done_by recover "$TARGET"
  unharmed
}

@test "dump --leave-running saves it and lets it go on" {
  start_target memory --size 8M
  criu_does dump --tree "$TARGET" --leave-running
  names_plugin
  unharmed
}

@test "a process that was suspended before the dump stays so, with its threads kept still" {
  start_target poll --own-us 20
  done_by suspend "$TARGET"
  criu_does dump --tree "$TARGET" --leave-running
  fails names_plugin
  in_state checkpointed
  done_by resume "$TARGET"
  unharmed
}

@test "suspended, dumped and restored, it is suspended, and can be resumed" {
  start_target poll --own-us 20
  done_by suspend "$TARGET"
  dump_target
  restore_target
  in_state checkpointed
  done_by resume "$TARGET"
  target_goes_on
  restored_verifies
}

@test "a process that was locked before the dump stays so, there and after the restore" {
  start_target memory --size 4M
  cuda-checkpoint --action lock --pid "$TARGET"
  criu_does dump --tree "$TARGET" --leave-running
  in_state locked
  rm -r "$image" && mkdir "$image"
  dump_target
  restore_target
  in_state locked
  cuda-checkpoint --action unlock --pid "$TARGET"
  target_goes_on
  restored_verifies
}

@test "a pre-dump leaves the GPU alone" {
  start_target memory --size 8M
  STASIS_SIM_FAULTS="lock:error=999" criu pre-dump --tree "$TARGET"
  fails grep -qE "cuda_plugin: (checkpointed|Error)" "$image/pre-dump.log"
  unharmed
  ((status == 0)) || skip "this kernel lets no criu pre-dump: $(grep Error "$image/pre-dump.log" | tail -n 1)"
}

# --- another GPU

@test "STASIS_DEVICE_MAP brings it to another GPU, and so does a file in the image's directory" {
  export STASIS_SIM_GPUS=2x256M
  start_target memory --size 8M
  (($(gpu_used_of 0) > 0 && $(gpu_used_of 1) == 0))
  dump_target
  STASIS_DEVICE_MAP=0=1 restore_target
  (($(gpu_used_of 0) == 0 && $(gpu_used_of 1) > 0))
  target_goes_on
  rm -r "$image" && mkdir "$image"
  dump_target
  printf ' 1=0 \r\n\r\n' >"$image/cuda-device-map"
  restore_target
  (($(gpu_used_of 0) > 0 && $(gpu_used_of 1) == 0))
  target_goes_on
  restored_verifies
}

# No CRIU that has been released has the option; the plugin is given it as CRIU's development branch does.
@test "--plugin-option cuda_plugin.device-map, where CRIU has that, brings it to another GPU" {
  command -v cc >/dev/null || skip "no C compiler"
  local option
  with_option() {
    printf 'int criu_plugin_get_options(int *n, char ***words) {\n' >"$BATS_TEST_TMPDIR/option.c"
    printf '  static char *all[] = {"criu-plugin", "--other.map=0=0", "--cuda_plugin.%s", 0};\n' "$1" >>"$BATS_TEST_TMPDIR/option.c"
    printf '  *n = 3, *words = all;\n  return 0;\n}\n' >>"$BATS_TEST_TMPDIR/option.c"
    cc -shared -fPIC -nostdlib -o "$BATS_TEST_TMPDIR/option.so" "$BATS_TEST_TMPDIR/option.c"
    criu_as=(env "LD_PRELOAD=$BATS_TEST_TMPDIR/option.so")
  }
  export STASIS_SIM_GPUS=2x256M
  start_target memory --size 8M
  dump_target
  for option in device-map device-map=0=7; do
    with_option "$option"
    criu_fails restore --restore-detached
    wait_until 60 number_is_free
  done
  with_option device-map=0=1
  # It comes before the environment.
  STASIS_DEVICE_MAP=0=0 restore_target
  (($(gpu_used_of 0) == 0 && $(gpu_used_of 1) > 0))
  target_goes_on
  restored_verifies
}

@test "a pipe or a link in the place of the plugin's files in an image does not hold it up" {
  start_target memory --size 8M
  dump_target
  mkfifo "$image/cuda-device-map"
  criu_fails restore --restore-detached
  logged restore "cuda-device-map of the image is no regular file"
  wait_until 60 number_is_free
  rm "$image/cuda-device-map"
  mv "$image/cuda-plugin.json" "$BATS_TEST_TMPDIR/record"
  ln -s "$BATS_TEST_TMPDIR/record" "$image/cuda-plugin.json"
  criu_fails restore --restore-detached
  wait_until 60 number_is_free
  mv "$BATS_TEST_TMPDIR/record" "$image/cuda-plugin.json"
  restore_target
  target_goes_on
  restored_verifies
}

@test "on a machine with other GPUs it takes those" {
  start_target memory --size 8M
  dump_target
  STASIS_SIM_MACHINE=other restore_target
  STASIS_SIM_MACHINE=other target_goes_on
  restored_verifies
}

@test "a map that makes no sense is refused before a process exists" {
  start_target memory --size 8M
  dump_target
  STASIS_DEVICE_MAP=0=7 criu_fails restore --restore-detached
  wait_until 60 number_is_free
  logged restore "[device-map-invalid]"
  restore_target
  target_goes_on
  restored_verifies
}

# --- what the plugin does on its way

@test "the plugin starts no process and prints nothing" {
  # A utility that is asked would say so here, and its warning would be read as an answer.
  mkdir "$BATS_TEST_TMPDIR/bin"
  printf '#!/bin/sh\necho "warning: 0"; touch %s/asked\n' "$BATS_TEST_TMPDIR" \
    >"$BATS_TEST_TMPDIR/bin/cuda-checkpoint"
  chmod +x "$BATS_TEST_TMPDIR/bin/cuda-checkpoint"
  start_counter
  assert_equal "$(ask)" 101
  PATH=$BATS_TEST_TMPDIR/bin:$PATH dump_target
  assert_equal "$out$err" ""
  PATH=$BATS_TEST_TMPDIR/bin:$PATH restore_target
  assert_equal "$out$err" ""
  [[ ! -e $BATS_TEST_TMPDIR/asked ]]
  assert_equal "$(ask)" 102
}

@test "what the driver would lose is refused before anything is touched" {
  start_target collective --children 2 --size 256K --pause-ms 2 --like-nccl
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  STASIS_SIM_FAULTS="lock:error=999" criu_fails dump --tree "$TARGET"
  logged dump "through NCCL"
  logged dump "NCCL_P2P_DISABLE=1"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  STASIS_IGNORE_OBSTACLES=1 criu_does dump --tree "$TARGET" --leave-running
  logged dump "in spite of this"
  unharmed "${CHILDREN[@]}"
}

@test "a tree whose processes may share GPU memory is refused before anything is touched" {
  start_target ipc
  STASIS_SIM_FAULTS="lock:error=999" criu_fails dump --tree "$TARGET"
  logged dump "may be another process's"
  in_state running
  target_goes_on
  target_verifies
}

# bats test_tags=long
@test "a process that another operation has is left to it" {
  start_target memory --size 8M
  (STASIS_SIM_FAULTS=checkpoint:delay=16s exec stasis suspend "$TARGET" >/dev/null 2>&1 3>&-) &
  local tool=$!
  at_end_kill "$tool"
  wait_until 60 works_on_it "$tool"
  criu_fails dump --tree "$TARGET" --timeout 3
  wait "$tool"
  in_state checkpointed
  done_by resume "$TARGET"
  unharmed
}

@test "a tool that comes while criu works is refused, and says what to do" {
  start_tree --size 8M
  local tool
  criu_works lock:delay=6s dump --leave-running --timeout 120 --tree "$TARGET"
  kill -STOP "$tool"
  for verb in suspend resume recover "dump --images-dir $image.other"; do
    # shellcheck disable=SC2086
    refused 7 busy $verb "$TARGET"
    assert_contains "$err" "criu dump\` (process $tool)"
    assert_contains "$err" "stasis recover $TARGET"
  done
  kill -CONT "$tool"
  wait "$tool"
  unharmed "${CHILDREN[@]}"
}

# --- the cases in which a job was left stuck

@test "stuck: the post-dump script fails" {
  start_target poll --own-us 20
  script post-dump "exit 3"
  criu_fails dump --tree "$TARGET" --action-script "$BATS_TEST_TMPDIR/script"
  unharmed
}

# bats test_tags=long
@test "stuck: the post-dump script fails, and the tree is a tree" {
  start_tree --size 8M
  script post-dump "exit 3"
  criu_fails dump --tree "$TARGET" --action-script "$BATS_TEST_TMPDIR/script"
  unharmed "${CHILDREN[@]}"
}

@test "stuck: --leave-stopped" {
  start_target memory --size 8M
  criu_does dump --tree "$TARGET" --leave-stopped
  grep -q "^State:.T" "/proc/$TARGET/status"
  (($(gpu_used) > 0))
  kill -CONT "$TARGET"
  unharmed
}

@test "stuck: a debugger traces the process, so that it cannot be seized once it is locked" {
  start_target memory --size 8M
  python3 -IS -c 'import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, int(sys.argv[1]), None, None) != 0: sys.exit("cannot seize")
print("traces", flush=True)
time.sleep(120)' "$TARGET" >"$BATS_TEST_TMPDIR/tracer" 2>&1 3>&- &
  local tracer=$!
  at_end_kill "$tracer"
  wait_until 60 grep -q traces "$BATS_TEST_TMPDIR/tracer"
  criu_fails dump --tree "$TARGET"
  kill -KILL "$tracer"
  unharmed
}

@test "stuck: the checkpoint fails" {
  start_tree --size 8M
  STASIS_SIM_FAULTS="checkpoint:error=801 pid=${CHILDREN[1]}" criu_fails dump --tree "$TARGET"
  logged dump "[not-supported]"
  unharmed "${CHILDREN[@]}"
}

@test "stuck: the restore of the GPU's state fails" {
  start_target memory --size 8M
  dump_target
  STASIS_SIM_FAULTS="restore:error=999" criu_fails restore --restore-detached
  wait_until 60 number_is_free
  logged restore "the restore fails"
  gpu_is_free
  nothing_left
  # The image is whole.
  restore_target
  target_goes_on
  restored_verifies
}

@test "stuck: the unlock after the restore fails" {
  start_tree --size 8M
  dump_target
  STASIS_SIM_FAULTS="unlock:error=999 pid=${CHILDREN[0]}" criu_fails restore --restore-detached
  wait_until 60 number_is_free
  wait_until 60 number_is_free "${CHILDREN[0]}"
  wait_until 60 number_is_free "${CHILDREN[1]}"
  gpu_is_free
}

@test "stuck: no GPU where it is restored" {
  start_target memory --size 8M
  dump_target
  STASIS_SIM_GPUS=none criu_fails restore --restore-detached
  wait_until 60 number_is_free
  fails grep -q Forking "$image/restore.log"
  logged restore "what to do: "
}

# CRIU itself says of the first of the driver's files that it does not know it.
@test "where there is no driver, a process with CUDA is refused, and CRIU's log says why" {
  start_target memory --size 8M
  STASIS_LIBCUDA=/nonexistent criu_fails dump --tree "$TARGET"
  local first
  first=$(grep Error "$image/dump.log" | grep -v rlimit | head -n 1)
  assert_contains "$first" "Error (plugin): cuda_plugin: process $TARGET uses CUDA"
  assert_contains "$first" "[driver-missing]; what to do: check the file that STASIS_LIBCUDA names"
  unharmed
}

# bats test_tags=long
@test "stuck: no driver where it is restored" {
  start_target memory --size 8M
  dump_target
  STASIS_LIBCUDA=/nonexistent criu_fails restore --restore-detached
  wait_until 60 number_is_free
  fails grep -q Forking "$image/restore.log"
  logged restore "[driver-missing]"
}

# bats test_tags=long
@test "stuck: fewer GPUs where it is restored" {
  STASIS_SIM_GPUS=2x256M start_target contexts
  STASIS_SIM_GPUS=2x256M dump_target
  STASIS_SIM_GPUS=1x256M criu_fails restore --restore-detached
  wait_until 60 number_is_free
  fails grep -q Forking "$image/restore.log"
  logged restore "[gpu-mismatch]"
}

@test "stuck: too little GPU memory where it is restored" {
  start_target memory --size 64M
  dump_target
  STASIS_SIM_GPUS=1x32M criu_fails restore --restore-detached
  wait_until 60 number_is_free
  logged restore "[out-of-gpu-memory]"
}

@test "stuck: what the driver prints is no answer" {
  # A driver whose library prints as soon as it is loaded.
  printf '#include <stdio.h>\n__attribute__((constructor)) static void f(void) { puts("warning: 0"); fflush(stdout); }\n' \
    >"$BATS_TEST_TMPDIR/noisy.c"
  command -v cc >/dev/null || skip "no C compiler"
  cc -shared -fPIC -Wl,--no-as-needed -o "$BATS_TEST_TMPDIR/libcuda-noisy.so.1" "$BATS_TEST_TMPDIR/noisy.c" \
    "$STASIS_LIBCUDA" -Wl,-rpath,"${STASIS_LIBCUDA%/*}"
  start_target memory --size 8M
  STASIS_LIBCUDA=$BATS_TEST_TMPDIR/libcuda-noisy.so.1 dump_target
  assert_contains "$out" "warning: 0"
  restore_target
  target_goes_on
  restored_verifies
}

@test "stuck: the lock times out" {
  start_tree --size 8M
  STASIS_SIM_FAULTS="lock:timeout pid=${CHILDREN[1]}" criu_fails dump --tree "$TARGET" --timeout 5
  logged dump "[timeout]"
  unharmed "${CHILDREN[@]}"
}

# bats test_tags=long
@test "stuck: the lock hangs past CRIU's time-out" {
  start_tree --size 8M
  STASIS_SIM_FAULTS="lock:hang pid=${CHILDREN[1]}" criu_fails dump --tree "$TARGET" --timeout 4
  logged dump "[timeout]"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  # What it could not be sure of is on record.
  done_by recover --all
  unharmed "${CHILDREN[@]}"
}

@test "stuck: the checkpoint hangs" {
  start_tree --size 8M
  STASIS_DRIVER_TIMEOUT=5000 STASIS_SIM_FAULTS="checkpoint:hang pid=${CHILDREN[1]}" criu_fails dump --tree "$TARGET"
  logged dump "[no-answer]"
  # The plugin cannot take back what hangs while criu lives; the other one is back.
  in_state running "${CHILDREN[0]}"
  done_by recover --all
  unharmed "${CHILDREN[@]}"
}

@test "stuck: the post-dump script fails, and the way back hangs" {
  start_target memory --size 8M
  script post-dump "exit 3"
  STASIS_DRIVER_TIMEOUT=5000 STASIS_SIM_FAULTS=restore:hang \
    criu_fails dump --tree "$TARGET" --action-script "$BATS_TEST_TMPDIR/script"
  done_by recover --all
  unharmed
}

@test "stuck: the restore hangs" {
  start_tree --size 8M
  dump_target
  STASIS_DRIVER_TIMEOUT=5000 STASIS_SIM_FAULTS="restore:hang pid=${CHILDREN[1]}" criu_fails restore --restore-detached
  logged restore "has not answered"
  local pid
  for pid in "$TARGET" "${CHILDREN[@]}"; do wait_until 60 number_is_free "$pid"; done
  gpu_is_free
  nothing_left
  restore_target
  target_goes_on
  restored_verifies 3
}

# thread_masks: which signals each thread of TARGET blocks.
thread_masks() { sed -n 's/^SigBlk:.//p' /proc/"$TARGET"/task/*/status; }

# Closes what bats has open: it lies in a folder that only root may enter.
close_folders() {
  local fd
  for fd in /proc/self/fd/*; do
    fd=${fd##*/}
    ((fd <= 2)) || eval "exec $fd>&-"
  done
}

@test "stuck: without privileges" {
  local user=(setpriv --reuid=65534 --regid=65534 --clear-groups)
  local capabilities=+checkpoint_restore,+setpcap
  local criu_user=("${user[@]}" "--inh-caps=$capabilities" "--ambient-caps=$capabilities")
  "${criu_user[@]}" true || skip "setpriv cannot give the capabilities that criu --unprivileged needs"
  # The folder of the tests is root's alone.
  local open
  open=$(mktemp -d)
  echo "$open" >>"$BATS_TEST_TMPDIR/folders"
  chmod 777 "$open"
  "${user[@]}" test -r "$plugin/cuda_plugin.so" || skip "the build folder is not open to other users"
  export STASIS_SIM_DIR=$open/sim STASIS_STATE_DIR=$open/state
  image=$open/image
  "${user[@]}" mkdir "$STASIS_SIM_DIR" "$image"
  TARGET_STATUS=$open/status
  TARGET_LOG=$open/log
  "${user[@]}" touch "$TARGET_LOG"
  (cd / && close_folders && exec_on_gpu setsid "${user[@]}" stasis-workload poll --own-us 20 --status "$TARGET_STATUS") \
    </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  local before
  before=$(thread_masks)
  criu_as=("${criu_user[@]}")
  criu_does dump --unprivileged --tree "$TARGET" --leave-running
  assert_equal "$(thread_masks)" "$before" "signal masks"
  in_state running
  target_goes_on
  rm -r "$image" && "${user[@]}" mkdir "$image"
  dump_target --unprivileged
  restore_target --unprivileged
  assert_equal "$(thread_masks)" "$before" "signal masks"
  in_state running
  target_goes_on
  restored_verifies
}

@test "stuck: processes that wait for each other on the GPU" {
  start_target collective --children 3 --size 256K --pause-ms 2
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  # What one after the other comes to.
  cuda-checkpoint --action lock --pid "${CHILDREN[0]}"
  # All have come to where they wait.
  wait_until 60 no_round_for 3
  fails cuda-checkpoint --action lock --timeout 500 --pid "${CHILDREN[1]}"
  cuda-checkpoint --action unlock --pid "${CHILDREN[0]}"
  target_goes_on
  local n
  for n in 1 2 3; do
    rm -r "$image" && mkdir "$image"
    criu_does dump --tree "$TARGET" --leave-running
    target_goes_on
  done
  rm -r "$image" && mkdir "$image"
  dump_target
  restore_target
  target_goes_on
  restored_verifies 4
}

# Where CRIU dies, only `stasis recover` can help.
@test "stuck: criu is killed in the middle, after the checkpoint" {
  start_target memory --size 8M
  # CRIU's own fault point: it leaves without a word while it dumps the first process.
  CRIU_FAULT=1 criu dump --tree "$TARGET"
  ((status != 0))
  wait_until 60 in_state checkpointed
  done_by ps
  assert_contains "$out" "left behind by criu dump"
  done_by recover "$TARGET"
  unharmed
}

@test "stuck: criu is killed when all is written" {
  start_tree --size 8M
  script post-dump 'p=$$; until [ "$(<"/proc/$p/comm")" = criu ]; do p=$(ps -o ppid= -p $p | tr -d " "); done; kill -KILL "$p"'
  criu dump --tree "$TARGET" --action-script "$BATS_TEST_TMPDIR/script"
  ((status != 0))
  wait_until 60 in_state checkpointed "${CHILDREN[@]}"
  done_by recover --all
  unharmed "${CHILDREN[@]}"
}

@test "stuck: criu is killed when it has stopped the processes to end them" {
  start_tree --size 8M
  script post-dump 'p=$$; until [ "$(<"/proc/$p/comm")" = criu ]; do p=$(ps -o ppid= -p $p | tr -d " "); done; kill -KILL "$p"'
  criu dump --tree "$TARGET" --action-script "$BATS_TEST_TMPDIR/script"
  wait_until 60 in_state checkpointed "${CHILDREN[@]}"
  # As the plugin does it, a moment later than any script can come in between.
  kill -STOP "${CHILDREN[@]}"
  done_by recover --all
  unharmed "${CHILDREN[@]}"
}

@test "stuck: criu is killed while it waits for a lock" {
  start_target memory --size 8M
  killed_while_it_works lock:hang dump --tree "$TARGET"
  done_by recover --all
  unharmed
}

@test "stuck: criu is killed while the GPU memory comes back" {
  start_tree --size 8M
  dump_target
  killed_while_it_works "restore:delay=60s pid=${CHILDREN[1]}" restore --restore-detached
  done_by ps
  assert_contains "$out" "left behind by criu restore"
  done_by recover --all
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
  restored_verifies 3
}

# Without the plugin criu takes the tiles from the thread, which then ends by SIGILL.
@test "a thread in the middle of a computation with AMX is not dumped, and has its tiles" {
  grep -qw amx_tile /proc/cpuinfo || skip "this processor has no AMX"
  start_script amx_tiles.py
  criu_fails dump --tree "$TARGET"
  logged dump "is in the middle of a computation with AMX"
  in_state running
  script_goes_on
  nothing_left
}

# start_ranks COUNT [ARGUMENT...]: processes that write into each other's GPU memory.
start_ranks() {
  LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so \
    start_target collective --children "$1" --size 4M --pause-ms 2 --sharing "${@:2}"
  mapfile -t CHILDREN < <(children_of "$TARGET")
  assert_equal "${#CHILDREN[@]}" "$1"
  at_end_kill "${CHILDREN[@]}"
  target_goes_on
}

@test "ranks that write into each other's memory go there and back, again and again" {
  local i
  start_ranks 2
  for ((i = 0; i < $(times 2 3); ++i)); do
    dump_target --network-lock skip
    gpu_is_free
    restore_target
    logged restore "2 process(es) restored"
    in_state running "${CHILDREN[@]}"
    target_goes_on
    nothing_left
    rm -rf "$image"
    mkdir "$image"
  done
  criu_does dump --tree "$TARGET" --network-lock skip --leave-running
  target_goes_on
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  in_state running "${CHILDREN[@]}"
  nothing_left
  restored_verifies 3
}

@test "ranks do not come back beside ranks of another job that were suspended before" {
  local other ranks
  start_ranks 2 --like-nccl
  other=$TARGET ranks=("${CHILDREN[@]}")
  start_ranks 2 --like-nccl
  done_by suspend "$other"
  done_by resume "$other"
  dump_target --network-lock skip --tcp-established
  criu_fails restore --restore-detached --tcp-established
  logged restore "ranks of another job that was suspended or restored before: process"
  for pid in "$TARGET" "${CHILDREN[@]}"; do wait_until 60 number_is_free "$pid"; done
  in_state running "${ranks[@]}"
  done_by suspend "$other"
  restore_target --tcp-established
  target_goes_on
}

@test "ranks whose memory the driver does not give out again once it was restored go there and back" {
  export STASIS_SIM_EXPORTS_RESTORED_BELOW=2M
  start_ranks 2
  dump_target --network-lock skip
  restore_target
  target_goes_on
  # By the direct path, too, as what replaces it is new memory.
  done_by suspend "$TARGET" --path direct
  done_by resume "$TARGET"
  target_goes_on
  nothing_left
  restored_verifies 3
}

@test "what one process alone has inherited can leave once the driver has restored it" {
  export STASIS_SIM_EXPORTS_RESTORED_BELOW=2M
  TARGET_STATUS=$BATS_TEST_TMPDIR/orphans TARGET_LOG=$BATS_TEST_TMPDIR/orphans.log
  (LD_PRELOAD=$STASIS_BUILD/lib/stasis/libstasis-preload.so \
    exec_on_gpu setsid python3 -S "$BATS_TEST_DIRNAME/../gpu/orphans.py" "$TARGET_STATUS" ends 1) </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  at_end_kill "$TARGET"
  wait_until 60 target_is_up
  mapfile -t CHILDREN < <(children_of "$TARGET")
  at_end_kill "${CHILDREN[@]}"
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  target_goes_on
  dump_target --network-lock skip
  restore_target
  target_goes_on
  for _ in 1 2; do
    done_by suspend "$TARGET"
    done_by resume "$TARGET"
    target_goes_on
  done
}

@test "ranks that share memory of the host's, too, also if the dump fails at any step" {
  local fault
  start_ranks 2 --of-host
  for fault in "lock:timeout pid=${CHILDREN[1]}" "checkpoint:error=801 pid=${CHILDREN[1]}"; do
    STASIS_SIM_FAULTS=$fault criu_fails dump --tree "$TARGET" --network-lock skip --timeout 4
    in_state running "${CHILDREN[@]}"
    target_goes_on
    nothing_left
  done
  # CRIU means to end them, and does not.
  script post-dump "exit 3"
  criu_fails dump --tree "$TARGET" --network-lock skip --action-script "$BATS_TEST_TMPDIR/script"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
  dump_target --network-lock skip
  restore_target
  target_goes_on
  restored_verifies 3
}

# The first import that each rank makes after that of its start fails.
@test "ranks to which the driver does not give shared memory again: a dump says what helps, a restore fails" {
  STASIS_SIM_FAULTS="import:error=2@2" start_ranks 2
  STASIS_SIM_FAULTS="checkpoint:error=801 pid=${CHILDREN[1]}" criu_fails dump --tree "$TARGET" --network-lock skip
  logged dump "could not take other processes' memory again"
  logged dump "stasis recover"
  capture stasis recover --all # that of the second fails, then
  done_by recover --all
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
  target_verifies
  STASIS_SIM_FAULTS="import:error=2@2" start_ranks 2
  dump_target --network-lock skip
  criu_fails restore --restore-detached
  logged restore "could not take other processes' memory again"
  gpu_is_free
}

@test "stuck: criu is killed when ranks have given up what they share, and when they are about to take it again" {
  start_ranks 2
  killed_while_it_works "checkpoint:delay=60s pid=${CHILDREN[1]}" dump --tree "$TARGET" --network-lock skip
  done_by recover --all
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
  rm -rf "$image"
  mkdir "$image"
  dump_target --network-lock skip
  killed_while_it_works "restore:delay=60s pid=${CHILDREN[1]}" restore --restore-detached
  done_by recover --all
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
  restored_verifies 3
}

@test "stuck: criu is killed when it has stopped ranks to end them" {
  start_ranks 2
  script post-dump 'p=$$; until [ "$(<"/proc/$p/comm")" = criu ]; do p=$(ps -o ppid= -p $p | tr -d " "); done; kill -KILL "$p"'
  criu dump --tree "$TARGET" --network-lock skip --action-script "$BATS_TEST_TMPDIR/script"
  wait_until 60 in_state checkpointed "${CHILDREN[@]}"
  kill -STOP "${CHILDREN[@]}"
  done_by recover --all
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
}

# bats test_tags=long
@test "stuck: the lock hangs past CRIU's time-out when ranks have given up what they share: it says so" {
  start_ranks 2
  STASIS_SIM_FAULTS="lock:hang pid=${CHILDREN[1]}" \
    criu_fails dump --tree "$TARGET" --network-lock skip --timeout 4
  logged dump "stands still: process ${CHILDREN[0]}, ${CHILDREN[1]} [timeout]"
  done_by ps
  assert_contains "$err" "process ${CHILDREN[0]} stands still until \`stasis recover $TARGET\`"
  done_by recover "$TARGET"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
}

@test "a rank that waits for one that another tool has locked: the dump takes too long, and says so" {
  start_ranks 2
  cuda-checkpoint --action lock --pid "${CHILDREN[1]}"
  criu_fails dump --tree "$TARGET" --network-lock skip --timeout 2
  logged dump "[timeout]"
  fails logged dump "not-rolled-back" 2>/dev/null
  nothing_left
  cuda-checkpoint --action unlock --pid "${CHILDREN[1]}"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
}

# Its parent stands still, and does not end the others.
@test "a rank is killed when criu has announced the dump: no image is made that nothing can restore" {
  local rc=0 tool
  start_ranks 2
  kill -STOP "$TARGET"
  criu_works "lock:delay=2s pid=${CHILDREN[0]}" dump --tree "$TARGET" --network-lock skip
  kill -KILL "${CHILDREN[1]}"
  wait "$tool" || rc=$?
  assert_equal "$rc" 1
  logged dump "process ${CHILDREN[1]}, which shares GPU memory with others, has ended meanwhile"
  logged dump "end it (\`kill -9 ${CHILDREN[0]}\`)"
  kill -KILL "${CHILDREN[0]}" "$TARGET"
  done_by recover --all
  nothing_left
}

@test "a process that has another's memory is killed in the checkpoint: its owner goes on" {
  local go=$BATS_TEST_TMPDIR/go child rc=0 tool
  start_doing share "$go"
  touch "$go"
  wait_until 60 test -s "$go.done"
  child=$(children_of "$TARGET")
  criu_works "checkpoint:delay=2s pid=$TARGET" dump --tree "$TARGET" --leave-running
  kill -KILL "$child"
  wait "$tool" || rc=$?
  assert_equal "$rc" 1
  logged dump "the processes are as they were"
  target_goes_on
  nothing_left
}

@test "managed memory takes longer than CRIU's time to be given up: it is taken again, and the program goes on" {
  STASIS_SIM_FAULTS=transfer:delay=100ms LD_PRELOAD=$agent start_target managed --size 8M --pause-ms 5
  criu_fails dump --tree "$TARGET" --timeout 2
  logged dump "have taken it again, and run on [timeout]; what to do: give criu more time (--timeout)"
  in_state running
  target_goes_on
  nothing_left
  restored_verifies
}

@test "managed memory of programs with the agent goes there and back, also if the dump fails" {
  LD_PRELOAD=$agent start_target managed --size 64M --pause-ms 5
  criu_does dump --tree "$TARGET" --leave-running
  target_goes_on
  STASIS_SIM_FAULTS=checkpoint:error=801 criu_fails dump --tree "$TARGET"
  in_state running
  target_goes_on
  script post-dump "exit 3"
  criu_fails dump --tree "$TARGET" --action-script "$BATS_TEST_TMPDIR/script"
  in_state running
  target_goes_on
  nothing_left
  dump_target
  gpu_is_free
  restore_target
  target_goes_on
  nothing_left
  restored_verifies
}

@test "memory that a child has open by CUDA IPC goes there and back" {
  local go=$BATS_TEST_TMPDIR/go
  start_doing share "$go"
  touch "$go"
  wait_until 60 test -s "$go.done"
  dump_target
  restore_target
  target_goes_on
  # The child closes it, and another opens it anew.
  rm "$go"
  wait_until 60 test ! -e "$go.done"
  touch "$go"
  wait_until 60 test -s "$go.done"
  nothing_left
  restored_verifies
}

# CRIU restores a connection that waits to be accepted only behind the socket that is to accept it.
@test "processes that wait for what the owner of memory says are restored, and open it then" {
  local go=$BATS_TEST_TMPDIR/go number owner openers pid
  TARGET_LOG=$BATS_TEST_TMPDIR/target.log
  TARGET_STATUS=$BATS_TEST_TMPDIR/target.status
  (LD_PRELOAD=$agent exec_on_gpu setsid bash -c '
    trap : TERM
    for number in 1 2 3; do stasis-agent-target open-shared "$2.done.$number" "$2" & done
    stasis-agent-target share-large "$1" "$2" &
    wait' - "$TARGET_STATUS" "$go") </dev/null >"$TARGET_LOG" 2>&1 3>&- &
  TARGET=$!
  echo "$TARGET" >>"$targets"
  wait_until 60 target_is_up
  four_there() { (($(pgrep -c -P "$TARGET" -x stasis-agent-ta) == 4)); }
  wait_until 60 four_there
  owner=$(pgrep -P "$TARGET" -f share-large)
  mapfile -t openers < <(pgrep -P "$TARGET" -f open-shared)
  at_end_kill "$owner" "${openers[@]}"
  waits_for_owner() { grep -Eqs '^4[257] ' "/proc/$1/syscall"; } # connect, recvfrom, recvmsg
  done_by suspend "$owner"
  touch "$go"
  for pid in "${openers[@]}"; do wait_until 60 waits_for_owner "$pid"; done
  dump_target
  for pid in "$owner" "${openers[@]}"; do wait_until 60 number_is_free "$pid"; done
  restore_target
  done_by resume "$owner"
  for number in 1 2 3; do wait_until 60 test -s "$go.done.$number"; done
  target_goes_on
}

@test "one of two ranks by itself: refused, as its agent could not take the other's memory again" {
  start_ranks 2
  criu_fails dump --tree "${CHILDREN[0]}" --network-lock skip --shell-job
  logged dump "outside of the tree"
  unharmed "${CHILDREN[@]}"
}

@test "a job that listens on a TCP port is restored at once, though connections to it were just closed" {
  local port
  start_listening
  dump_target
  closed_just_now
  # Another program's, at another address with that port, is not ended.
  python3 -IS -c 'import socket, sys
server, client = socket.socket(), socket.socket()
server.bind(("127.0.0.2", int(sys.argv[1])))
server.listen(1)
client.connect(server.getsockname())
server.accept()[0].close()
client.recv(1)' "$port"
  local others
  others="0200007F:$(printf %04X "$port") [0-9A-F]*:[0-9A-F]* 06 "
  grep -q "$others" /proc/net/tcp
  restore_target
  it_listens
  grep -q "$others" /proc/net/tcp
  target_goes_on
}
