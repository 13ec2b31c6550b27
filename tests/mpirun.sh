#!/bin/bash
# Examples as ranks of the mpirun of Open MPI and of MPICH, on this host. A launcher that is not
# installed is named and left out; without any the test is skipped.
set -u
cd "$(dirname "$0")/.." || exit 1

work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-mpirun.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
export CDDP_TIMEOUT_S=40 OPENBLAS_NUM_THREADS=1

fail() { echo "$*"; exit 1; }

launch() { # LAUNCHER RANKS COMMAND...
  local launcher=$1 ranks=$2
  shift 2
  case $launcher in
  openmpi) # asked twice as root; more ranks than cores are fine
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
      timeout -k 5 60 mpirun.openmpi --oversubscribe -n "$ranks" "$@" ;;
  mpich) timeout -k 5 60 mpirun.mpich -n "$ranks" "$@" ;;
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

same_weights() { # LAUNCHER
  local out=$work/$1.digits
  launch "$1" 3 "$work/digits" --epochs 1 --hidden 128 >"$out" 2>&1 || { cat "$out"; fail "$1: digits failed"; }
  expect "$out" 3 '^rank [0-2] weights [0-9a-f]{16}$'
  grep ' weights ' "$out" | diff "$work/hashes" - || fail "$1: not the weights of ./digits -n 3"
}

found=
for launcher in openmpi mpich; do
  if command -v "mpirun.$launcher" >/dev/null; then found="$found $launcher"
  else echo "mpirun.$launcher is not installed: left out"; fi
done
[ -n "$found" ] || { echo "SKIP: neither mpirun.openmpi nor mpirun.mpich is installed"; exit 77; }

cc -O2 examples/toy.c -o "$work/toy" -lpthread -lm || fail "toy does not compile"
if cc -O2 examples/digits.c -o "$work/digits" -lopenblas -lpthread -lm 2>"$work/log"; then
  "$work/digits" -n 3 --epochs 1 --hidden 128 >"$work/alone" 2>&1 || { cat "$work/alone"; fail "digits failed"; }
  grep ' weights ' "$work/alone" >"$work/hashes" || fail "digits printed no weights"
else
  echo "digits does not compile here, left out: $(grep -m 1 error "$work/log")"
fi
for launcher in $found; do
  ranks_meet "$launcher"
  two_jobs "$launcher"
  [ ! -x "$work/digits" ] || same_weights "$launcher"
  echo "mpirun.$launcher: ok"
done
