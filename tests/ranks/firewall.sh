#!/bin/bash
# Two hosts with a firewall between them: a port that cannot be reached is named.
#
# The hosts are network namespaces; routing rules drop packets to some ports, or reject them by ICMP.
# Each rank must name the port, both ends and the cure, within its deadline, and must not say that the
# other rank is late or dead. Connections that are refused: test_blocked of tests/ranks/init.c. Needs root
# and ip; skipped without.
set -u
cd "$(dirname "$0")/../.." || exit 1

work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-firewall.XXXXXX") || exit 1
net=cddpf$$
jobs=()
cleanup() {
  [ ${#jobs[@]} = 0 ] || kill -KILL "${jobs[@]}" 2>/dev/null
  ip netns del "$net-0" 2>/dev/null
  ip netns del "$net-1" 2>/dev/null
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

fail() { cat "$work"/out? 2>/dev/null; echo "$*"; exit 1; }
skip() { echo "SKIP: $*"; exit 77; }
command -v ip >/dev/null && command -v unshare >/dev/null || skip "ip or unshare is not installed"
ip netns add "$net-0" 2>"$work/log" && unshare --net --uts --mount true 2>>"$work/log" ||
  skip "no right to make namespaces: $(head -n 1 "$work/log")"
ip netns add "$net-1" || exit 1
ip -n "$net-0" link add wire type veth peer name wire netns "$net-1" 2>"$work/log" ||
  skip "no veth links here: $(head -n 1 "$work/log")"
for h in 0 1; do # the local table goes behind the rules of a firewall; clients have ports from 50000 on
  ip -n "$net-$h" addr add "10.99.0.$((h + 1))/24" dev wire && ip -n "$net-$h" link set wire up &&
    ip -n "$net-$h" link set lo up && ip -n "$net-$h" rule add pref 10 lookup local &&
    ip -n "$net-$h" rule del pref 0 || exit 1
  ip netns exec "$net-$h" sh -c 'echo 50000 60999 >/proc/sys/net/ipv4/ip_local_port_range
    echo 1 >/proc/sys/net/ipv4/ip_forward' || exit 1 # else it sends no ICMP
done
ip -n "$net-0" rule add pref 5 ipproto tcp dport 40000-60999 blackhole 2>"$work/log" ||
  skip "no rules by port: $(head -n 1 "$work/log")"
ip -n "$net-0" rule del pref 5

on_host() { # HOST COMMAND...
  local h=$1
  shift
  # shellcheck disable=SC2016
  exec ip netns exec "$net-$h" unshare --uts sh -c 'hostname "node$0" && exec "$@"' "$h" "$@"
}

# HOST PORTS blackhole|unreachable: what happens to packets to these ports of this host
firewall() { ip -n "$net-$1" rule add pref 5 iif wire ipproto tcp dport "$2" "$3" || exit 1; }
no_firewall() { ip -n "$net-0" rule del pref 5 2>/dev/null; ip -n "$net-1" rule del pref 5 2>/dev/null; }

start() { # HOST RANK SIZE: in the background, its output in outRANK
  (RANK=$2 WORLD_SIZE=$3 MASTER_ADDR=10.99.0.1 MASTER_PORT=29500 on_host "$1" timeout -k 5 100 "$work/one" \
    >"$work/out$2${4:-}" 2>&1) &
  jobs+=($!)
}

finish() { # SECONDS: all end by then
  local start pid
  start=$(date +%s)
  for pid in "${jobs[@]}"; do wait "$pid"; done
  jobs=()
  [ $(($(date +%s) - start)) -le "$1" ] || fail "$name: $(($(date +%s) - start)) s"
}

says() { # FILE WORD...
  local file=$work/$1 word
  shift
  for word; do grep -q -E -e "$word" "$file" || fail "$name: ${file##*/} does not say $word"; done
}

cat >"$work/one.c" <<'END'
#define CDDP_IMPLEMENTATION
#include "cddp.h"
int main(void) {
  static float x[1000];
  cddp_group *g;
  cddp_result r = cddp_init(&g, NULL);
  if (r == CDDP_OK) r = cddp_all_reduce(g, x, 1000, CDDP_F32, CDDP_SUM, NULL);
  printf("%s: %s\n", cddp_result_name(r), r != CDDP_OK ? cddp_error() : "");
  cddp_destroy(g);
  return r != CDDP_OK;
}
END
cc -O0 -DCDDP__NO_DISPATCH -I. "$work/one.c" -o "$work/one" -lpthread -lm || fail "one.c does not compile"

name="--node-rank 0 on two hosts"
start 0 0 2
sleep 0.5
start 1 0 2 b
finish 10
says out0 'CDDP_INVALID_ARGUMENT' 'rank 0 is taken twice' 'node0' 'node1'
says out0b 'CDDP_INVALID_ARGUMENT' 'rank 0 is taken twice' 'node0' 'node1'
echo "$name: ok"

# NAME SECONDS ADDRESS FROM: both ranks name the port and its other end, and neither says that the
# other is late or has ended
blocked() {
  local f
  name=$1
  start 0 0 2
  start 1 1 2
  finish "$2"
  for f in out0 out1; do
    says $f CDDP_NETWORK "$3" "$4" 'CDDP_PORTS' 'firewall'
    ! grep -E 'did not|died|it has ended|late|gave up' "$work/$f" || fail "$name: $f"
  done
  no_firewall
  echo "$name: ok: $(cat "$work/out1")"
}

for kind in blackhole unreachable; do
  export CDDP_PORTS=41000-41009
  firewall 0 41000-41009 $kind
  blocked "rank 0's port, $kind" 15 'connect to 10.99.0.1:4100[0-9], where rank 0' 'rank 1 .*on node1'
  firewall 1 41000-41009 $kind
  blocked "a worker's port, $kind" 15 'connect to 10.99.0.2:4100[0-9], where rank 1' 'rank 0 .*on node0'
  firewall 1 41000-41009 $kind
  CDDP_TIMEOUT_S=5 blocked "a worker's port, $kind, 5 s" 10 'connect to 10.99.0.2:4100[0-9]' 'on node0'
  unset CDDP_PORTS

  name="MASTER_PORT, $kind"
  firewall 0 29500 $kind
  export CDDP_TIMEOUT_S=5
  start 0 0 2
  start 1 1 2
  finish 10
  unset CDDP_TIMEOUT_S
  says out0 CDDP_TIMEOUT 'rank 1' '10.99.0.1:29500'
  says out1 CDDP_TIMEOUT '10.99.0.1:29500' 'on node1' 'firewall'
  no_firewall
  echo "$name: ok: $(cat "$work/out1")"
done

name="a process that joins"
firewall 0 29500 blackhole
export CDDP_JOIN=1
start 1 2 2
finish 30 # it looks for 20 s
unset CDDP_JOIN
says out2 '10.99.0.1:29500: Connection timed out' 'firewall' 'node1'
no_firewall
echo "$name: ok"

name="no firewall"
start 0 0 2
start 1 1 2
finish 10
says out0 CDDP_OK
says out1 CDDP_OK
echo "ok firewall"
