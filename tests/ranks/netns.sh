#!/bin/bash
# Ranks on two hosts: network namespaces with names of their own and two links (veth) between them.
#
# Two ranks on each host train to the weights of one host, by names, by IPv6 and by link-local addresses;
# CDDP_IFNAME takes the second link. A link that is slow or loses packets (a relay between two tun devices:
# not every kernel has netem) costs time only. A cut link, or a host whose firewall answers with RST, is
# named by both sides in time; elastic halves never train apart. Needs root and ip; skipped without.
set -u
cd "$(dirname "$0")/../.." || exit 1

work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-netns.XXXXXX") || exit 1
net=cddp$$
jobs=() relay=
cleanup() {
  [ ${#jobs[@]} = 0 ] || kill -KILL "${jobs[@]}" 2>/dev/null
  [ -z "$relay" ] || kill -KILL "$relay" 2>/dev/null
  ip netns del "$net-0" 2>/dev/null
  ip netns del "$net-1" 2>/dev/null
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
export CDDP_TIMEOUT_S=40 OPENBLAS_NUM_THREADS=1

fail() { echo "$*"; exit 1; }
skip() { echo "SKIP: $*"; exit 77; }
command -v ip >/dev/null && command -v unshare >/dev/null || skip "ip or unshare is not installed"
ip netns add "$net-0" 2>"$work/log" && unshare --net --uts --mount true 2>>"$work/log" ||
  skip "no right to make namespaces: $(head -n 1 "$work/log")"
ip netns add "$net-1" || exit 1

# Each host knows itself by Debian's 127.0.1.1 and the other by the first link's address.
for h in 0 1; do
  printf '127.0.0.1 localhost\n127.0.1.1 node%d\n10.99.0.%d node%d\n' $h $((2 - h)) $((1 - h)) >"$work/hosts$h"
done
for link in 0 1; do
  ip -n "$net-0" link add "wire$link" type veth peer name "wire$link" netns "$net-1" 2>"$work/log" ||
    skip "no veth links here: $(head -n 1 "$work/log")"
  for h in 0 1; do
    ip -n "$net-$h" addr add "10.$((99 + link)).0.$((h + 1))/24" dev "wire$link" &&
      ip -n "$net-$h" link set "wire$link" up || exit 1
    ip -n "$net-$h" -6 addr add "fd00:$link::$((h + 1))/64" dev "wire$link" nodad 2>/dev/null
  done
done
ip -n "$net-0" link set lo up && ip -n "$net-1" link set lo up || exit 1

on_host() { # HOST COMMAND...
  local h=$1
  shift
  # shellcheck disable=SC2016
  exec ip netns exec "$net-$h" unshare --uts --mount sh -c \
    'hostname "$1" && mount --bind "$2" /etc/hosts && { [ -z "$3" ] || mount -t tmpfs none /proc; } &&
    if [ "$4" = 1 ]; then shift 4; exec unshare --pid --fork --kill-child --mount-proc "$@"; fi && shift 4 && exec "$@"' \
    sh "node$h" "$work/hosts$h" "${no_proc:-}" "${container:-}" "$@"
}

launch() { # MASTER PROGRAM...: two ranks on each host, output in out0 and out1; codes in code0 and code1
  local master=$1 h
  shift
  for h in 0 1; do
    (on_host $h timeout -k 5 60 "$work/cddprun" --nnodes 2 --node-rank $h --nproc-per-node 2 \
      --master-addr "$master" "$@" >"$work/out$h" 2>&1) &
    jobs[h]=$!
  done
}

join() { # both succeed, or (WORD) whatever
  local h
  for h in 0 1; do
    wait "${jobs[h]}"
    codes[h]=$?
  done
  jobs=()
  [ $# -gt 0 ] || [ "${codes[*]}" = "0 0" ] || { tail -n 20 "$work/out0" "$work/out1"; fail "exit codes ${codes[*]}"; }
}

cat >"$work/loop.c" <<'END'
/* Adds up until it fails, and says so, and when; without an argument 50 times. */
#define CDDP_IMPLEMENTATION
#include "cddp.h"
int main(int argc, char **argv) {
  static float x[100000];
  struct timespec t;
  cddp_group_desc desc = {0};
  cddp_group *g;
  cddp_result r;
  int i;
  const char *url = getenv("POD_URL"); /* else from the environment */
  if (url != NULL && url[0] != 0) {
    desc.init_method = url;
    desc.rank = atoi(getenv("RANK"));
    desc.world_size = atoi(getenv("WORLD_SIZE"));
  }
  if (cddp_init(&g, &desc)) return printf("%s\n", cddp_error()), 1;
  for (i = 0; (r = cddp_all_reduce(g, x, i % 2 ? 100000 : 1, CDDP_F32, CDDP_SUM, NULL)) == 0; i++) {
    if (argc == 1 && i == 50) return cddp_destroy(g), printf("rank well\n"), 0;
    if (argc == 2 && i == 20 && cddp_rank(g) == 3) fclose(fopen(argv[1], "w"));
  }
  clock_gettime(CLOCK_REALTIME, &t);
  printf("%lld %s: %s\n", (long long)t.tv_sec, cddp_result_name(r), cddp_error());
  cddp_destroy(g);
  return 0;
}
END
cat >"$work/lasting.c" <<'END'
/* Trains an elastic model, and says what the weights come to, or why not. */
#define CDDP_IMPLEMENTATION
#include "cddp.h"
int main(int argc, char **argv) {
  static float w[5000];
  cddp_group *g;
  cddp_param p = {0};
  cddp_ddp_desc desc = {0};
  cddp_sgd_desc rule = {0};
  cddp_optim *o;
  cddp_ddp *d;
  cddp_result r;
  int shard, i, t, leaves = getenv("LEAVES") ? atoi(getenv("LEAVES")) : 99; /* ranks from this one on */
  double sum = 0;
  if (cddp_init(&g, NULL)) return printf("%s\n", cddp_error()), 1;
  p.data = w;
  p.count = 5000;
  desc.shards = 8;
  desc.elastic = true;
  rule.lr = 0.01;
  rule.momentum = 0.9;
  if (cddp_ddp_create(&d, g, &p, 1, &desc)) return printf("%s\n", cddp_error()), 1;
  rule.ddp = d;
  if (cddp_sgd_create(&o, &p, 1, &rule)) return printf("%s\n", cddp_error()), 1;
  for (t = (int)cddp_ddp_steps(d), r = CDDP_OK; r == CDDP_OK && t < 300; t++) {
    while (cddp_ddp_next_shard(d, &shard)) {
      for (i = 0; i < 5000; i++) ((float *)p.grad)[i] = w[i] * 0.1f + (float)((t + i * shard) % 17);
      if (argc == 2) usleep(3000);
      if (t == 40 && cddp_rank(g) >= leaves)
        return cddp_optim_destroy(o), cddp_ddp_destroy(d), cddp_destroy(g), 0;
      (void)cddp_ddp_ready(d, 0);
    }
    r = cddp_ddp_step(d, o);
    if (argc == 2 && t == 20 && cddp_rank(g) == 3) fclose(fopen(argv[1], "w"));
  }
  for (i = 0; i < 5000; i++) sum += w[i] * (1 + i % 7);
  if (r == CDDP_OK) printf("weights %.17g\n", sum);
  else printf("%lld %s: %s\n", (long long)time(NULL), cddp_result_name(r), cddp_error());
  cddp_optim_destroy(o);
  cddp_ddp_destroy(d);
  cddp_destroy(g);
  return 0;
}
END
cc -O1 examples/cddprun.c -o "$work/cddprun" -lpthread -lm &
cc -O1 -I. "$work/loop.c" -o "$work/loop" -lpthread -lm &
cc -O1 -I. -DCDDP__UNANSWERED_S=4.0 "$work/loop.c" -o "$work/loop4" -lpthread -lm &
cc -O1 -D_GNU_SOURCE -I. -DCDDP__UNANSWERED_S=4.0 "$work/lasting.c" -o "$work/lasting" -lpthread -lm &
cc -O1 examples/digits.c -o "$work/digits" -lopenblas -lpthread -lm 2>"$work/log"
wait
for program in cddprun loop loop4 lasting; do [ -x "$work/$program" ] || fail "$program does not compile"; done

# --- the same weights as on one host ---

digits() { # NAME MASTER
  launch "$2" "$work/digits" --epochs 1 --hidden 256
  join
  grep -h -o 'rank [0-9] weights .*' "$work/out0" "$work/out1" | sort | diff "$work/hashes" - ||
    fail "$1: not the weights of ./digits -n 4"
  echo "$1: ok"
}

if [ -x "$work/digits" ]; then
  "$work/digits" -n 4 --epochs 1 --hidden 256 >"$work/alone" 2>&1 || { cat "$work/alone"; fail "digits failed"; }
  grep -o 'rank [0-9] weights .*' "$work/alone" | sort >"$work/hashes"
  [ "$(wc -l <"$work/hashes")" = 4 ] || fail "digits printed no weights"
  digits "the first host's own name is 127.0.1.1" node0
else
  echo "digits does not compile here, left out: $(grep -m 1 error "$work/log")"
fi

adds() { # NAME MASTER
  launch "$2" "$work/loop"
  join
  [ "$(cat "$work/out0" "$work/out1" | grep -c 'rank well')" = 4 ] || { cat "$work"/out?; fail "$1: not four ranks"; }
  echo "$1: ok"
}

adds "IPv4" 10.99.0.1
if ip -n "$net-0" -6 addr show dev wire0 | grep -q fd00:; then
  adds "IPv6" fd00:0::1
else
  echo "no IPv6 here: left out"
fi

# Without /proc nothing names a machine but its host name: two must not take each other for one.
no_proc=1 adds "no /proc" 10.99.0.1

# --- containers of one pod: a host's ranks in process namespaces of their own, with another host. MASTER_ADDR means
# 127.0.1.1 to them and an address to the other host; or all read a file ---

pod() { # NAME HOSTS URL: rank i on the i-th digit's host; on host 0 each in a container
  local name=$1 hosts=$2 url=$3 rank h
  rm -f "$work"/out?
  for ((rank = 0; rank < ${#hosts}; rank++)); do
    h=${hosts:rank:1}
    (export RANK=$rank WORLD_SIZE=${#hosts} MASTER_ADDR=node0 MASTER_PORT=29500 POD_URL=$url
      container=$((h == 0)) on_host "$h" timeout -k 5 30 "$work/loop" >"$work/out$rank" 2>&1) &
    jobs[rank]=$!
  done
  for ((rank = 0; rank < ${#hosts}; rank++)); do
    wait "${jobs[rank]}" && grep -q 'rank well' "$work/out$rank" || { cat "$work"/out?; fail "$name: rank $rank"; }
  done
  jobs=()
  echo "$name: ok"
}

if unshare --pid --fork true 2>"$work/log"; then
  for hosts in 001 010 0011 0010; do
    pod "a pod and another host ($hosts)" $hosts ""
    pod "a pod and another host, by file:// ($hosts)" $hosts "file://$work/pod"
  done
  pod "a pod alone" 000 ""
else
  echo "no process namespaces here, pods left out: $(head -n 1 "$work/log")"
fi

# --- CDDP_IFNAME: bytes between ranks take the second link ---

sent() { ip netns exec "$net-0" cat /sys/class/net/wire1/statistics/tx_bytes; }
before=$(sent)
CDDP_IFNAME=wire1 adds "CDDP_IFNAME" node0
[ $(($(sent) - before)) -gt 2000 ] || fail "CDDP_IFNAME=wire1, and $(($(sent) - before)) bytes went there"
CDDP_IFNAME=wire7 launch node0 "$work/loop"
join any
grep -q 'CDDP_IFNAME is "wire7"' "$work/out0" "$work/out1" || { cat "$work"/out?; fail "wire7 is not named"; }

# --- a process joins by link-local addresses: each host has another number for the interface ---

if ip -n "$net-0" link add wire2 index 70 type veth peer name wire2 netns "$net-1" index 80 2>"$work/log" &&
  ip -n "$net-0" -6 addr add fe80::1/64 dev wire2 nodad && ip -n "$net-1" -6 addr add fe80::2/64 dev wire2 nodad &&
  ip -n "$net-0" link set wire2 up && ip -n "$net-1" link set wire2 up; then
  rm -f "$work/runs"
  launch fe80::1%wire2 "$work/lasting" "$work/runs"
  for ((i = 0; i < 600; i++)); do [ -e "$work/runs" ] && break; sleep 0.05; done
  (RANK=4 WORLD_SIZE=4 MASTER_ADDR=fe80::1%wire2 MASTER_PORT=29500 CDDP_JOIN=1 CDDP_HOST_ID=third \
    on_host 1 timeout -k 5 60 "$work/lasting" >"$work/out2" 2>&1) ||
    { cat "$work"/out?; fail "link-local: the process did not join"; }
  join
  [ "$(cat "$work"/out? | grep -o 'weights .*' | sort | uniq -c | awk '{ print $1 }')" = 5 ] ||
    { cat "$work"/out?; fail "link-local: not five ranks with the same weights"; }
  rm "$work/out2"
  echo "joining by link-local addresses: ok"
else
  echo "no IPv6 here, joining by link-local addresses left out: $(head -n 1 "$work/log")"
fi

# --- a slow link that loses packets ---

cat >"$work/slow.c" <<'END'
/* A wire between two network namespaces that takes 1 to 2 ms and loses one packet of 200. From a first SIGUSR1 to the
   next one it is a firewall: it carries nothing, and answers each TCP packet with RST; SIGUSR2: only those from the
   first host. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
enum { QUEUE = 8192, MTU = 1600 };
static struct queue { double due[QUEUE]; int size[QUEUE]; unsigned first, last; char data[QUEUE][MTU]; } q[2];
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static int end_in(const char *path) {
  struct ifreq r;
  int space = open(path, O_RDONLY), fd;
  memset(&r, 0, sizeof r);
  strcpy(r.ifr_name, "slow");
  r.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (space < 0 || setns(space, CLONE_NEWNET) != 0) return perror(path), -1;
  if ((fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK)) < 0 || ioctl(fd, TUNSETIFF, &r) != 0) return perror("tun"), -1;
  return fd;
}
static volatile sig_atomic_t rejects[2];
static void toggle(int signal) {
  rejects[0] = !rejects[0];
  if (signal == SIGUSR1) rejects[1] = rejects[0];
}
static uint16_t sum(const uint8_t *p, int n, uint32_t s) {
  for (; n > 1; p += 2, n -= 2) s += (uint32_t)(p[0] << 8 | p[1]);
  while (s >> 16) s = (s & 65535) + (s >> 16);
  return htons((uint16_t)~s);
}
/* What iptables -j REJECT --reject-with tcp-reset does. */
static void reject(int in, const uint8_t *p, int n) {
  int head = (p[0] & 15) * 4, data;
  const uint8_t *t = p + head;
  uint8_t r[40] = {0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6}, flags;
  uint16_t check;
  uint32_t ack;
  if (p[0] >> 4 != 4 || p[9] != 6 || n < head + 20 || (t[13] & 4) != 0) return;
  flags = t[13];
  data = n - head - (t[12] >> 4) * 4 + (flags & 1) + (flags >> 1 & 1);
  memcpy(&ack, t + 4, 4);
  ack = htonl(ntohl(ack) + (uint32_t)data);
  memcpy(r + 12, p + 16, 4);
  memcpy(r + 16, p + 12, 4);
  memcpy(r + 20, t + 2, 2);
  memcpy(r + 22, t, 2);
  if (flags & 16) memcpy(r + 24, t + 8, 4);
  else memcpy(r + 28, &ack, 4);
  r[32] = 0x50;
  r[33] = flags & 16 ? 4 : 20;
  check = sum(r, 20, 0);
  memcpy(r + 10, &check, 2);
  check = sum(r + 12, 28, 6 + 20);
  memcpy(r + 36, &check, 2);
  if (write(in, r, 40) < 0) perror("RST");
}
static void carry(int in, int out, struct queue *w) {
  int n;
  while (w->last - w->first < QUEUE && (n = (int)read(in, w->data[w->last % QUEUE], MTU)) > 0) {
    if (rejects[w - q]) {
      reject(in, (const uint8_t *)w->data[w->last % QUEUE], n);
      continue;
    }
    if (rand() % 200 == 0) continue;
    w->size[w->last % QUEUE] = n;
    w->due[w->last++ % QUEUE] = now() + 1e-3 + rand() % 1000 * 1e-6;
  }
  for (; w->first != w->last && w->due[w->first % QUEUE] <= now(); w->first++)
    if (write(out, w->data[w->first % QUEUE], (size_t)w->size[w->first % QUEUE]) < 0) continue; /* lost */
}
int main(int argc, char **argv) {
  struct pollfd fds[2];
  int i, home = open("/proc/self/ns/net", O_RDONLY);
  for (i = 0; i < 2 && argc == 3; i++) {
    fds[i].fd = end_in(argv[1 + i]);
    fds[i].events = POLLIN;
    if (fds[i].fd < 0) return 1;
  }
  if (setns(home, CLONE_NEWNET) != 0) return perror("setns"), 1; /* it is on neither host */
  signal(SIGUSR1, toggle);
  signal(SIGUSR2, toggle);
  puts("ready");
  fflush(stdout);
  for (;;) {
    poll(fds, 2, q[0].first != q[0].last || q[1].first != q[1].last ? 1 : 100);
    carry(fds[0].fd, fds[1].fd, &q[0]);
    carry(fds[1].fd, fds[0].fd, &q[1]);
  }
}
END
cc -O1 "$work/slow.c" -o "$work/slow" || fail "slow does not compile"
"$work/slow" "/run/netns/$net-0" "/run/netns/$net-1" >"$work/wire" 2>"$work/log" &
relay=$!
for ((i = 0; i < 100; i++)); do
  grep -q ready "$work/wire" || ! kill -0 $relay 2>/dev/null && break
  sleep 0.05
done
if grep -q ready "$work/wire"; then
  for h in 0 1; do
    ip -n "$net-$h" addr add "10.101.0.$((h + 1))" peer "10.101.0.$((2 - h))" dev slow &&
      ip -n "$net-$h" link set slow up || exit 1
  done
  adds "delay and loss" 10.101.0.1
  [ ! -x "$work/digits" ] || digits "the same weights there" 10.101.0.1
else
  echo "no tun device here, delay, loss and a firewall left out: $(head -n 1 "$work/log")"
  wait $relay 2>/dev/null
  relay=
fi

# --- a link that is cut: both hosts know by the deadline, and before it when nothing has been
# acknowledged for 20 s (for 4 s in loop4), and name the other ---

cut_link() { # NAME PROGRAM TIMEOUT SECONDS COMMAND...
  local name=$1 program=$2 timeout=$3 within=$4 start i h
  shift 4
  rm -f "$work/runs"
  CDDP_TIMEOUT_S=$timeout launch "${master:-node0}" "$work/$program" "$work/runs"
  for ((i = 0; i < 300; i++)); do [ -e "$work/runs" ] && break; sleep 0.05; done
  [ -e "$work/runs" ] || { cat "$work"/out?; fail "$name: the ranks did not meet"; }
  "$@" || fail "$name: $*"
  start=$(date +%s)
  join any
  for h in 0 1; do
    grep -q -E "CDDP_(PEER_LOST|TIMEOUT|ABORTED): .*rank [0-3] \(pid [0-9]+( on node$((1 - h)))?\)" "$work/out$h" ||
      { cat "$work"/out?; fail "$name: host $h does not name the other"; }
    awk -v s=$((start + within)) '/CDDP_(PEER_LOST|TIMEOUT|ABORTED): / { sub(/^\[[0-9]\] /, ""); n++ }
      /CDDP_(PEER_LOST|TIMEOUT|ABORTED): / && $1 > s { late = 1 } END { exit n < 1 || late }' "$work/out$h" ||
      { cat "$work"/out?; fail "$name: later than $within s"; }
  done
  echo "$name: ok: $(grep -h -m 1 -o 'CDDP_.*' "$work/out1")"
}

cut_link "a link set down" loop 3 5 ip -n "$net-0" link set wire0 down
ip -n "$net-0" link set wire0 up
cut_link "no answer for 4 s" loop4 40 9 ip -n "$net-0" link set wire0 down
grep -q 'Connection timed out; if only large calls fail, .* MTU' "$work"/out? ||
  { cat "$work"/out?; fail "a connection that timed out: no word of the MTU"; }
ip -n "$net-0" link set wire0 up
cut_link "a host that is gone" loop 3 5 ip netns exec "$net-1" ip link set wire0 down
ip netns exec "$net-1" ip link set wire0 up

# --- elastic models: the other host goes on when one dies; neither does when they are cut off, as
# neither has more than half of the ranks ---

"$work/lasting" >"$work/alone" || { cat "$work/alone"; fail "lasting: failed alone"; }
rm -f "$work/runs"
launch node0 "$work/lasting" "$work/runs"
for ((i = 0; i < 300; i++)); do [ -e "$work/runs" ] && break; sleep 0.05; done
ip netns pids "$net-1" | xargs kill -KILL
join any 2>/dev/null
[ "$(grep -c -F "$(cat "$work/alone")" "$work/out0")" = 2 ] || { cat "$work"/out?; fail "a host dies: other weights"; }
echo "a host dies, the other goes on: ok"
rm -f "$work/runs"
LEAVES=2 launch node0 "$work/lasting" "$work/runs"
join any
[ "$(grep -c -F "$(cat "$work/alone")" "$work/out0")" = 2 ] ||
  { cat "$work"/out?; fail "the ranks of a host leave their model: the others did not go on"; }
echo "the ranks of a host leave their model, the others go on: ok"
cut_link "elastic ranks that are cut off" lasting 40 20 ip -n "$net-0" link set wire0 down

# --- the same behind a firewall that answers with RST, as a host whose processes have ended does: two halves never
# train apart; three ranks of four go on; the last rank goes on when those of the other host are killed ---

halves() { # NAME COMMAND...: no rank goes on
  local name=$1
  shift
  master=10.101.0.1 cut_link "$name" lasting 40 20 "$@"
  ! grep -q weights "$work"/out? || { cat "$work"/out?; fail "$name: a half went on"; }
}

uneven() { # NAME HOST COMMAND...: three ranks on the first host; those of HOST go on when COMMAND has been run
  local name=$1 host=$2 rank i
  shift 2
  rm -f "$work"/runs "$work"/out?
  for rank in 0 1 2 3; do
    (RANK=$rank WORLD_SIZE=4 MASTER_ADDR=10.101.0.1 MASTER_PORT=29500 \
      on_host $((rank / 3)) timeout -k 5 60 "$work/lasting" "$work/runs" >"$work/out$rank" 2>&1) &
    jobs[rank]=$!
  done
  for ((i = 0; i < 300; i++)); do [ -e "$work/runs" ] && break; sleep 0.05; done
  "$@" || fail "$name: $*"
  for rank in 0 1 2 3; do
    wait "${jobs[rank]}" 2>/dev/null
    if [ $((rank / 3)) = "$host" ]; then
      grep -q -F "$(cat "$work/alone")" "$work/out$rank" || { cat "$work"/out?; fail "$name: rank $rank"; }
    else
      ! grep -q weights "$work/out$rank" || { cat "$work"/out?; fail "$name: rank $rank went on"; }
    fi
  done
  jobs=()
  echo "$name: ok: $(grep -h -m 1 -o 'CDDP_.*' "$work"/out?)"
}

if [ -n "$relay" ]; then
  halves "a firewall with RST" kill -USR1 "$relay"
  kill -USR1 "$relay"
  halves "a firewall with RST one way" kill -USR2 "$relay"
  kill -USR2 "$relay"
  uneven "a firewall with RST, three of four" 0 kill -USR1 "$relay"
  kill -USR1 "$relay"
  for ((round = 0; round < 4; round++)); do
    uneven "three of four are killed" 1 sh -c "sleep 0.$round; ip netns pids $net-0 | xargs kill -KILL"
  done
fi
echo "ok netns"
