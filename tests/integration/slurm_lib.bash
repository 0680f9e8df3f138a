# A small Slurm of Debian's own programs, for tests: one controller and nodes n1, n2, …, each with two
# simulated GPUs, all on this machine, without systemd and without touching an installed Slurm. To be
# started in setup_file() and ended in teardown_file(); it lives in $SLURM_DIR.

# Why there can be no Slurm, or nothing. (A skip in setup_file() counts as a failure with bats 1.8.)
why_no_slurm() {
  local program
  [[ $(id -u) == 0 ]] || { echo "needs root: Slurm's daemons, CRIU and namespaces" && return; }
  for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || { echo "there is no $program (Debian's slurmctld, slurmd, slurm-client, munge)" && return; }
  done
}

# start_slurm NODE...
start_slurm() {
  # Ports below those that the kernel gives out; others may test on this machine too.
  local node host port
  port=$((10000 + RANDOM % 2000 * 10))
  while some_port_taken "$port"; do port=$((10000 + RANDOM % 2000 * 10)); done
  export SLURM_DIR=$BATS_FILE_TMPDIR/slurm SLURM_CONF=$BATS_FILE_TMPDIR/slurm/slurm.conf
  host=$(hostname -s)
  mkdir -p "$SLURM_DIR"/{state,log}
  chmod 755 "$SLURM_DIR"
  head -c 128 /dev/urandom >"$SLURM_DIR/munge.key"
  chmod 600 "$SLURM_DIR/munge.key"
  echo "required $STASIS_BUILD/lib/stasis/slurm/stasis.so task=$SLURM_SOURCE/stasis-task" >"$SLURM_DIR/plugstack.conf"
  # Each node is a machine with GPUs of its own, for every program that asks this driver.
  cat >"$SLURM_DIR/task-prolog" <<END
#!/bin/sh
echo "export STASIS_SIM_DIR=$SLURM_DIR/gpus-\$SLURMD_NODENAME"
echo "export STASIS_SIM_MACHINE=\$SLURMD_NODENAME"
END
  chmod 755 "$SLURM_DIR/task-prolog"
  cat >"$SLURM_CONF" <<END
ClusterName=stasis
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$SLURM_DIR/munge.sock
StateSaveLocation=$SLURM_DIR/state
SlurmdSpoolDir=$SLURM_DIR/%n
SlurmctldPidFile=$SLURM_DIR/slurmctld.pid
SlurmdPidFile=$SLURM_DIR/%n.pid
SlurmctldLogFile=$SLURM_DIR/log/slurmctld
SlurmdLogFile=$SLURM_DIR/log/%n
SlurmdParameters=config_overrides
PlugStackConfig=$SLURM_DIR/plugstack.conf
TaskProlog=$SLURM_DIR/task-prolog
ProctrackType=proctrack/pgid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MessageTimeout=60
SlurmdTimeout=60
ReturnToService=2
KillWait=60
$(for node in "$@"; do
    echo "NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((++port)) CPUs=4 Gres=gpu:2"
  done)
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
PartitionName=apart Nodes=n3
END
  gpus_for_slurm >"$SLURM_DIR/gres.conf"
  in_background exec munged --foreground --force --socket="$SLURM_DIR/munge.sock" --key-file="$SLURM_DIR/munge.key" \
    --log-file="$SLURM_DIR/log/munged" --pid-file="$SLURM_DIR/munged.pid" --seed-file="$SLURM_DIR/munge.seed"
  wait_until 60 test -S "$SLURM_DIR/munge.sock"
  in_background exec slurmctld -D
  for node in "$@"; do
    mkdir -p "$SLURM_DIR/gpus-$node"
    start_node "$node"
  done
  in_background hurry
  wait_until 60 all_idle $# || {
    sinfo -N -l >&2
    tail -n 5 "$SLURM_DIR"/log/* >&2
    return 1
  }
}

# some_port_taken FIRST: one of the ten from there on.
some_port_taken() {
  local port
  for ((port = $1; port < $1 + 10; port++)); do
    ! { : <"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null || return 0
  done
  return 1
}

# in_background COMMAND...: sets BACKGROUND to its process number.
in_background() {
  (
    # bats waits for every process that has one of its files open.
    for fd in /proc/self/fd/*; do
      fd=${fd##*/}
      ((fd <= 2)) || eval "exec $fd>&-"
    done 2>/dev/null
    "$@"
  ) </dev/null >>"$SLURM_DIR/log/standard-error" 2>&1 &
  BACKGROUND=$!
  disown "$BACKGROUND" # its end is no news
  echo "$BACKGROUND" >>"$SLURM_DIR/processes"
}

# Everything of a node is in a PID namespace of its own, whose first process collects the dead.
start_node() {
  in_background exec unshare --pid --fork --mount-proc --kill-child bash -c 'slurmd -D -N "$1"; exit $?' bash "$1"
  echo "$BACKGROUND" >"$SLURM_DIR/$1.process"
}
# slurmd_timeout SECONDS: after so long without an answer a node counts as lost.
slurmd_timeout() {
  sed -i "s/^SlurmdTimeout=.*/SlurmdTimeout=$1/" "$SLURM_CONF"
  scontrol reconfigure
}
# As if it had lost its power: the daemon, its steps, and all that they have started, at once.
kill_node() { kill -KILL "$(<"$SLURM_DIR/$1.process")"; }

# Slurm tells its tasks the numbers of their GPUs only if those are devices; any will do.
gpus_for_slurm() {
  local number
  for number in 0 1; do
    mknod "$SLURM_DIR/nvidia$number" c 1 3 2>/dev/null || { echo "Name=gpu Count=2" && return; }
  done
  echo "Name=gpu File=$SLURM_DIR/nvidia[0-1]"
}

# all_idle NUMBER: of nodes; each is told once for each of its partitions.
all_idle() { (($(sinfo -h -N -o '%N %T' 2>/dev/null | sort -u | grep -c ' idle$') == $1)); }

end_slurm() {
  local pid
  [[ -e ${SLURM_DIR:-/nowhere}/processes ]] || return 0
  while read -r pid; do kill -KILL "$pid" 2>/dev/null || true; done <"$SLURM_DIR/processes"
}

# --- Jobs.

# submit ARGUMENT...: sbatch; sets JOB.
submit() { JOB=$(sbatch --parsable "$@"); }
# job_is STATE [JOB]
job_is() { [[ $(squeue -h -t all -j "${2:-$JOB}" -o %T) == "$1" ]]; }
# node_of [JOB]
node_of() { squeue -h -j "${1:-$JOB}" -o %N; }
# restarts [JOB]
restarts() { scontrol show job "${1:-$JOB}" | sed -n 's/.* Restarts=\([0-9]*\).*/\1/p'; }

# runs_again RESTARTS [JOB]
runs_again() { (($(restarts "${2:-$JOB}") >= $1)) && job_is RUNNING "${2:-$JOB}"; }

# Slurm lets a job that was put back wait for two minutes, so that the nodes have done with it. An administrator can
# say otherwise, and this one says so after three seconds.
hurry() {
  local job reason since
  while sleep 0.5; do
    squeue -h -t PENDING -o '%A %r %V' 2>/dev/null | while read -r job reason since; do
      [[ $reason == BeginTime ]] && (($(date +%s) - $(date +%s -d "$since") > 3)) || continue
      scontrol update "JobId=$job" StartTime=now 2>/dev/null || true
    done
  done
}
