#!/bin/bash
# Examples as ranks of the mpirun of Open MPI and of MPICH, on this host; backend "mpi".
#
# Ranks must find each other by what each launcher sets, in two jobs at a time, with two programs, and
# through one port; the weights are those of spawned ranks; survivors of a killed rank are told. Where the
# launcher's mpicc is there, tests/peers/mpi.c runs collectives and training through MPI. A launcher that
# is not installed is named and left out; without any the test is skipped.
set -u
cd "$(dirname "$0")/../.." || exit 1

work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-mpirun.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
export CDDP_TIMEOUT_S=40 OPENBLAS_NUM_THREADS=1

fail() { echo "$*"; exit 1; }

options= # of mpirun
launch() { # LAUNCHER RANKS COMMAND...
  local launcher=$1 ranks=$2
  shift 2
  # shellcheck disable=SC2086
  case $launcher in
  openmpi) # asked twice as root; more ranks than cores are fine; two jobs that begin at once fail to make one
    # session directory together
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
      timeout -k 5 60 mpirun.openmpi --mca orte_tmpdir_base "$(mktemp -d "$work/session.XXXXXX")" \
        --oversubscribe $options -n "$ranks" "$@" ;;
  mpich) timeout -k 5 60 mpirun.mpich $options -n "$ranks" "$@" ;;
  esac
}

expect() { # FILE COUNT PATTERN: that many lines match
  local n
  n=$(grep -c -E -e "$3" "$1")
  [ "$n" = "$2" ] || { cat "$1"; fail "$n lines of ${1##*/}, not $2, match: $3"; }
}

ranks_meet() { # LAUNCHER
  local out=$work/$1.toy r
  launch "$1" 3 "$work/toy" >"$out" 2>&1 || { cat "$out"; fail "$1: toy failed"; }
  for r in 0 1 2; do expect "$out" 1 "^Loss on rank $r: "; done
  expect "$out" 3 '^Loss on rank '
}

# Each prints the losses of its own ranks only: jobs that met would be too many or too few.
two_jobs() { # LAUNCHER
  local first code=0
  launch "$1" 2 "$work/toy" >"$work/$1.first" 2>&1 &
  first=$!
  launch "$1" 3 "$work/toy" >"$work/$1.second" 2>&1 || code=1
  wait "$first" || code=1
  [ $code = 0 ] || { cat "$work/$1.first" "$work/$1.second"; fail "$1: two jobs at once failed"; }
  expect "$work/$1.first" 2 '^Loss on rank [01]: '
  expect "$work/$1.second" 3 '^Loss on rank [012]: '
}

# Two programs of one mpirun at the same time, on a port each. Hydra's ranks of a -pmi-port know no size.
two_programs() { # LAUNCHER
  local out=$work/$1.programs
  launch "$1" 2 sh -c "MASTER_PORT=29601 $work/toy & first=\$!; MASTER_PORT=29602 $work/toy && wait \$first" >"$out" 2>&1 ||
    { cat "$out"; fail "$1: two programs at once failed"; }
  expect "$out" 4 '^Loss on rank [01]: '
  launch "$1" 1 "$work/toy" -n 4 >"$out" 2>&1 || fail "$1: one rank failed"
  expect "$out" 1 '^-n 4 is ignored'
  [ "$1" = mpich ] || return
  options=-pmi-port
  launch "$1" 2 "$work/toy" >"$out" 2>&1 && { cat "$out"; fail "$1 -pmi-port: the ranks ran alone"; }
  expect "$out" 2 'PMI_ID is [01], but '
  options=
}

