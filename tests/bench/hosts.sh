#!/bin/bash
# Times collectives between two hosts, one rank on each: network namespaces joined by a veth link, which is
# the kernel's TCP and no wire. cddp, Open MPI over TCP and gloo in turn. Needs root.
#
#   tests/bench/hosts.sh [ROUNDS]      3; prints medians in microseconds and ratios to cddp
#
# PYTHON names the Python that has PyTorch. Results go to build/bench/hosts.
set -u
cd "$(dirname "$0")/../.." || exit 1

rounds=${1:-3} here=tests/bench out=$PWD/build/bench net=cddpb$$ python=
work=$(mktemp -d) && mkdir -p "$out" || exit 1
cleanup() {
  ip netns del "$net-0" 2>/dev/null
  ip netns del "$net-1" 2>/dev/null
  rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT CDDP_SECRET CDDP_TIMEOUT_S
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=wire CDDP_TIMEOUT_S=120

ip netns add "$net-0" && ip netns add "$net-1" && ip -n "$net-0" link add wire type veth peer name wire netns "$net-1" ||
  { echo "no right to make namespaces"; exit 1; }
for h in 0 1; do
  printf '127.0.0.1 localhost\n10.97.0.1 node0\n10.97.0.2 node1\n' >"$work/hosts"
  ip -n "$net-$h" addr add 10.97.0.$((h + 1))/24 dev wire && ip -n "$net-$h" link set wire up &&
    ip -n "$net-$h" link set lo up || exit 1
done

on_host() { # HOST COMMAND...
  local h=$1
  shift
  # shellcheck disable=SC2016
  ip netns exec "$net-$h" unshare --uts --mount sh -c \
    'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"' sh "node$h" "$work/hosts" "$@"
}

on_both() { # COMMAND...: with RANK and WORLD_SIZE; %r in it is the rank
  local h pids=()
  for h in 0 1; do
    MASTER_ADDR=node0 MASTER_PORT=29600 WORLD_SIZE=2 RANK=$h on_host $h timeout -k 5 180 "${@//%r/$h}" &
    pids+=($!)
  done
  wait "${pids[@]}"
}

flags=(-std=gnu11 -O2 -Wno-unknown-pragmas)
cc "${flags[@]}" -DBENCH_CDDP $here/collectives.c -o "$work/cddp" -lpthread -lm || exit 1
mpicc.openmpi "${flags[@]}" -DBENCH_MPI $here/collectives.c -o "$work/openmpi" -lm 2>/dev/null || echo "left out: Open MPI"
for p in ${PYTHON:-python3}; do
  "$p" -c 'import torch.distributed as d; assert d.is_gloo_available()' 2>/dev/null && python=$(command -v "$p")
done
[ -n "$python" ] || echo "left out: gloo; set PYTHON"

# Open MPI starts its second host through a command in place of ssh.
cat >"$work/agent" <<END
#!/bin/bash
shift # the host: there is but one other
exec ip netns exec $net-1 unshare --uts --mount sh -c 'hostname node1 && mount --bind $work/hosts /etc/hosts && exec sh -c "\$1"' sh "\$*"
END
chmod +x "$work/agent"
openmpi() {
  local mca=(--mca plm_rsh_agent "$work/agent" --mca btl tcp,self --mca pml ob1 --mca btl_tcp_if_include wire
    --mca oob_tcp_if_include wire --mca plm_rsh_no_tree_spawn 1)
  on_host 0 env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout -k 5 180 mpirun.openmpi \
    -H node0:1,node1:1 -np 2 --bind-to none "${mca[@]}" "$work/openmpi" --quick --ranks 2 --config openmpi
}

: >"$out/hosts.raw"
for ((r = 1; r <= rounds; r++)); do
  echo "round $r of $rounds (load $(cut -d' ' -f1 /proc/loadavg))" >&2
  on_both "$work/cddp" --quick --ranks 2 --config cddp --memory malloc >>"$out/hosts.raw"
  [ ! -x "$work/openmpi" ] || openmpi >>"$out/hosts.raw" 2>"$out/hosts-openmpi.err" || tail -n 3 "$out/hosts-openmpi.err"
  [ -z "$python" ] || on_both "$python" "$PWD/$here/gloo_bench.py" --quick --ranks 2 --rank %r --master 10.97.0.1 29601 \
    >>"$out/hosts.raw" 2>"$out/hosts-gloo.err"
done

{
  echo "2 hosts (namespaces, veth), a rank on each; $(date -u '+%Y-%m-%d %H:%M UTC'), load $(cut -d' ' -f1-3 /proc/loadavg) at the end"
  sort -k2,2 -k4,4n -k1,1 -k5,5n "$out/hosts.raw" | awk '
    function flush_() { if (n) m[key] = n % 2 ? v[(n + 1) / 2] : (v[n / 2] + v[n / 2 + 1]) / 2; n = 0 }
    $2 != "line" { k = $2 " " $4 " " $1; if (k != key) { flush_(); key = k } v[++n] = $5
      if (!(($2 " " $4) in seen)) { seen[$2 " " $4] = 1; order[++rows] = $2 " " $4 } }
    END { flush_(); printf "%-16s %10s %12s %12s %12s %9s %9s\n", "operation", "bytes", "cddp", "Open MPI", "gloo", "MPI/cddp", "gloo/cddp"
      for (i = 1; i <= rows; i++) { split(order[i], w, " "); c = m[order[i] " cddp"]; o = m[order[i] " openmpi"]; g = m[order[i] " gloo"]
        printf "%-16s %10d %12.1f %12s %12s %9s %9s\n", w[1], w[2], c, o ? sprintf("%.1f", o) : "-", g ? sprintf("%.1f", g) : "-",
          o && c ? sprintf("%.2f", o / c) : "-", g && c ? sprintf("%.2f", g / c) : "-" } }'
} | tee "$out/hosts"
