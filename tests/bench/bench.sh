#!/bin/bash
# Times cddp and its peers, in turn in the same run, and prints tables of medians and ratios. README.md beside this
# file says what they mean.
#
#   tests/bench/bench.sh              everything: 5 rounds, about 25 minutes
#   tests/bench/bench.sh --quick      2 rounds with fewer sizes: about 3 minutes, for a first look
#   tests/bench/bench.sh --readme     the table of README.md at the top: 5 rounds, about 2 minutes and 3 with all peers
#   tests/bench/bench.sh --rounds N
#   tests/bench/bench.sh --ranks "2 4"         the default is "2 4 8"
#   tests/bench/bench.sh --only collectives    or step, or startup
#   tests/bench/bench.sh --table      the tables of the last run once more
#
# Results go to build/bench. PYTHON names the Python that has PyTorch, if not python3 or /usr/bin/python3.
set -u
cd "$(dirname "$0")/../.." || exit 1

here=tests/bench out=build/bench
rounds=5 quick=() ranks="2 4 8" only="collectives step startup" table= readme=
while [ $# -gt 0 ]; do
  case $1 in
  --quick) quick=(--quick) rounds=2 ;;
  --readme) quick=(--op all_reduce --sizes 4,1048576,26214400,268435456) ranks=2 only=collectives readme=1 ;;
  --rounds) rounds=$2 && shift ;;
  --ranks) ranks=$2 && shift ;;
  --only) only=$2 && shift ;;
  --table) table=1 ;;
  *) sed -n '2,13s/^# \{0,1\}//p' "$0" && exit 2 ;;
  esac
  shift
done
mkdir -p "$out"

# No variable of the caller's launcher or tuning may leak into a measurement.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT CDDP_SECRET CDDP_TIMEOUT_S OPENBLAS_CORETYPE
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo

# --- building: what is missing is left out, and said so ---

absent=()
flags=(-std=gnu11 -Wall -Wextra -Wno-unknown-pragmas)
has() { command -v "$1" >/dev/null 2>&1; }

build() { # NAME COMMAND...: into build/bench/NAME; cddp.h itself always with a plain -O2
  local name=$1
  shift
  rm -f "$out/$name"
  "$@" -o "$out/$name" $libs >"$out/$name.log" 2>&1 || {
    absent+=("$name: $(grep -m 1 -i error "$out/$name.log" | cut -c 1-100)")
    rm -f "$out/$name"
  }
}

build_all() {
  local cc=${CC:-cc} libs="-lpthread -lm" p
  build cddp "$cc" "${flags[@]}" -O2 -DBENCH_CDDP $here/collectives.c
  build floor "$cc" "${flags[@]}" -O3 -march=native -DBENCH_FLOOR $here/collectives.c
  build startup "$cc" "${flags[@]}" -O2 $here/startup.c
  if has mpicc.openmpi && has mpirun.openmpi; then
    build openmpi mpicc.openmpi "${flags[@]}" -O2 -DBENCH_MPI $here/collectives.c
  else
    absent+=("Open MPI: apt-get install openmpi-bin libopenmpi-dev")
  fi
  if has mpicc.mpich && has mpiexec.mpich; then
    build mpich mpicc.mpich "${flags[@]}" -O2 -DBENCH_MPI $here/collectives.c
  else
    absent+=("MPICH: apt-get install mpich libmpich-dev")
  fi
  libs="-lopenblas -lpthread -lm"
  build step "$cc" "${flags[@]}" -O3 -march=native $here/step.c
  python=
  for p in ${PYTHON:-python3 /usr/bin/python3}; do
    "$p" -c 'import torch.distributed as d; assert d.is_gloo_available()' 2>/dev/null && python=$p && break
    "$p" -c 'import torch.distributed as d; assert d.is_available()' 2>/dev/null && python=$p && break
  done
  [ -n "$python" ] || absent+=("gloo: no Python with PyTorch; set PYTHON")
  printf 'left out: %s\n' "${absent[@]+"${absent[@]}"}" >"$out/absent"
}

# --- the collectives ---

root=()
[ "$(id -u)" != 0 ] || root=(--allow-run-as-root)
shm=(--mca pml ob1 --mca btl self,vader --mca btl_vader_single_copy_mechanism)
segments=(--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 5
  --mca coll_tuned_allreduce_algorithm_segmentsize 4194304)
cores=$(getconf _NPROCESSORS_ONLN) # nproc would heed OMP_NUM_THREADS