# Two jobs that were given one port, at the same time, often enough that ranks of both meet there: none
# takes a rank of the other's for its own, and one of the two runs; the other's rank 0 has no port.
one_port() { # LAUNCHER
  local port=29871 loop first codes one two
  [ "$1" = mpich ] || options="-x MASTER_ADDR -x MASTER_PORT"
  for ((loop = 0; loop < 20; loop++)); do
    one=0 two=0
    MASTER_ADDR=127.0.0.1 MASTER_PORT=$port CDDP_TIMEOUT_S=5 launch "$1" 3 "$work/jobs" 1 >"$work/$1.1" 2>&1 &
    first=$!
    MASTER_ADDR=127.0.0.1 MASTER_PORT=$port CDDP_TIMEOUT_S=5 launch "$1" 3 "$work/jobs" 2 >"$work/$1.2" 2>&1 || two=$?
    wait "$first" || one=$?
    codes="mpirun's exit codes $one, $two"
    ! grep -q MIXED "$work/$1".[12] || { head -n 99 "$work/$1".[12]; fail "$1: loop $loop: two jobs mixed; $codes"; }
    [ "$one" = 0 ] || [ "$two" = 0 ] ||
      { head -n 99 "$work/$1".[12]; fail "$1: loop $loop: neither job ran; $codes"; }
    grep -q -E '^rank [0-2] of 3, job [12],' "$work/$1".[12] || fail "$1: loop $loop: no rank says its job"
  done
  options=
}

readme() { # LAUNCHER: README's first program as its ranks, three of one job
  launch "$1" 3 "$work/train" >"$work/$1.train" 2>&1 || { cat "$work/$1.train"; fail "$1: README's program failed"; }
  expect "$work/$1.train" 3 '^rank [0-2]: 3\.0000 -2\.0000$'
}

same_weights() { # LAUNCHER
  local out=$work/$1.digits
  launch "$1" 3 "$work/digits" --epochs 1 --hidden 128 >"$out" 2>&1 || { cat "$out"; fail "$1: digits failed"; }
  expect "$out" 3 '^rank [0-2] weights [0-9a-f]{16}$'
  grep ' weights ' "$out" | diff "$work/hashes" - || fail "$1: not the weights of ./digits -n 3"
}

survivors_are_told() { # where mpirun lets them live; Hydra ends them, sooner or later than they can speak
  local out=$work/openmpi.die
  options='--mca orte_enable_recovery 1'
  launch openmpi 4 "$work/mpi.openmpi" die >"$out" 2>&1
  options=
  expect "$out" 3 '^told rank [023]$'
}

# A rank that exits while others wait for it, with backend mpi: they hear of it, and mpirun ends. All that exit
# without cddp_destroy, one first: no error. C, COUNT, HOSTS, HOW: see mpi.c.
exits() { # LAUNCHER
  local out=$work/$1.exits run start code
  export MASTER_ADDR=127.0.0.1 MASTER_PORT=29881
  [ "$1" = mpich ] || options="-x MASTER_ADDR -x MASTER_PORT"
  for run in '0 1 1 0' '7 4000000 1 2' '0 1 2 1' '7 4000000 4 0'; do
    start=$(date +%s) code=0
    # shellcheck disable=SC2086
    launch "$1" 4 "$work/mpi.$1" exit $run >"$out" 2>&1 || code=$?
    expect "$out" 3 '^told rank [023]$'
    [ $code -lt 100 ] && [ $(($(date +%s) - start)) -lt 20 ] || { cat "$out"; fail "$1: exit $run: exit code $code"; }
  done
  for run in 1 4; do
    launch "$1" 4 "$work/mpi.$1" quit $run >"$out" 2>&1 || { cat "$out"; fail "$1: quit $run failed"; }
    expect "$out" 4 '^quit rank [0-3]$'
  done
  unset MASTER_ADDR MASTER_PORT
  options=
}

through_mpi() { # LAUNCHER
  local out=$work/$1.mpi cc=mpicc.$1
  command -v "$cc" >/dev/null || { echo "$cc is not installed: backend mpi is left out"; return; }
  "$cc" -std=c11 -O1 tests/peers/mpi.c -o "$work/mpi.$1" -lpthread -lm || fail "$1: mpi.c does not compile"
  launch "$1" 4 "$work/mpi.$1" >"$out" 2>&1 || { cat "$out"; fail "$1: backend mpi failed"; }
  expect "$out" 4 '^ok mpi '
  launch "$1" 4 "$work/mpi.$1" slow >"$out" 2>&1 || { cat "$out"; fail "$1: a slow start of MPI failed"; }
  expect "$out" 4 '^ok mpi '
  [ "$1" = mpich ] || survivors_are_told
  exits "$1"
  launch "$1" 2 "$work/mpi.$1" >"$out" 2>&1 && fail "$1: mpi.c passed with 2 ranks, not 4"
  one_backend "$1"
  [ ! -x "$work/digits" ] || digits_through_mpi "$1"
}

