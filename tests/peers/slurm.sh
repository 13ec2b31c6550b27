#!/bin/bash
# Programs as the tasks of a real Slurm: slurmctld, two slurmd and munged of this test's own, in namespaces
# of its own (network, processes, mounts), which take everything along when the test ends. Needs root and
# Debian's slurmctld, slurmd, slurm-client and munge, or the like; skipped without.
#
#   tests/peers/slurm.sh                        all of it
#   tests/peers/slurm.sh cluster WORK           inside the namespaces: the daemons, then the jobs
#   tests/peers/slurm.sh steps WORK             inside an allocation: its steps
set -u
cd "$(dirname "$0")/../.." || exit 1
PATH=$PATH:/usr/sbin:/sbin
here=$PWD/tests/peers/slurm.sh
phase=${1-} work=${2-}

fail() { echo "$*"; exit 1; }
skip() { echo "SKIP: $*"; exit 77; }

outside() {
  local command program own=(unshare --mount --pid --net --uts --ipc --fork --kill-child --mount-proc)
  for command in slurmctld slurmd srun sbatch salloc sinfo munged unshare ip script; do
    command -v $command >/dev/null || skip "$command is not installed"
  done
  work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-slurm.XXXXXX") || exit 1
  trap 'rm -rf "$work"' EXIT
  "${own[@]}" ip link set lo up 2>"$work/log" || skip "no right to make namespaces: $(head -n 1 "$work/log")"
  cc -O1 -DCDDP__NO_DISPATCH examples/toy.c -o "$work/toy" -lpthread -lm || fail "toy does not compile"
  cc -O1 -DCDDP__NO_DISPATCH tests/peers/jobs.c -o "$work/jobs" -lpthread -lm || fail "jobs does not compile"
  for program in elastic cddprun; do
    cc -O1 -DCDDP__NO_DISPATCH examples/$program.c -o "$work/$program" -lpthread -lm || fail "$program does not compile"
  done
  # Each node counts as a host of its own.
  # shellcheck disable=SC2016
  printf '#!/bin/sh\nexport CDDP_HOST_ID=$SLURMD_NODENAME\nexec "$@"\n' >"$work/apart"
  chmod +x "$work/apart"
  timeout -k 5 250 "${own[@]}" "$here" cluster "$work"
}

# --- the cluster: nodes n1 and n2, one machine with two addresses ---------------------------------

config() {
  cat <<END
ClusterName=cddp
SlurmctldHost=n1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.sock
CredType=cred/munge
StateSaveLocation=$work/ctl
SlurmdSpoolDir=$work/%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=2
NodeName=n1 NodeHostname=n1 NodeAddr=10.77.0.1 Port=17001 CPUs=16 State=UNKNOWN
NodeName=n2 NodeHostname=n1 NodeAddr=10.77.0.2 Port=17002 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=10 State=UP
END
}

start() {
  local i
  chmod 755 "$work" # munged insists
  mkdir "$work/ctl" "$work/n1" "$work/n2"
  ip link set lo up && ip addr add 10.77.0.1/24 dev lo && ip addr add 10.77.0.2/24 dev lo && hostname n1 || exit 1
  printf '127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n' >"$work/hosts"
  mount --bind "$work/hosts" /etc/hosts || exit 1
  (umask 077 && head -c 1024 /dev/urandom >"$work/munge.key")
  config >"$work/slurm.conf"
  munged --force --socket="$work/munge.sock" --key-file="$work/munge.key" --log-file="$work/munged.log" \
    --pid-file="$work/munged.pid" --seed-file="$work/munge.seed" --num-threads=2 2>"$work/log" &&
    slurmctld -c 2>>"$work/log" && slurmd -N n1 2>>"$work/log" && slurmd -N n2 2>>"$work/log" ||
    skip "Slurm does not start: $(head -n 1 "$work/log")"
  for ((i = 0; i < 100; i++)); do
    [ "$(sinfo -h -o '%D %T' 2>/dev/null)" = '2 idle' ] && return
    sleep 0.1
  done
  skip "Slurm's nodes do not come up: $(grep -h -m 1 error "$work"/*.log)"
}

