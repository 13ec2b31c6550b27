#!/bin/bash
# Checks the models of this folder with Spin: the rules of >>elastic hold, and each is needed.
#
#   tests/models/models.sh [SECONDS]     for each model that is too large to be searched whole; 300
#
# Prints a line for each search. Needs spin and a C compiler; skipped without.
set -u
cd "$(dirname "$0")" || exit 1
command -v spin >/dev/null || { echo "SKIP: there is no spin"; exit 77; }
work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-models.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
seconds=${1:-300}
failed=0

# search EXPECTED MODEL FLAG...: EXPECTED is "holds", "fails" or "large" (no fault is found in $seconds)
search() {
  local expected=$1 model=$2 found options=(-m500000) modes=(-DCOLLAPSE) limit=600
  shift 2
  [ "$model" = halves.pml ] && options+=(-E) # its end states are no error
  [ "$expected" = large ] && modes=(-DBITSTATE) options+=(-w30) limit=$seconds
  mkdir "$work/run" && cp ./*.pml "$work/run"
  (cd "$work/run" && spin -a "$@" "$model" >spin.log 2>&1 &&
    ${CC:-cc} -O2 -DSAFETY "${modes[@]}" -DVECTORSZ=2048 -DMEMLIM=4000 -w -o pan pan.c) || failed=1
  (cd "$work/run" && timeout -s INT "$limit" ./pan "${options[@]}" >pan.log 2>&1)
  case $(sed -n 's/.*errors: //p' "$work/run/pan.log") in
  0) found=holds ;;
  [1-9]*) found=fails ;;
  *) found=nothing ;;
  esac
  grep -q "Search not completed" "$work/run/pan.log" && [ $found = holds ] && found=large
  echo "$model $*: $found, $(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' "$work/run/pan.log") states"
  [ "$found" = "$expected" ] || { [ "$expected" = large ] && [ "$found" = holds ]; } ||
    { echo "  expected: $expected"; tail -n 20 "$work/run/pan.log" | sed 's/^/  /'; failed=1; }
  rm -rf "$work/run"
}

search holds halves.pml -DTABLES=2
search large halves.pml -DTABLES=3
search large halves.pml -DTABLES=4
search fails halves.pml -DTABLES=3 -DRULE=1
search holds meeting.pml -DCR=1 -DR=1
search holds meeting.pml -DCR=0 -DDOUBTS=1 -DR=1
search fails meeting.pml -DCR=0 -DDOUBTS=1 -DR=1 -DNO_CALLS
search fails meeting.pml -DCR=0 -DDOUBTS=2 -DR=1 -DNO_MAJORITY
search fails meeting.pml -DCR=2 -DR=2 -DNO_REPEAT
search large meeting.pml -DCR=1 -DR=2
search large meeting.pml -DCR=2 -DR=1
search large meeting.pml -DCR=0 -DDOUBTS=2 -DR=1
search large meeting.pml -DCR=1 -DDOUBTS=1 -DR=1
exit $failed
