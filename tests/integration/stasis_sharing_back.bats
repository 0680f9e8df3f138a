#!/usr/bin/env bats
# When jobs whose processes share GPU memory come back, and when they are refused, on the simulated driver.

load helpers
load stasis_lib
load stasis_sharing_lib

setup() { setup_sharing; }
teardown() { end_stasis; }

@test "one of ranks that were suspended together does not come back alone" {
  start_ranks 2
  done_by suspend "$TARGET"
  refused 8 not-supported resume "${CHILDREN[0]}"
  assert_contains "$err" "shares GPU memory with others that were suspended with it" "\`stasis resume $TARGET\`"
  in_state checkpointed "${CHILDREN[@]}"
  done_by resume "$TARGET"
  target_goes_on
  nothing_left
  # As it was before.
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  if ((EUID != 0)); then # CRIU
    target_verifies
    return
  fi
  # Nor one of ranks that were restored to be suspended.
  dump_it
  done_by restore --images-dir "$image" --detach --leave-suspended
  at_end_kill "$TARGET" "${CHILDREN[@]}"
  refused 8 not-supported resume "${CHILDREN[0]}"
  assert_contains "$err" "\`stasis resume $TARGET\`"
  in_state checkpointed "${CHILDREN[@]}"
  done_by resume "$TARGET"
  restored_verifies 3
}

# The driver counts what they share for each of them.
@test "ranks that fill their GPU with what they share come back to it" {
  local SIZE=24M STASIS_SIM_GPUS=280M
  export STASIS_SIM_GPUS
  start_ranks 2
  done_by suspend "$TARGET" --json
  (($(json 'sum(p["gpu_bytes"] or 0 for p in d["processes"])') <= 280 << 20)) || { echo "$out"; return 1; }
  done_by resume "$TARGET"
  target_goes_on
  if ((EUID == 0)); then # CRIU
    dump_it
    restore_it
    restored_verifies 3
  else
    target_verifies
  fi
}

# Their kernels would wait for each other on GPUs that cannot be switched between them.
@test "ranks do not come back beside ranks of another job that were suspended before, too" {
  local first
  start_ranks 2
  first=$TARGET
  start_ranks 2
  done_by suspend "$TARGET"
  done_by resume "$TARGET"
  done_by suspend "$first"
  refused 7 busy resume "$first"
  assert_contains "$err" "ranks of another job that was suspended or restored before: process"
  [[ $err == *"${CHILDREN[0]} ("* ]]
  target_goes_on
  if ((EUID == 0)); then # CRIU
    done_by suspend "$TARGET"
    done_by resume "$first"
    done_by dump "$first" --images-dir "$image"
    wait "$first" || true
    done_by resume "$TARGET"
    refused_by 7 busy stasis restore --images-dir "$image" --detach
    [[ ! -e /proc/$first ]]
    done_by suspend "$TARGET"
    done_by restore --images-dir "$image" --detach
    at_end_kill "$first"
  else
    done_by suspend "$TARGET"
    done_by resume "$first"
  fi
  # In the other order it is the same.
  refused 7 busy resume "$TARGET"
  done_by swap "$first" "$TARGET"
  target_verifies
}

@test "recover does not bring ranks back beside ranks of another job, either" {
  local first
  start_ranks 2
  first=$TARGET
  start_ranks 2
  done_by suspend "$first"
  done_by resume "$first"
  done_by suspend "$first"
  status=0
  STASIS_FAULT=suspend.verified:kill stasis suspend "$TARGET" >/dev/null 2>&1 3>&- || status=$?
  assert_equal "$status" 137
  done_by resume "$first"
  refused 7 busy recover "$TARGET"
  assert_contains "$err" "ranks of another job" "suspend that job first, then \`stasis recover $TARGET\`"
  in_state checkpointed "${CHILDREN[@]}"
  done_by suspend "$first"
  done_by recover "$TARGET"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  target_verifies
}
