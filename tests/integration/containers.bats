#!/usr/bin/env bats
# plugins/criu with a container engine: `runc checkpoint` and `runc restore`, and crun's, which call
# CRIU, on the simulated driver. The engine is told of the plugin as its users would do it, by
# /etc/criu/runc.conf or crun.conf.

load helpers
load stasis_lib

setup() {
  setup_stasis
  need_root "containers"
  plugin=$STASIS_BUILD/lib/stasis/criu
  [[ -e $plugin/cuda_plugin.so ]] || {
    echo "there is no plugin at $plugin: tools/get-criu --headers, then configure again" >&2
    return 1
  }
  name=stasis-${BATS_RUN_TMPDIR##*/}-$BATS_TEST_NUMBER
  bundle=$BATS_TEST_TMPDIR/bundle
  inside=$BATS_TEST_TMPDIR/inside # the same folder in the container
  mkdir -p "$BATS_TEST_TMPDIR/etc" "$BATS_TEST_TMPDIR/logs" "$inside" "$image"
  [[ -d /etc/criu ]] || { mkdir /etc/criu && touch "$BATS_TEST_TMPDIR/made"; }
  : >"$BATS_TEST_TMPDIR/log"
}

# with PROGRAM: the test is about runc or crun. Skips it where that one is not, or cannot work.
with() {
  local file=$1.conf
  program=$1 options=(--root "$BATS_TEST_TMPDIR/$1")
  command -v "$program" >/dev/null || skip "there is no $program (Debian's package of that name)"
  if [[ $program == crun ]]; then
    # From 1.24 to 1.28 it restores no container of another --root (containers/crun#2239).
    options=()
    # Debian 12's was built without libcriu.
    [[ $(crun --version) == *+CRIU* ]] || skip "$(crun --version | head -n 1) was built without CRIU"
    # Earlier ones do not look for a file of their own, and CRIU reads its own for every caller.
    [[ $(printf '%s\n' 1.26 "$(crun --version | sed -n 's/^crun version //p')" | sort -V | head -n 1) == 1.26 ]] ||
      file=default.conf
  fi
  # Other lines of CRIU's options would do as well; without the first, CRIU asks for iptables.
  printf 'network-lock skip\nlibdir %s\n' "$plugin" >"$BATS_TEST_TMPDIR/etc/$file"
  make_bundle true
  runs_at_all || skip "$program cannot run a container here: $(tail -n 1 "$BATS_TEST_TMPDIR/log")"
}

teardown() {
  if [[ -n ${bundle:-} ]]; then
    [[ -z ${program:-} ]] || engine delete --force "$name" >/dev/null 2>&1 || true
    # Those that CRIU has made again in the version that crun does not see.
    find /sys/fs/cgroup -depth -type d -path "*/$name*" -exec rmdir {} + 2>/dev/null || true
    [[ ! -e $BATS_TEST_TMPDIR/made ]] || rmdir /etc/criu 2>/dev/null || true
  fi
  end_stasis
}

# engine ARGUMENT...: runc or crun, with our CRIU first and our /etc/criu, which no other process sees. What it
# starts gets none of bats' open files: CRIU would have to save them.
engine() {
  PATH=$(dirname "$(real_criu)"):$PATH timeout -k 5 90 \
    unshare --mount bash -c 'mount --bind "$1" /etc/criu && shift && one_cgroup "$1" && exec "$@"' bash \
    "$BATS_TEST_TMPDIR/etc" "$program" "${options[@]}" "$@" </dev/null 3>&-
}

# one_cgroup PROGRAM: crun does not work where cgroups of both versions are mounted; there it sees
# those of version 2 alone.
one_cgroup() {
  [[ $1 == crun && -d /sys/fs/cgroup/unified ]] || return 0
  umount --recursive /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup
}
export -f one_cgroup

runs_at_all() { engine run --bundle "$bundle" "$name" >>"$BATS_TEST_TMPDIR/log" 2>&1; }

# make_bundle COMMAND...: a container of this machine's own /usr, in namespaces of its own but for the
# network's, with the simulated GPUs in it, and a user namespace if that is in the environment as
# $with_users. Its output goes to $inside/log, a file that it can reach.
make_bundle() {
  mkdir -p "$bundle/rootfs"
  (cd "$bundle" && rm -f config.json && "$program" spec)
  python3 -S - "$bundle" "$inside" "$STASIS_BUILD" "$STASIS_SIM_DIR" "$@" <<'END'
import json, os, sys
bundle, inside, build, sim, *command = sys.argv[1:]
path = bundle + "/config.json"
config = json.load(open(path))
for name in ("bin", "sbin", "lib", "lib64"):
    target = os.readlink("/" + name) if os.path.islink("/" + name) else None
    link = f"{bundle}/rootfs/{name}"
    if target and not os.path.islink(link):
        os.symlink(target, link)
config["process"].update(
    terminal=False,
    args=["/bin/sh", "-c", f'exec "$@" >>{inside}/log 2>&1', "sh"] + command,
    env=[f"PATH={build}/bin:/usr/bin:/bin", f"LD_LIBRARY_PATH={build}/lib/stasis/sim", f"STASIS_SIM_DIR={sim}"]
    + [f"{k}={v}" for k, v in os.environ.items() if k.startswith("STASIS_SIM_") and k != "STASIS_SIM_DIR"],
)
config["root"]["readonly"] = False
namespaces = config["linux"]["namespaces"]
config["linux"]["namespaces"] = [n for n in namespaces if n["type"] in ("pid", "mount", "ipc", "uts")]
if "with_users" in os.environ:  # the host's numbers, so that it can reach the tests' folders
    config["linux"]["namespaces"].append({"type": "user"})
    for kind in ("uidMappings", "gidMappings"):
        config["linux"][kind] = [{"containerID": 0, "hostID": 0, "size": 65536}]
    # It may be mounted only by the owner of the network's namespace.
    config["mounts"] = [m for m in config["mounts"] if m["type"] != "sysfs"]
config["mounts"] = [m for m in config["mounts"] if m["type"] != "cgroup"]
for folder, how in (("/usr", "ro"), (build, "ro"), (inside, "rw"), (sim, "rw")):
    config["mounts"].append(
        {"destination": folder, "type": "bind", "source": folder, "options": ["rbind", how]})
json.dump(config, open(path, "w"))
END
}

# start_container COMMAND...: sets TARGET to its first process's number out here.
start_container() {
  make_bundle "$@"
  engine run --detach --bundle "$bundle" --pid-file "$BATS_TEST_TMPDIR/pid" "$name" \
    >/dev/null 2>"$BATS_TEST_TMPDIR/log"
  TARGET=$(<"$BATS_TEST_TMPDIR/pid")
}
start_counter() {
  start_container stasis-counter --gpu-memory 32M
  wait_until 60 grep -qs listening "$inside/log"
  PORT=$(sed 's/.*://' "$inside/log")
}
# start_workload KIND ARGUMENT...
start_workload() {
  TARGET_STATUS=$inside/status TARGET_LOG=$inside/log
  start_container stasis-workload "$@" --status "$TARGET_STATUS"
  wait_until 60 target_is_up
}
ask() { timeout 60 stasis-counter --ask "$PORT"; }

# checkpoint ARGUMENT...: sets status.
checkpoint() { capture engine checkpoint --image-path "$image" --work-path "$BATS_TEST_TMPDIR/logs" "$@" "$name"; }
# restore: sets status, and TARGET to the number that the first process has now.
restore() {
  # What is started keeps the standard streams; the test would wait for its output for ever.
  status=0 out='' err=''
  engine restore --detach --bundle "$bundle" --image-path "$image" --work-path "$BATS_TEST_TMPDIR/logs" \
    --pid-file "$BATS_TEST_TMPDIR/pid" "$@" "$name" >/dev/null 2>"$BATS_TEST_TMPDIR/log" || status=$?
  err=$(<"$BATS_TEST_TMPDIR/log")
  TARGET=$(<"$BATS_TEST_TMPDIR/pid")
}
succeeded() {
  ((status == 0)) && return
  printf 'status %s\n%s%s' "$status" "$out" "$err" >&2
  grep -hE 'Error|cuda_plugin' "$BATS_TEST_TMPDIR/logs"/*.log >&2
  return 1
}
failed() {
  ((status != 0 && status != 124 && status != 137)) || { echo "status $status" >&2; return 1; }
}
# logged VERB TEXT
logged() { assert_contains "$(grep -h cuda_plugin: "$BATS_TEST_TMPDIR/logs/$1.log")" "$2"; }
no_container() { [[ -z $(engine list --quiet) ]] || { engine list >&2; return 1; }; }

# The counter: 101, checkpoint, gone, GPU free, restore, 102.
counter_there_and_back() {
  start_counter
  assert_equal "$(ask)" 101
  checkpoint
  succeeded
  no_container
  gpu_is_free
  grep -q cuda_plugin "$image/inventory.img"
  nothing_left
  restore
  succeeded
  assert_equal "$(ask)" 102
  (($(gpu_used) > 32 << 20))
  in_state running
  nothing_left
}

@test "runc: the counter in a container: 101, checkpoint, gone, GPU free, restore, 102" {
  with runc
  counter_there_and_back
}

@test "runc: CRIU's own /etc/criu/default.conf does as well" {
  with runc
  mv "$BATS_TEST_TMPDIR/etc/runc.conf" "$BATS_TEST_TMPDIR/etc/default.conf"
  start_workload memory --size 8M
  checkpoint --leave-running
  succeeded
  grep -q cuda_plugin "$image/inventory.img"
  in_state running
  target_goes_on
}

@test "runc: several CUDA processes in a container, there and back" {
  with runc
  start_workload tree --children 2 --size 8M
  checkpoint
  succeeded
  no_container
  gpu_is_free
  restore
  succeeded
  logged restore "2 process(es) restored"
  target_goes_on
  mapfile -t CHILDREN < <(children_of "$TARGET")
  assert_equal "${#CHILDREN[@]}" 2 "children"
  in_state running "${CHILDREN[@]}"
  nothing_left
}

@test "runc: under the agent its memory goes past the driver, also when it was restored" {
  local when
  with runc
  TARGET_STATUS=$inside/status TARGET_LOG=$inside/log
  start_container env LD_PRELOAD="$STASIS_BUILD/lib/stasis/libstasis-preload.so" \
    stasis-workload memory --size 24M --status "$TARGET_STATUS"
  wait_until 60 target_is_up
  for when in before after; do
    done_by suspend "$TARGET" --json
    assert_equal "$(json 'd["path"]')" direct "$when the restore ($out)"
    gpu_is_free
    done_by resume "$TARGET"
    target_goes_on
    [[ $when == before ]] || break
    checkpoint
    succeeded
    restore
    succeeded
    target_goes_on
  done
}

@test "runc: STASIS_ATTACH brings the agent to a program in a container, also one that is paused" {
  with runc
  start_workload memory --size 96M
  engine pause "$name"
  STASIS_ATTACH=graphs-are-safe checkpoint --leave-running
  succeeded
  engine resume "$name"
  target_goes_on
  rm -r "$image" && mkdir "$image"
  STASIS_ATTACH=watch-graphs=1h checkpoint # it has one
  succeeded
  restore
  succeeded
  target_goes_on
  done_by suspend "$TARGET" --json
  assert_equal "$(json 'd["path"]')" direct "$out"
  done_by resume "$TARGET"
  target_goes_on
  nothing_left
}

@test "runc: ranks that share memory, and managed memory, there and back in a user namespace" {
  local kind
  export with_users=1
  with runc
  for kind in "collective --children 2 --size 4M --pause-ms 2 --sharing" "managed --size 8M --pause-ms 5"; do
    TARGET_STATUS=$inside/status TARGET_LOG=$inside/log
    # shellcheck disable=SC2086 # several words
    start_container env LD_PRELOAD="$STASIS_BUILD/lib/stasis/libstasis-preload.so" \
      stasis-workload $kind --status "$TARGET_STATUS"
    wait_until 60 target_is_up
    checkpoint
    succeeded
    gpu_is_free
    restore
    succeeded
    target_goes_on
    rm -r "$image" && mkdir "$image"
    checkpoint --leave-running
    succeeded
    target_goes_on
    nothing_left
    engine delete --force "$name"
    rm -rf "$image" "$TARGET_STATUS" && mkdir "$image"
  done
}

@test "runc: --leave-running saves it and lets it go on" {
  with runc
  start_workload memory --size 8M
  checkpoint --leave-running
  succeeded
  in_state running
  target_goes_on
  nothing_left
}

# containerd pauses a container before it has it saved, and resumes it afterwards. CRIU thaws it for the plugin.
@test "runc: a paused container, as containerd has it at a checkpoint, is saved and goes on when it is resumed" {
  with runc
  start_workload tree --children 2 --size 8M
  mapfile -t CHILDREN < <(children_of "$TARGET")
  engine pause "$name"
  checkpoint --leave-running
  succeeded
  grep -q cuda_plugin "$image/inventory.img"
  engine resume "$name"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  engine delete --force "$name"
  restore
  succeeded
  target_goes_on
  nothing_left
}

@test "runc: a checkpoint that fails leaves the container as it was" {
  with runc
  start_workload poll --own-us 20
  STASIS_SIM_FAULTS="checkpoint:error=801" checkpoint
  failed
  logged dump "[not-supported]"
  in_state running
  target_goes_on
  nothing_left
}

# The call stays behind in criu, as a thread.
# bats test_tags=long
@test "runc: a driver that does not answer fails the checkpoint, and the container can be recovered and saved" {
  with runc
  start_workload memory --size 8M
  STASIS_SIM_FAULTS="checkpoint:hang@1" STASIS_DRIVER_TIMEOUT=500 checkpoint
  failed
  logged dump "[no-answer]"
  done_by recover --all
  in_state running
  target_goes_on
  rm -r "$image" && mkdir "$image"
  checkpoint
  succeeded
  restore
  succeeded
  target_goes_on
  nothing_left
}

@test "runc: a GPU that cannot be restored fails the restore, and the image is whole" {
  with runc
  start_workload memory --size 8M
  checkpoint
  succeeded
  STASIS_SIM_FAULTS="restore:error=999" restore
  failed
  logged restore "the restore fails"
  wait_until 60 gpu_is_free
  nothing_left
  engine delete --force "$name" || true
  restore
  succeeded
  target_goes_on
}

# A process that has a second thread can enter no user namespace either.
@test "runc: a container with a user namespace, there and back" {
  export with_users=1
  with runc
  start_counter
  assert_equal "$(ask)" 101
  checkpoint
  succeeded
  restore
  succeeded
  assert_equal "$(ask)" 102
  in_state running
  nothing_left
}

@test "runc: a file in the image's folder brings the container to another GPU" {
  with runc
  export STASIS_SIM_GPUS=2x256M
  start_workload memory --size 8M
  (($(gpu_used_of 0) > 0 && $(gpu_used_of 1) == 0))
  checkpoint
  succeeded
  printf '0=1\n' >"$image/cuda-device-map"
  restore
  succeeded
  (($(gpu_used_of 0) == 0 && $(gpu_used_of 1) > 0))
  target_goes_on
}

@test "crun: the counter in a container: 101, checkpoint, gone, GPU free, restore, 102" {
  with crun
  counter_there_and_back
}

@test "crun: a checkpoint that fails leaves the container as it was, and --leave-running too" {
  with crun
  start_workload tree --children 2 --size 8M
  mapfile -t CHILDREN < <(children_of "$TARGET")
  STASIS_SIM_FAULTS="checkpoint:error=801" checkpoint
  failed
  logged dump "[not-supported]"
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
  rm -r "$image" && mkdir "$image"
  checkpoint --leave-running
  succeeded
  in_state running "${CHILDREN[@]}"
  target_goes_on
  nothing_left
}

@test "crun: a GPU that cannot be restored fails the restore; the image is whole, and goes to another GPU" {
  with crun
  export STASIS_SIM_GPUS=2x256M
  start_workload memory --size 8M
  checkpoint
  succeeded
  STASIS_SIM_FAULTS="restore:error=999" restore
  failed
  logged restore "the restore fails"
  wait_until 60 gpu_is_free
  nothing_left
  engine delete --force "$name" || true
  printf '0=1\n' >"$image/cuda-device-map"
  restore
  succeeded
  (($(gpu_used_of 0) == 0 && $(gpu_used_of 1) > 0))
  target_goes_on
}