# --- what the tests need ---------------------------------------------------------------------------

run() { # COMMAND...: fails unless it succeeds; its output is in $work/out
  timeout -k 5 60 "$@" >"$work/out" 2>&1 </dev/null
  local code=$?
  [ $code = 0 ] || { cat "$work/out"; fail "$*: exit code $code"; }
}

expect() { # COUNT PATTERN: that many lines of the output match
  local n
  n=$(grep -c -E -e "$2" "$work/out")
  [ "$n" = "$1" ] || { cat "$work/out"; fail "$n lines, not $1, match: $2"; }
}

fails_soon() { # SECONDS COMMAND...: and without a wait; its output is in $work/out
  local limit=$1 begin=$SECONDS
  shift
  timeout -k 5 60 "$@" >"$work/out" 2>&1 </dev/null && { cat "$work/out"; fail "$* did not fail"; }
  [ $((SECONDS - begin)) -le "$limit" ] || { cat "$work/out"; fail "$*: after $((SECONDS - begin)) s"; }
}

together() { # OPTIONS...: steps 1 to 3 at once, each of 4 tasks on two nodes; their codes in codes
  local step try pids
  # On a busy machine slurmd may drop the requests of steps that start at once; then no task of theirs ran.
  for ((try = 0; try < 10; try++)); do
    codes=() pids=()
    for step in 1 2 3; do
      timeout -k 5 60 srun --exact -N 2 -n 4 "$@" "$work/apart" "$work/jobs" $step >"$work/step$step" 2>&1 </dev/null &
      pids+=($!)
    done
    for step in "${pids[@]}"; do wait "$step"; codes+=($?); done
    ! grep MIXED "$work"/step[123] || fail "steps mixed"
    grep -q 'Task launch for StepId=.* failed on node' "$work"/step[123] || return
  done
  cat "$work"/step[123]
  fail "Slurm does not launch its tasks"
}

typed() { # COMMANDS SRUN...: typed into the terminal of that command; its output is in $work/out
  local commands=$1
  shift
  # Nobody reads ahead of the shell's prompt.
  { sleep 1; printf '%s; exit\n' "$commands"; sleep 0.2; } |
    timeout -k 5 60 script -qec "$*" /dev/null >"$work/out" 2>&1
}

# --- the tests --------------------------------------------------------------------------------------

