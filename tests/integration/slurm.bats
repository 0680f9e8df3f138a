#!/usr/bin/env bats
# deploy/slurm: the plugin, stasis-task and the template, with Debian's Slurm and the real CRIU, on the simulated
# driver. Jobs are given to the nodes n1 and n2, which have GPUs of their own; n3 is for the one job that takes
# long, beside the others.

load helpers
load stasis_lib
load slurm_lib

setup_file() {
  export SLURM_SOURCE=$BATS_TEST_DIRNAME/../../deploy/slurm
  NO_SLURM=$(why_no_slurm)
  export NO_SLURM
  [[ -z $NO_SLURM ]] || return 0
  PATH=$SLURM_SOURCE:$STASIS_BUILD/bin:$PATH
  start_slurm n1 n2 n3 || {
    # What others want in slurm.conf is not known.
    [[ $(sinfo --version) != *' 22.05.'* ]] || return 1
    NO_SLURM="$(sinfo --version) does not start as 22.05 does"
    return 0
  }
  write_train
  submit_limited
}
teardown_file() { end_slurm; }

# One minute is the shortest limit that there is; its steps are told at once, and that is within 30 seconds.
submit_limited() {
  (
    BATS_TEST_TMPDIR=$BATS_FILE_TMPDIR
    setup_stasis
    of_the_cluster
    mkdir "$BATS_FILE_TMPDIR/limited.status"
    sbatch --parsable --partition=apart --gres=gpu:1 --time=1 --signal=TERM@60 --output="$BATS_FILE_TMPDIR/limited.out" \
      --stasis-images="$BATS_FILE_TMPDIR/limited.images/%j" --stasis-grace=50s \
      "$SLURM_SOURCE/job.sbatch" "$train" "$BATS_FILE_TMPDIR/limited.status" 100000 >"$BATS_FILE_TMPDIR/limited"
  )
}

