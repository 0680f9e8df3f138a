#!/usr/bin/env bats
# Programs that only look as if they had an agent: what they hold up.

load helpers
load stasis_lib
load agent_lib

# forge COUNT HOW: so many of them, of another user, on the GPU; sets FORGED.
forge() {
  local folder=$BATS_TEST_TMPDIR/forged pid
  FORGED=()
  mkdir -p "$folder"
  chmod 777 "$folder"
  let_others_in
  for ((i = 0; i < $1; ++i)); do
    LD_LIBRARY_PATH=${STASIS_LIBCUDA%/*} python3 -IS "$BATS_TEST_DIRNAME/forged_agent.py" "$folder" 65534 "$2" 3>&- &
    FORGED+=($!)
    at_end_kill $!
  done
  for pid in "${FORGED[@]}"; do wait_until 60 test -e "$folder/ready-$pid"; done
}
end_forged() {
  kill -KILL "${FORGED[@]}"
  wait "${FORGED[@]}" 2>/dev/null || true
}

# soon VERB [ARGUMENT]...: it is done, by a machine with much else to do in less time than one of them was waited for.
soon() {
  local start=$EPOCHREALTIME ms
  done_by "$@"
  ms=$(((${EPOCHREALTIME/[.,]/} - ${start/[.,]/}) / 1000))
  ((ms < 5000)) || { echo "$1 took $ms ms beside those that are '$how'" >&2; return 1; }
}

@test "programs of another user that only look as if they had an agent hold up no verb on others" {
  need_root "programs of other users"
  local how
  start_agent memory --size 24M
  for how in silent busy keeps locked unmapped many; do
    forge 3 "$how"
    soon ps
    soon suspend "$TARGET"
    case $how in
      silent | busy | locked) assert_contains "$err" "cannot hold meanwhile: process ${FORGED[0]} (" ;;
      many) assert_contains "$err" "could not be asked within a second" ;;
    esac
    soon resume "$TARGET"
    STASIS_FAULT=checkpoint.after:kill capture stasis suspend "$TARGET" --path driver
    soon recover --all
    in_state running
    target_goes_on
    end_forged
  done
  target_verifies
  nothing_left
}

@test "programs of another user that only look as if they had an agent hold up no dump and restore of others" {
  need_root "CRIU, and programs of other users"
  local how=busy
  start_agent memory --size 24M
  forge 3 busy
  soon dump "$TARGET" --images-dir "$image"
  soon restore --images-dir "$image" --detach 3>&-
  at_end_kill "$TARGET"
  restored_verifies
}

# Its name is a tool's, which is waited for.
@test "Ctrl-C ends the doctor's waiting for an agent's page that its program keeps locked" {
  need_root "programs of other users"
  local tool start
  forge 1 tool
  # A shell's commands in the background ignore SIGINT.
  env --default-signal=INT stasis doctor "${FORGED[0]}" >/dev/null 2>&1 3>&- &
  tool=$!
  sleep 2
  kill -INT "$tool"
  start=$SECONDS
  wait "$tool" && return 1
  ((SECONDS - start < 5)) || { echo "it took $((SECONDS - start)) s" >&2; return 1; }
}