steps() { # in an allocation of both nodes
  local jobs=("$work/apart" "$work/jobs") i step
  echo "a step on one node; with PMI's variables too"
  run srun -N 1 -n 3 "$work/toy"
  expect 3 '^Loss on rank [0-2]: '
  run srun --mpi=pmi2 -N 1 -n 2 "${jobs[@]}" 5
  expect 2 '^rank [01] of 2, job 5, local [01] of 2$'

  echo "two programs of a step at the same time, on a port each; a program's own -n is said to be ignored"
  run srun -N 1 -n 2 sh -c "MASTER_PORT=29601 $work/toy & first=\$!; MASTER_PORT=29602 $work/toy && wait \$first"
  expect 4 '^Loss on rank [01]: '
  run srun -N 1 -n 1 "$work/toy" -n 4
  expect 1 '^-n 4 is ignored'

  echo "a step on two nodes"
  run srun -N 2 -n 5 -m cyclic "${jobs[@]}" 6
  expect 3 '^rank [0-4] of 5, job 6, local [0-2] of 3$'
  expect 2 '^rank [0-4] of 5, job 6, local [01] of 2$'

  echo "steps at the same time on the same nodes, each on a port of its own"
  together
  [ "${codes[*]}" = '0 0 0' ] || { cat "$work"/step[123]; fail "exit codes ${codes[*]}"; }
  for step in 1 2 3; do
    [ "$(grep -c "^rank [0-3] of 4, job $step, " "$work/step$step")" = 4 ] || { cat "$work/step$step"; fail "step $step"; }
  done

  echo "steps that are given one port"
  for ((i = 0; i < 4; i++)); do
    CDDP_TIMEOUT_S=3 MASTER_ADDR=n1 MASTER_PORT=29500 together -K
    [[ " ${codes[*]} " = *' 0 '* ]] || { cat "$work"/step[123]; fail "none of three steps ran"; }
  done

  echo "a killed task is named"
  fails_soon 15 srun -N 2 -n 4 "${jobs[@]}" 7 30
  expect 3 '^rank [023]: .*rank 1 .*was killed by signal 9 \(Killed\)'

  echo "rank 0 is not on the first node"
  fails_soon 10 srun -m arbitrary -w n2,n1 -n 2 "${jobs[@]}" 8
  expect 2 '^rank [01]: .*add --export=ALL,MASTER_ADDR=HOST'
  run srun -m arbitrary -w n2,n1 -n 2 --export=ALL,MASTER_ADDR=n2 "${jobs[@]}" 8
  expect 2 '^rank [01] of 2, job 8, local 0 of 1$'

  echo "an elastic job: a cddprun on each node; a killed rank joins again"
  : >"$work/out"
  (for ((i = 0; i < 500; i++)); do
    grep -q 'from step 0 on' "$work/out" && pkill -KILL -n -x elastic && break
    sleep 0.1
  done) &
  # shellcheck disable=SC2016
  run srun -N 2 -n 2 "$work/apart" sh -c 'exec "$0"/cddprun -n 2 --elastic --max-restarts 9 --nnodes 2 \
    --node-rank $SLURM_NODEID --master-addr n1 "$0"/elastic' "$work"
  expect 1 'it joins again: restart 1 of 9'
  expect 4 'rank [0-3]: weights 0a49783145397225$'

  echo "no step: ranks are spawned"
  run "$work/toy" -n 2
  expect 2 '^Loss on rank [01]: '
}

shells() {
  echo "an interactive shell is no launcher"
  typed "$work/toy -n 3" srun -N 1 -n 4 --pty bash --norc
  expect 3 '^Loss on rank [0-2]: '
  echo "nor is it behind setsid"
  typed "setsid -w $work/toy -n 3" srun -N 1 -n 4 --pty bash --norc
  expect 3 '^Loss on rank [0-2]: '
  echo "a step started there, and a program that has the terminal, are ranks"
  typed "srun --overlap -N 1 -n 2 $work/jobs 9" srun -N 1 -n 2 --pty bash --norc
  expect 2 'rank [01] of 2, job 9,'
  typed true srun -N 1 -n 2 --pty "$work/jobs" 10
  expect 1 'rank [01] of 2, job 10,' # a terminal is rank 0's alone
}

batch() {
  local i
  echo "an array of jobs"
  # shellcheck disable=SC2016
  printf '#!/bin/bash\n%s -n 2 || exit 1\nsrun -N 2 -n 3 %s %s $SLURM_ARRAY_TASK_ID\n' \
    "$work/toy" "$work/apart" "$work/jobs" >"$work/batch"
  run sbatch -W -Q --array=0-3 -N 2 -n 3 -o "$work/array%a" "$work/batch"
  for i in 0 1 2 3; do
    mv "$work/array$i" "$work/out"
    expect 2 '^Loss on rank [01]: ' # of the batch script, which is no step
    expect 3 "^rank [0-2] of 3, job $i, "
  done
}

case $phase in
'') outside ;;
cluster)
  for name in "${!SLURM@}"; do unset "$name"; done
  export SLURM_CONF=$work/slurm.conf CDDP_TIMEOUT_S=20
  start
  srun --version
  timeout -k 5 150 salloc -Q -N 2 --ntasks-per-node=8 "$here" steps "$work" || exit 1
  shells
  batch
  ;;
steps) steps ;;
esac
