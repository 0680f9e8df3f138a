# Where a test has failed, remembered at a tenth of bats's own cost. Before each command of a test, and of every
# function that it calls, bats notes all callers, in loops of its own: a fifth of the processor time of all tests.
# Here two texts are kept, and taken apart when a test has failed. Other versions of bats may do without these
# functions: then theirs are left as they are; also with `bats --trace`, which prints each command.

declare -F bats_debug_trap bats_capture_stack_trace bats_get_failure_stack_trace >/dev/null || return 0
((${BATS_TRACE_LEVEL:-0} == 0)) || return 0

# The lines, functions and files of all callers, one each in a line; and those of the command before.
callers_now="" callers_before=""
# shellcheck disable=SC2034 # bats reads them
BATS_DEBUG_LAST_STACK_TRACE=() BATS_DEBUG_LASTLAST_STACK_TRACE=()

bats_debug_trap() {
  [[ $1 == */bats-core/* || $1 == */cheap_trace.bash || ${BATS_INTERRUPTED-}${BATS_TIMED_OUT-} ]] && return
  local IFS=$'\n'
  callers_before=$callers_now
  callers_now="${#FUNCNAME[@]}"$'\n'"${BASH_LINENO[*]}"$'\n'"${FUNCNAME[*]}"$'\n'"${BASH_SOURCE[*]}"
}

# bats_get_failure_stack_trace NAME: sets that array. bats has said by then which of the two commands has failed.
bats_get_failure_stack_trace() {
  local callers=$callers_before parts count i frames=()
  [[ -z ${BATS_DEBUG_LAST_STACK_TRACE_IS_VALID:-} ]] || callers=$callers_now
  mapfile -t parts <<<"$callers"
  count=${parts[0]:-0}
  # The first is the trap's own.
  for ((i = 1; i < count; ++i)); do
    local function=${parts[1 + count + i]} source=${parts[1 + 2 * count + i]:-${BATS_TEST_SOURCE-}}
    frames+=("${parts[i]} $function $source")
    case $function in "${BATS_TEST_NAME-}" | setup | teardown | setup_file | teardown_file | setup_suite | teardown_suite) break ;; esac
    [[ $function != source || ${parts[2 + 2 * count + i]-} != *bats-exec-file ]] || break
  done
  eval "$1=(\"\${frames[@]}\")"
}