one_backend() { # LAUNCHER: another one on one rank is an error before MPI_Init can wait for ever
  local out=$work/$1.backend
  "mpicc.$1" -O1 -DCDDP_MPI -DCDDP__NO_DISPATCH tests/peers/jobs.c -o "$work/jobs.$1" -lpthread -lm ||
    fail "$1: jobs does not compile with -DCDDP_MPI"
  # shellcheck disable=SC2016
  CDDP_TIMEOUT_S=10 launch "$1" 3 sh -c '
    [ "${OMPI_COMM_WORLD_RANK:-}${PMI_RANK:-}" != 1 ] || export CDDP_BACKEND=mpi
    "$1" 1 || exit 0' sh "$work/jobs.$1" >"$out" 2>&1
  expect "$out" 3 'rank [0-2] .*has backend "(mpi|cpu)", rank [0-2] has "(mpi|cpu)"'
}

digits_through_mpi() { # LAUNCHER
  local out=$work/$1.digits
  "mpicc.$1" -O2 -DCDDP_MPI examples/digits.c -o "$work/digits.$1" -lopenblas -lpthread -lm ||
    fail "$1: digits does not compile with -DCDDP_MPI"
  CDDP_BACKEND=mpi launch "$1" 4 "$work/digits.$1" --epochs 1 --hidden 128 >"$out" 2>&1 ||
    { cat "$out"; fail "$1: digits with CDDP_BACKEND=mpi failed"; }
  expect "$out" 4 '^rank [0-3] weights [0-9a-f]{16}$'
  [ "$(grep ' weights ' "$out" | cut -d' ' -f4 | sort -u | wc -l)" = 1 ] || { cat "$out"; fail "$1: weights differ"; }
  # Without mpirun there is one process in MPI's world: an error, and no hang. Of two of Open MPI's that make their
  # session directory at once one fails: it is there already, and not empty.
  local session=$work/$1.session
  mkdir -p "$session/ompi.$(uname -n).$(id -u)" "$session/ompi.$(uname -n | cut -d. -f1).$(id -u)"
  touch "$session"/ompi.*/keep
  OMPI_MCA_orte_tmpdir_base=$session CDDP_BACKEND=mpi timeout 30 "$work/digits.$1" -n 2 >"$out" 2>&1 &&
    { cat "$out"; fail "$1: digits -n 2 found MPI"; }
  grep -q 'MPI_COMM_WORLD has 1 rank, the group 2' "$out" || { cat "$out"; fail "$1: no word of MPI_COMM_WORLD"; }
}

found=
for launcher in openmpi mpich; do
  if command -v "mpirun.$launcher" >/dev/null; then found="$found $launcher"
  else echo "mpirun.$launcher is not installed: left out"; fi
done
[ -n "$found" ] || { echo "SKIP: neither mpirun.openmpi nor mpirun.mpich is installed"; exit 77; }

cc -O2 examples/toy.c -o "$work/toy" -lpthread -lm || fail "toy does not compile"
awk '/^```/ { on = $0 == "```c" && !n++; next } on' README.md >"$work/train.c"
cc -O1 -DCDDP__NO_DISPATCH -I. "$work/train.c" -o "$work/train" -lpthread -lm || fail "README's program does not compile"
cc -O1 -DCDDP__NO_DISPATCH tests/peers/jobs.c -o "$work/jobs" -lpthread -lm || fail "jobs does not compile"
if cc -O2 examples/digits.c -o "$work/digits" -lopenblas -lpthread -lm 2>"$work/log"; then
  "$work/digits" -n 3 --epochs 1 --hidden 128 >"$work/alone" 2>&1 || { cat "$work/alone"; fail "digits failed"; }
  grep ' weights ' "$work/alone" >"$work/hashes" || fail "digits printed no weights"
else
  echo "digits does not compile here, left out: $(grep -m 1 error "$work/log")"
fi
for launcher in $found; do
  ranks_meet "$launcher"
  two_jobs "$launcher"
  two_programs "$launcher"
  one_port "$launcher"
  readme "$launcher"
  [ ! -x "$work/digits" ] || same_weights "$launcher"
  through_mpi "$launcher"
  echo "mpirun.$launcher: ok"
done