# CONFIG RANKS OPTION...: runs it, for 180 seconds at most; nothing where the config has no such number of ranks.
launch() {
  local c=$1 n=$2 command mpi=(--oversubscribe --bind-to none)
  shift 2
  [ "$n" -le "$cores" ] || mpi+=(--mca mpi_yield_when_idle 1)
  case $c in
  openmpi-nocma) mpi+=("${shm[@]}" none) ;;
  openmpi-cma) mpi+=("${shm[@]}" cma) ;;
  openmpi-huge) mpi+=("${shm[@]}" cma "${segments[@]}") ;;
  esac
  case $c in
  floor) command=("$out/floor" --ranks "$n") ;;
  slots) command=("$out/floor" --slots --ranks "$n") ;;
  cddp-*) command=("$out/cddp" --memory "${c#cddp-}" --ranks "$n") ;;
  openmpi*) command=(mpirun.openmpi ${root[@]+"${root[@]}"} "${mpi[@]}" -np "$n" "$out/openmpi") ;;
  mpich*) command=(mpiexec.mpich -bind-to none -np "$n" "$out/mpich") ;;
  gloo) command=("$python" $here/gloo_bench.py --ranks "$n") ;;
  esac
  case $c-$n in slots-[48] | floor-8) return ;; openmpi-huge-* | mpich-huge-*) command+=(--memory huge) ;; esac
  timeout -k 5 180 "${command[@]}" --config "$c" "$@"
}

available() { # CONFIG
  case $1 in
  openmpi*) [ -x "$out/openmpi" ] ;;
  mpich*) [ -x "$out/mpich" ] ;;
  gloo) [ -n "$python" ] ;;
  floor | slots) [ -x "$out/floor" ] ;;
  cddp*) [ -x "$out/cddp" ] ;;
  esac
}

one() { # CONFIG RANKS OPTION...: appends its lines to build/bench/raw
  available "$1" || return 0
  launch "$@" >>"$out/raw" 2>"$out/$1.err" ||
    echo "$1 with $2 ranks: exit code $?, $(grep -m 1 '[a-z]' "$out/$1.err" | cut -c 1-100)" | tee -a "$out/failed" >&2
}

configs="floor slots cddp-alloc cddp-malloc cddp-huge openmpi openmpi-nocma openmpi-cma openmpi-huge"
configs+=" mpich mpich-huge gloo"

collectives() {
  local r c n
  for ((r = 1; r <= rounds; r++)); do
    echo "collectives, round $r of $rounds (load $(cut -d' ' -f1 /proc/loadavg))" >&2
    for n in $ranks; do
      if [ "$n" -gt 4 ]; then
        for c in cddp-alloc openmpi openmpi-nocma mpich gloo; do one "$c" "$n" --small; done
      else
        for c in $configs; do one "$c" "$n" ${quick[@]+"${quick[@]}"}; done
      fi
    done
  done
}

# --- the training step, start-up ---

step() {
  local r
  for ((r = 1; r <= rounds; r++)); do
    echo "step, round $r of $rounds" >&2
    [ ! -x "$out/step" ] || timeout 180 "$out/step" --rounds 3 >>"$out/raw-step" 2>>"$out/failed"
    [ -z "$python" ] || timeout 180 "$python" $here/step_torch.py --rounds 3 >>"$out/raw-step" 2>"$out/torch.err"
  done
}

wall() { # NAME RANKS COMMAND...: seconds that a program takes which only starts its ranks
  local name=$1 n=$2 start end
  shift 2
  start=$(date +%s%N)
  "$@" >/dev/null 2>&1 || return
  end=$(date +%s%N)
  echo "wall $name $n $(((end - start) / 1000))" | awk '{ print $1, $2, $3, $4 / 1000 }' >>"$out/raw-startup"
}

startup() {
  local r
  echo "startup" >&2
  timeout 180 "$out/startup" --rounds "$rounds" >>"$out/raw-startup" 2>>"$out/failed"
  for ((r = 1; r <= rounds; r++)); do
    for c in cddp-alloc openmpi mpich gloo; do
      available "$c" && wall "${c%-alloc}" 2 launch "$c" 2 --start
    done
    [ -z "$python" ] || launch gloo 2 --start 2>/dev/null | awk '{ print "init gloo", $3, $5 / 1000 }' >>"$out/raw-startup"
  done
}

# --- tables ---

tables() {
  echo
  cat "$out/machine"
  grep -v ': $' "$out/absent"
  [ ! -s "$out/failed" ] || sort "$out/failed" | uniq -c | sed 's/^/failed: /'
  touch "$out/raw" "$out/raw-step" "$out/raw-startup"
  awk -v readme="$readme" -f $here/tables.awk "$out/raw" "$out/raw-step" "$out/raw-startup"
}

if [ -z "$table" ]; then
  build_all
  : >"$out/failed"
  {
    echo "$(date -u '+%Y-%m-%d %H:%M UTC'), $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $cores cores," \
      "Linux $(uname -r), load $(cut -d' ' -f1-3 /proc/loadavg) at the start, $rounds rounds"
  } >"$out/machine"
  for what in $only; do
    case $what in
    collectives) : >"$out/raw" ;;
    step) : >"$out/raw-step" ;;
    startup) : >"$out/raw-startup" ;;
    esac
    "$what"
  done
fi
tables | tee "$out/tables"
