# For tests of workloads with the agent in them: to start them, and what the agent and the tool did.

setup() {
  setup_stasis
  agent=$STASIS_BUILD/lib/stasis/libstasis-preload.so
}
teardown() { end_stasis; }

# start_agent KIND [ARGUMENT...]: as start_target, with the agent in it.
start_agent() { LD_PRELOAD=$agent start_target "$@"; }

# went WORD: which path the verb before took; it was asked for --json.
went() { assert_equal "$(json 'd["path"]')" "$1" "path (${out})"; }

# cycles COUNT PATH: suspends and resumes TARGET that often, by that path.
cycles() {
  local i
  for ((i = 0; i < $1; ++i)); do
    done_by suspend "$TARGET" --json
    went "$2"
    gpu_is_free
    stands_still
    done_by resume "$TARGET" --json
    went "$2"
    target_goes_on
  done
}

# What the agent in TARGET says of itself: 0 running, 1 closed, 2 evicted, 3 held, 4 filling.
agent_page() { python3 -IS "$BATS_TEST_DIRNAME/agent_page.py" "$TARGET" "$@"; }
agent_state() { agent_page state; }
agent_is() { [[ $(agent_state) == "$1" ]]; }

# phase_names: of what was done last, in order.
phase_names() { json '" ".join(p["name"].replace(" ", "-") for p in d["phases"])'; }
# Memory copied beside the driver's checkpoint, and, of a program that the driver has held, before it.
beside="prepare close evict lock checkpoint copy-out"
later="prepare close mover copy-out evict lock checkpoint"
# The agent's own descriptors of memory.
pieces_kept() { find "/proc/$TARGET/fd" -lname "$STASIS_SIM_DIR/*/mem-*" | wc -l; }

# hold_page [NAME]: another process is the agent's peer, by its name a tool if not told otherwise; sets HOLDER.
hold_page() {
  rm -f "$BATS_TEST_TMPDIR/holder" # it says "locked" of the one before
  python3 -IS -c 'import fcntl, os, sys, time
open("/proc/self/comm", "w").write(sys.argv[2])
for fd in os.listdir(f"/proc/{sys.argv[1]}/fd"):
    path = f"/proc/{sys.argv[1]}/fd/{fd}"
    if "memfd:stasis-agent" in os.readlink(path):
        page = os.open(path, os.O_RDWR)
        fcntl.flock(page, fcntl.LOCK_EX)
        print("locked", flush=True)
        time.sleep(600)' "$TARGET" "${1-stasis}" >"$BATS_TEST_TMPDIR/holder" 3>&- &
  HOLDER=$!
  at_end_kill "$HOLDER"
  wait_until 60 grep -q locked "$BATS_TEST_TMPDIR/holder"
}
let_page_go() {
  kill -KILL "$HOLDER"
  wait "$HOLDER" 2>/dev/null || true
}
