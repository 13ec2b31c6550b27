#!/bin/bash
# Compiles cddp.h for aarch64 without a warning and runs its tests there, in an emulator: gcc-aarch64-linux-gnu and qemu-user.
# Part of `ninja nightly`. What the emulator cannot do is left out: its own threads show in /proc (faults, simulate), a
# signal's number and /proc/self/exe get lost (sparse, spawn, starts), time runs otherwise (p2p), and collectives take too long.
#
#   tests/aarch64.sh [TEST...]
set -u
cd "$(dirname "$0")/.." || exit 1

rooms="reduce optim plan sampler store discovery hostile"
publics="init groups diagnose golden_ddp kills checkpoint ddp"
cc=aarch64-linux-gnu-gcc out=build/aarch64 failed=0 passed=0
command -v $cc >/dev/null && command -v qemu-aarch64 >/dev/null ||
  { echo "SKIP: needs gcc-aarch64-linux-gnu and qemu-user" && exit 77; }
flags=(-std=gnu11 -O1 -g1 -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wcast-align -Werror)
mkdir -p $out
$cc "${flags[@]}" -DCDDP_IMPLEMENTATION -x c -c cddp.h -o $out/cddp.o || exit 1

for t in ${*:-$rooms $publics}; do
  source=$(echo tests/*/"$t.c")
  case " $rooms " in
  *" $t "*) $cc "${flags[@]}" "$source" -o "$out/$t" -lpthread -lm || exit 1 ;;
  *) $cc "${flags[@]}" -DCDDP_IMPLEMENTATION_DONE -D_GNU_SOURCE "$source" $out/cddp.o -o "$out/$t" -lpthread -lm || exit 1 ;;
  esac
  if timeout 600 qemu-aarch64 -L /usr/aarch64-linux-gnu "$out/$t" >"$out/$t.log" 2>&1; then
    passed=$((passed + 1))
    echo "ok     $t: $(tail -n 1 "$out/$t.log")"
  else
    failed=$((failed + 1))
    echo "FAIL   $t:"
    tail -n 12 "$out/$t.log" | cut -c 1-300 | sed 's/^/       | /'
  fi
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