# As the nodes of a real one would have it.
of_the_cluster() {
  PATH=$SLURM_SOURCE:$PATH
  export LD_LIBRARY_PATH=${STASIS_LIBCUDA%/*} STASIS_SIM_GPUS=2x1200M
  train=$BATS_FILE_TMPDIR/train
}

# Counts aloud to a number, or until it is told to stop, beside GPU memory that is verified. A number that is
# missing, or comes twice, is a count that was lost or doubled.
write_train() {
  cat >"$BATS_FILE_TMPDIR/train" <<'END'
#!/bin/bash
status=$1/$SLURM_JOB_ID-$SLURM_PROCID
stasis-workload memory --size 4M --pause-ms 20 --status "$status" &
until grep -qs "^round 0*[1-9]" "$status"; do sleep 0.05; done
n=0
while ((n < $2)) && [[ ! -e $1/stop ]]; do
  sleep 0.1
  echo "count $((++n))"
done
kill $!
wait $!
echo "over at $n, status $?"
END
  # The same, where the number is in GPU memory. One that is asked for at the wrong moment may be lost.
  cat >"$BATS_FILE_TMPDIR/count" <<'END'
#!/bin/bash
stasis-counter --gpu-memory "${2:-64M}" >"$1/counter" &
until grep -qs "^listening on" "$1/counter"; do sleep 0.05; done
port=$(sed -n 's/^listening on 127.0.0.1://p' "$1/counter")
until [[ -e $1/stop ]]; do
  n=$(timeout 2 stasis-counter --ask "$port") && echo "count $((n - 100))"
  sleep 0.1
done
kill $!
echo over
END
  chmod 755 "$BATS_FILE_TMPDIR/train" "$BATS_FILE_TMPDIR/count"
}

setup() {
  [[ -z $NO_SLURM ]] || skip "$NO_SLURM"
  setup_stasis
  of_the_cluster
  images=$BATS_TEST_TMPDIR/images log=$BATS_TEST_TMPDIR/out
  mkdir "$BATS_TEST_TMPDIR/status"
}

teardown() {
  [[ -z $NO_SLURM ]] || return 0
  [[ -n ${BATS_TEST_COMPLETED:-} ]] || { squeue -t all; tail -n 30 "$BATS_TEST_TMPDIR"/out*; } >&2 || true
  scancel --quiet --partition=low
  scancel --quiet --partition=high
  wait_until 120 no_jobs || true
  end_stasis
}
none_is_left() { [[ -z $(ls "$1") ]]; }
no_jobs() { [[ -z $(squeue -h -p low,high) ]]; }

# submit_training ARGUMENT... : of sbatch; the job counts until finish() or a file tells it to stop.
submit_training() {
  submit --output="$log" --gres=gpu:1 --stasis-images="$images/%j" "$@" "$SLURM_SOURCE/job.sbatch" \
    $srun "$train" "$BATS_TEST_TMPDIR/status" 100000
}
srun=

counts() { sed -n 's/^\([0-9]*: \)\?count //p' "$1"; }
# has_counted NUMBER [LOG]
has_counted() { [[ -e ${2:-$log} ]] && (($(counts "${2:-$log}" | tail -n 1) + 0 >= $1)); }
# counted_once NUMBER [LOG]: 1, 2, … up to the number, and all of the GPU's memory was right.
counted_once() {
  assert_equal "$(counts "${2:-$log}")" "$(seq "$1")" "counts in ${2:-$log}"
  grep -qs "over at $1, status 0" "${2:-$log}"
}
# finish [LOG]: tells a job that counts until then to end, and looks at all that it has counted.
finish() {
  touch "$BATS_TEST_TMPDIR/status/stop"
  wait_until 120 job_is COMPLETED
  counted_once "$(counts "${1:-$log}" | tail -n 1)" "${1:-$log}"
}
gpu_memory_of() { STASIS_SIM_DIR=$SLURM_DIR/gpus-$1 STASIS_SIM_MACHINE=$1 gpu_used; }

# is_before VERSION: Slurm is older.
is_before() { [[ $(printf '%s\n' "$1" "$(srun --version | sed 's/.* //')" | sort -V | head -n 1) != "$1" ]]; }

@test "what cannot be is refused, and says what to do" {
  local run=(srun --quiet --partition=low --immediate=60)
  # says TEXT COMMAND...
  says() {
    capture timeout 120 "${@:2}" </dev/null
    ((status != 0))
    assert_contains "$err" "$1"
  }
  echo "0 true" >"$BATS_TEST_TMPDIR/programs"
  says "must be a duration, as 90s" sbatch --stasis-images="$images" --stasis-every=10x --wrap true
  says "must be a directory" sbatch --stasis-images="$images/%q" --wrap true
  says "need --stasis-images" "${run[@]}" --stasis-every=10m true
  says "this step has 2 tasks" "${run[@]}" --ntasks=2 --stasis-images="$images" true
  # From 23.11 on Slurm itself puts stasis-task in front of each program.
  if is_before 23.11; then
    says "write stasis-task in front" "${run[@]}" --multi-prog --stasis-images="$images" "$BATS_TEST_TMPDIR/programs"
  else
    timeout 120 "${run[@]}" --multi-prog --stasis-images="$BATS_TEST_TMPDIR/programs-%j" "$BATS_TEST_TMPDIR/programs" </dev/null
    compgen -G "$BATS_TEST_TMPDIR/programs-*" >/dev/null # where it would have been saved
  fi
  says "there is no command" "${run[@]}" stasis-task --images "$images"
  says "%a stands for nothing" "${run[@]}" stasis-task --images "$images/%a" -- true
  assert_equal "$(ls "$BATS_TEST_TMPDIR" | grep images)" ""
  capture timeout 120 "${run[@]}" --stasis-images=none --stasis-every=10m sh -c 'echo ${STASIS_IMAGES-unset}; exit 3' </dev/null
  assert_equal "$status $out" $'3 unset\n'
}

@test "stasis-task without the plugin: in a script of one's own, with options of stasis run" {
  cat >"$BATS_TEST_TMPDIR/script" <<END
#!/bin/sh
#SBATCH --output=$log
stasis-task --images "$images/%A/%j%%" --keep 1 -- sh -c 'echo "\$\$ \$STASIS_IMAGES"; exit 7'
echo "status \$?"
ls "$images"/*
stasis-task --images "$images/%A/%j%%" --forget
END
  submit "$BATS_TEST_TMPDIR/script"
  wait_until 120 job_is COMPLETED
  grep -qx "5000 " "$log" # the first number of a job that stasis run has started
  grep -qx "status 7" "$log"
  grep -qx "$JOB%" "$log"
  assert_equal "$(ls "$images/$JOB")" ""
}

# Slurm before 24.05 does not: a stand-in tells what a newer one does.
@test "a job that Slurm puts back once more when it is done does not begin anew" {
  local rank at=$BATS_TEST_TMPDIR/job version preempted
  mkdir "$BATS_TEST_TMPDIR/bin"
  cat >"$BATS_TEST_TMPDIR/bin/scontrol" <<'END'
#!/bin/sh
case $1 in
  --version) echo "$VERSION" ;;
  --oneliner) echo "JobId=7 JobName=a Requeue=1 PreemptEligibleTime=2026-11-30T12:08:00 PreemptTime=$PREEMPTED" ;;
  *) echo "$*" ;;
esac
END
  printf '#!/bin/sh\nexec true\n' >"$BATS_TEST_TMPDIR/bin/stasis"
  chmod 755 "$BATS_TEST_TMPDIR"/bin/*
  export PATH=$BATS_TEST_TMPDIR/bin:$PATH SLURM_JOB_ID=7 SLURM_NTASKS=2 STASIS_IMAGES=$at/%j/%t VERSION PREEMPTED
  # done_with VERSION PREEMPTED [STARTS]: saved, put back, which Slurm has counted as so many starts, and done by then.
  done_with() {
    VERSION=$1 PREEMPTED=$2
    export SLURM_RESTART_COUNT=3
    for rank in 0 1; do
      mkdir -p "$at/7/$rank/000001"
      touch "$at/7/$rank/lock"
    done
    assert_equal "$("$SLURM_SOURCE/stasis-task" --requeue)" "requeue Incomplete 7"
    ((SLURM_RESTART_COUNT += ${3:-1}))
    for rank in 0 1; do
      SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=2 "$SLURM_SOURCE/stasis-task" -- true
      echo '{}' >"$at/7/$rank/done-7.0"
    done
    "$SLURM_SOURCE/stasis-task" --forget
  }
  for version in "slurm-wlm 22.05.8" "slurm 23.11.4" "slurm 24.05.0" "slurm-wlm 24.11.5" "slurm 25.11.1"; do
    done_with "$version" None
    assert_equal "$(ls "$at/7")" ""
  done
  done_with "slurm 23.11.4" 2026-11-30T12:09:00
  assert_equal "$(ls "$at/7")" ""
  # What cannot be noted keeps no job out of the queue.
  mkdir -p "$at/7/0/comes-again"
  touch "$at/7/0/lock"
  VERSION="slurm 24.11.5" capture "$SLURM_SOURCE/stasis-task" --requeue
  assert_equal "$status $out" $'0 requeue Incomplete 7\n'
  assert_contains "$err" "end its next run by scancel"
  rm -r "$at/7/0"
  for version in "slurm 24.05.0" "slurm-wlm 24.11.5" "slurm 25.11.1"; do
    done_with "$version" 2026-11-30T12:09:00
    for rank in 0 1; do assert_equal "$(echo $(ls "$at/7/$rank"))" "done-7.0 lock"; done
    # It has come again, and ended at once.
    ((++SLURM_RESTART_COUNT))
    mkdir "$at/7/group.7.0.$SLURM_RESTART_COUNT"
    for rank in 0 1; do SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=2 "$SLURM_SOURCE/stasis-task" -- true; done
    "$SLURM_SOURCE/stasis-task" --forget
    assert_equal "$(ls "$at/7")" ""
    # Slurm has heard of the end of the script late, and put the job back for that.
    done_with "$version" 2026-11-30T12:09:00 2
    assert_equal "$(ls "$at/7")" ""
  done
}

@test "cancelled: it is saved, and stays ended" {
  submit_training
  wait_until 120 has_counted 5
  scancel "$JOB"
  wait_until 120 job_is CANCELLED
  wait_until 120 grep -qs "saved to $images/$JOB/000001" "$log"
  sleep 5 # longer than hurry waits
  job_is CANCELLED
  assert_equal "$(ls "$images/$JOB")" $'000001\nlock'
}

@test "preempted: saved, put back into the queue, and it goes on from its count on the other node" {
  submit_training --nodelist=n1
  local low=$JOB
  wait_until 120 has_counted 5
  assert_equal "$(node_of)" n1
  (($(gpu_memory_of n1) > 0))
  submit --output=/dev/null --partition=high --gres=gpu:2 --nodelist=n1 --wrap "sleep 300"
  wait_until 120 job_is RUNNING "$JOB"
  wait_until 120 job_is PENDING "$low"
  assert_equal "$(gpu_memory_of n1)" 0
  scontrol update JobId="$low" NodeList=n2
  wait_until 120 runs_again 1 "$low"
  assert_equal "$(node_of "$low")" n2
  wait_until 120 grep -qs "goes on from $images/$low/000001" "$log"
  (($(gpu_memory_of n2) > 0))
  JOB=$low finish
  # It is done, also for a Slurm that puts it back once more, and its images are not needed any more.
  wait_until 120 none_is_left "$images"
  wait_until 120 job_is COMPLETED "$low"
  assert_equal "$(grep -c "^over at " "$log")" 1
}

# Each of the four GPUs is in use. (Slurm gives tasks the numbers of theirs only where it has devices.)
all_gpus_used() {
  local node gpu
  [[ -e $SLURM_DIR/nvidia1 ]] || return 0
  for node in n1 n2; do
    for gpu in 0 1; do
      (($(STASIS_SIM_DIR=$SLURM_DIR/gpus-$node STASIS_SIM_MACHINE=$node gpu_used_of $gpu) > 0)) || return 1
    done
  done
}

@test "an array of four: each is saved in a directory of its own, and goes on on the GPU that it is given" {
  log=$BATS_TEST_TMPDIR/out-%a
  submit_training --array=1-4
  local i array=$JOB
  for i in 1 2 3 4; do wait_until 120 has_counted 5 "$BATS_TEST_TMPDIR/out-$i"; done
  all_gpus_used
  submit --output=/dev/null --partition=high --nodes=2 --gres=gpu:2 --wrap "sleep 300"
  wait_until 120 job_is RUNNING
  assert_equal "$(ls "$images" | wc -l)" 4 "directories of images"
  all_pending() { [[ $(squeue -h -r -j "$array" -o %T | sort | uniq -c | xargs) == "4 PENDING" ]]; }
  wait_until 120 all_pending
  assert_equal "$(gpu_memory_of n1) $(gpu_memory_of n2)" "0 0"
  scancel "$JOB"
  wait_until 120 all_gpus_used
  for i in 1 2 3 4; do wait_until 120 grep -qs "goes on from " "$BATS_TEST_TMPDIR/out-$i"; done
  for i in 1 2 3 4; do JOB=${array}_$i finish "$BATS_TEST_TMPDIR/out-$i"; done
}

@test "two ranks on two nodes: each is saved by itself, at scontrol requeue, and both go on" {
  srun=--label
  submit_training --ntasks=2 --nodes=2 --stasis-images="$images/%j/%t"
  local rank
  for rank in 0 1; do wait_until 120 eval 'grep -qs "^$rank: count 5" "$log"'; done
  scontrol requeue "$JOB"
  wait_until 120 runs_again 1
  for rank in 0 1; do wait_until 120 grep -qs "^$rank: .*goes on from $images/$JOB/$rank/000001" "$log"; done
  touch "$BATS_TEST_TMPDIR/status/stop"
  wait_until 120 job_is COMPLETED
  for rank in 0 1; do
    grep "^$rank: " "$log" >"$log-$rank"
    grep -qs "saved to $images/$JOB/$rank/000001" "$log-$rank"
    finish "$log-$rank"
  done
}

# Two tasks of stasis-workload that meet by TCP in each round.
@test "a job of two nodes whose ranks hear of each other is preempted, and goes on" {
  cat >"$BATS_TEST_TMPDIR/ranks" <<END
#!/bin/bash
exec stasis-workload rank --meeting "tcp:127.0.0.1:$((5000 + RANDOM % 5000))" --rank "\$SLURM_PROCID" --ranks 2 --size 1M \\
  --seed 7 --pause-ms 5 --status "$BATS_TEST_TMPDIR/status/\$SLURM_PROCID"
END
  chmod 755 "$BATS_TEST_TMPDIR/ranks"
  round() { target_round "$BATS_TEST_TMPDIR/status/$1" 2>/dev/null || echo 0; }
  past() { (($(round 0) > $1 && $(round 1) > $1)); }
  submit --output="$log" --gres=gpu:1 --ntasks=2 --nodes=2 --stasis-images="$images/%j/%t" --stasis-together \
    "$SLURM_SOURCE/job.sbatch" --label "$BATS_TEST_TMPDIR/ranks"
  local low=$JOB before rank
  wait_until 120 past 3
  submit --output=/dev/null --partition=high --nodes=2 --gres=gpu:2 --wrap "sleep 300"
  wait_until 120 job_is RUNNING "$JOB"
  wait_until 120 job_is PENDING "$low"
  assert_equal "$(gpu_memory_of n1) $(gpu_memory_of n2)" "0 0"
  before=$(round 0)
  scancel "$JOB"
  wait_until 120 runs_again 1 "$low"
  wait_until 120 past $((before + 3))
  for rank in 0 1; do wait_until 120 grep -qs "^$rank: .*goes on from $images/$low/$rank/000001" "$log"; done
  # The programs are told, and not those that would save them.
  pkill -TERM -f "stasis-workload rank .*$BATS_TEST_TMPDIR/status/"
  # Slurm that puts it back once more says before that that it is completed.
  wait_until 120 none_is_left "$images/$low" # neither images nor where they met
  wait_until 120 job_is COMPLETED "$low"
  for rank in 0 1; do assert_equal "$(grep -c "^$rank: verified" "$log")" 1; done
}

@test "a rank that is done stays so when another is put back into the queue" {
  cat >"$BATS_TEST_TMPDIR/ranks" <<END
#!/bin/bash
((SLURM_PROCID == 1)) || exec "$train" "\$@"
echo "count 1"
echo "over at 1, status 0"
END
  chmod 755 "$BATS_TEST_TMPDIR/ranks"
  train=$BATS_TEST_TMPDIR/ranks srun=--label
  submit_training --ntasks=2 --nodes=2 --stasis-images="$images/%j/%t"
  wait_until 120 eval 'grep -qs "^0: count 5" "$log" && grep -qs "^1: over" "$log"'
  wait_until 120 test -e "$images/$JOB/1/done-$JOB.0"
  scontrol requeue "$JOB"
  wait_until 120 runs_again 1
  wait_until 120 grep -qs "^0: .*goes on from $images/$JOB/0/000001" "$log"
  wait_until 120 grep -qs "^1: .*the job has ended with 0 before .*, and is not run again" "$log"
  touch "$BATS_TEST_TMPDIR/status/stop"
  wait_until 120 job_is COMPLETED
  for rank in 0 1; do
    grep "^$rank: " "$log" >"$log-$rank"
    counted_once "$(counts "$log-$rank" | tail -n 1)" "$log-$rank"
  done
  assert_equal "$(ls "$images/$JOB")" "" # done as a whole: nothing is remembered
}

# users_job SIZE
users_job() {
  local user=(setpriv --reuid=65534 --regid=65534 --clear-groups)
  # Where it is to write.
  chmod a+rx "$BATS_RUN_TMPDIR" "${BATS_FILE_TMPDIR%/*}" "${BATS_TEST_TMPDIR%/*}" "$BATS_FILE_TMPDIR" "$BATS_TEST_TMPDIR"
  "${user[@]}" unshare --user --map-root-user true 2>/dev/null || skip "users may not make user namespaces here"
  "${user[@]}" test -r "$STASIS_BUILD/lib/stasis/slurm/stasis.so" || skip "the user 65534 cannot read the build folder"
  # The simulated GPUs are files, which root has had before.
  chown -R 65534 "$BATS_TEST_TMPDIR" "$SLURM_DIR"/gpus-n*
  export STASIS_STATE_DIR=$BATS_TEST_TMPDIR/state-of-user
  JOB=$(cd "$BATS_TEST_TMPDIR" && "${user[@]}" sbatch --parsable --output="$log" --gres=gpu:1 --nodelist=n1 \
    --stasis-images="$images/%j" "$SLURM_SOURCE/job.sbatch" "$BATS_FILE_TMPDIR/count" "$BATS_TEST_TMPDIR/status" "$1")
  wait_until 120 has_counted 5
  scontrol requeue "$JOB"
  wait_until 120 runs_again 1
  wait_until 120 grep -qs "goes on from $images/$JOB/000001" "$log"
  local before
  before=$(counts "$log" | tail -n 1)
  wait_until 120 has_counted $((before + 3))
  touch "$BATS_TEST_TMPDIR/status/stop"
  wait_until 120 job_is COMPLETED
  grep -qx over "$log"
  assert_equal "$(counts "$log")" "$(counts "$log" | sort -nu)" "no number twice"
  assert_equal "$(stat -c %u "$images" "$log" "$BATS_TEST_TMPDIR/status/counter")" $'65534\n65534\n65534'
}
@test "an ordinary user's job: it sees itself as root, and is saved and goes on all the same" {
  users_job 64M
}
# bats test_tags=long
@test "an ordinary user's job with little GPU memory" {
  users_job 1M
}
# bats test_tags=long
@test "an ordinary user's job with a GiB of GPU memory" {
  users_job 1G
}

# Not before others: the node stays away.
# bats test_tags=long
@test "a node that is lost: the job goes on elsewhere from its last image" {
  submit_training --stasis-every=2s
  wait_until 120 grep -qs "saved to $images/$JOB/000002" "$log"
  local lost last image
  lost=$(node_of)
  wait_until 120 has_counted $(($(counts "$log" | tail -n 1) + 5))
  slurmd_timeout 10
  kill_node "$lost"
  last=$(counts "$log" | tail -n 1)
  image=$(sed -n "s#.*saved to $images/$JOB/\([0-9]*\) .*#\1#p" "$log" | tail -n 1)
  wait_until 120 runs_again 1
  # The controller that starts again for it answers no srun meanwhile.
  wait_until 120 grep -qs "goes on from $images/$JOB/" "$log"
  slurmd_timeout 60
  [[ $(node_of) != "$lost" ]]
  wait_until 120 has_counted $((last + 5))
  touch "$BATS_TEST_TMPDIR/status/stop"
  wait_until 120 job_is COMPLETED
  # From the last image, or from one that was complete and had not been told yet.
  (($(sed -n "s#.*goes on from $images/$JOB/0*\([0-9]*\) .*#\1#p" "$log") >= 10#$image))
  # What it did after that is done again, which may be nothing; it goes back once, and leaves nothing out.
  local again
  again=$(counts "$log" | awk 'NR > 1 && $1 != last + 1 { print $1 } { last = $1 }')
  [[ $again =~ ^[0-9]*$ ]] || { echo "went back more than once: $again" >&2; return 1; }
  ((${again:-$last} <= last))
  last=$(counts "$log" | tail -n 1)
  assert_equal "$(counts "$log" | sort -nu)" "$(seq "$last")"
  grep -qs "over at $last, status 0" "$log"
}

# It has been running beside all others since they began.
# bats test_tags=long
@test "a job through three time limits" {
  JOB=$(<"$BATS_FILE_TMPDIR/limited")
  log=$BATS_FILE_TMPDIR/limited.out images=$BATS_FILE_TMPDIR/limited.images
  wait_until 300 grep -qs "goes on from $images/$JOB/000003" "$log"
  local before
  before=$(counts "$log" | tail -n 1)
  wait_until 120 has_counted $((before + 5))
  touch "$BATS_FILE_TMPDIR/limited.status/stop"
  # It may have come to the next limit before it has seen that.
  wait_until 120 job_is COMPLETED
  counted_once "$(counts "$log" | tail -n 1)"
  (($(restarts) >= 3))
  scontrol show job "$JOB" | grep -q "TimeLimit=00:01:00"
}
