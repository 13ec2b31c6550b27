# tables.awk - from the lines that the measuring programs print to tables of medians and ratios; see README.md.

function median(list,   v, n, i, j, t) {
  n = split(list, v, " ")
  for (i = 2; i <= n; i++) {
    t = v[i] + 0
    for (j = i - 1; j > 0 && v[j] + 0 > t; j--) v[j + 1] = v[j]
    v[j + 1] = t
  }
  return n == 0 ? 0 : n % 2 ? v[(n + 1) / 2] + 0 : (v[n / 2] + v[n / 2 + 1]) / 2
}

function us(config, op, ranks, bytes) { return median(taken[config, op, ranks, bytes]) }

# The least of several configurations' medians; 0 when none was measured.
function best(names, op, ranks, bytes,   v, n, i, t, least) {
  n = split(names, v, " ")
  for (i = 1; i <= n; i++) {
    t = us(v[i], op, ranks, bytes)
    if (t > 0 && (least == 0 || t < least)) least = t
  }
  return least + 0
}

function show(x) { return x == 0 ? "-" : x < 10 ? sprintf("%.2f", x) : x < 100 ? sprintf("%.1f", x) : sprintf("%.0f", x) }
function ratio(a, b) { return a == 0 || b == 0 ? "-" : sprintf("%.2f", a / b) }
function size_name(b) {
  return b == 0 ? "" : b >= 1048576 ? b / 1048576 " MiB" : b >= 1024 ? b / 1024 " KiB" : b " B"
}

function row(op, ranks, bytes,   floor, alloc, slots, plain, huge, open, mpich, gloo, foreign) {
  floor = us("floor", op, ranks, bytes)
  slots = us("slots", op, ranks, bytes)
  alloc = us("cddp-alloc", op, ranks, bytes)
  open = best("openmpi openmpi-nocma openmpi-cma openmpi-huge", op, ranks, bytes)
  mpich = best("mpich mpich-huge", op, ranks, bytes)
  gloo = us("gloo", op, ranks, bytes)
  plain = us("cddp-malloc", op, ranks, bytes)
  huge = us("cddp-huge", op, ranks, bytes)
  printf "%8s |%8s%9s%9s%9s%9s |%7s%7s |%9s%9s%7s |%9s%9s%7s%9s | %s %s %s\n", size_name(bytes), show(floor),
    show(alloc), show(open), show(mpich), show(gloo),
    ratio(best(ALL, op, ranks, bytes), alloc), ratio(alloc, floor),
    show(plain), show(best(PLAIN, op, ranks, bytes)), ratio(best(PLAIN, op, ranks, bytes), plain),
    show(huge), show(best(HUGE, op, ranks, bytes)), ratio(best(HUGE, op, ranks, bytes), huge), show(slots),
    letter("cddp-alloc", op, ranks, bytes), letter("cddp-malloc", op, ranks, bytes), letter("cddp-huge", op, ranks, bytes)
}

# How cddp did it: o, d or s.
function letter(config, op, ranks, bytes,   w) {
  w = substr(way[config, op, ranks, bytes], 1, 1)
  return w == "" ? "-" : w
}

# The table of README.md at the top.
function readme_table(   i, b) {
  printf "\n| bytes | cddp, `cddp_alloc` memory | loops | peer, its best memory | cddp, malloc'ed memory |"
  printf " peer, malloc'ed memory |\n|---|---|---|---|---|---|\n"
  for (i = 1; i <= size_count; i++) {
    b = size[i]
    if (!us("cddp-alloc", "all_reduce", 2, b)) continue # a peer's only
    printf "| %s | %s | %s | %s | %s | %s |\n", (b < 1048576 ? b : b / 1048576 " Mi"), show(us("cddp-alloc", "all_reduce", 2, b)),
      (b < 1024 ? "-" : show(us("floor", "all_reduce", 2, b))), show(best(ALL, "all_reduce", 2, b)),
      show(us("cddp-malloc", "all_reduce", 2, b)), show(best(PLAIN, "all_reduce", 2, b))
  }
}

function table(op, ranks,   i, b) {
  printf "\n%s, %d ranks, us\n", op, ranks
  printf "%8s |%44s |%14s |%25s |%34s | %s\n", "", "floor    alloc Open MPI    MPICH     gloo", "faster  /floor",
    "malloc     peer faster", "huge     peer faster    slots", "way"
  for (i = 1; i <= size_count; i++) {
    b = size[i]
    if ((op, ranks, b) in measured) row(op, ranks, b)
  }
}

function step_row(name) {
  if (!(name in step)) return
  printf "%-14s%9s%9s%9s%9s\n", name, show(median(step[name])), show(median(step[name ".forward"])),
    show(median(step[name ".backward"])), show(median(step[name ".update"]))
}

function steps() {
  printf "\ntraining step, 2 ranks, ms\n%-14s%9s%9s%9s%9s\n", "", "step", "forward", "backward", "update"
  step_row("alone"); step_row("lockstep"); step_row("ddp_step"); step_row("ddp_wait"); step_row("elastic"); step_row("torch_alone"); step_row("torch_ddp")
  printf "efficiency: ddp_step %s (of lockstep %s), ddp_wait %s, PyTorch with gloo %s\n",
    ratio(median(step["alone"]), median(step["ddp_step"])), ratio(median(step["lockstep"]), median(step["ddp_step"])), ratio(median(step["alone"]), median(step["ddp_wait"])),
    ratio(median(step["torch_alone"]), median(step["torch_ddp"]))
  printf "cddp_ddp_step without the network %s, floor %s, ratio %s\n", show(median(step["update"])),
    show(median(step["update_floor"])), ratio(median(step["update"]), median(step["update_floor"]))
}

function startups(   i, n, v) {
  printf "\nstart-up, ms\n%8s%9s%9s\n", "ranks", "all", "per rank"
  for (i = 1; i <= start_count; i++) {
    n = start_ranks[i]
    printf "%8d%9s%9s\n", n, show(start[n]), show(start[n] / n)
  }
  n = split("cddp openmpi mpich gloo", v, " ")
  for (i = 1; i <= n; i++) {
    if (v[i] in wall) printf "program of 2 ranks that only starts and ends: %-8s %s\n", v[i], show(median(wall[v[i]]))
  }
  if (init != "") printf "PyTorch's init_process_group and a barrier, 2 ranks, imports not counted: %s\n", show(median(init))
  if (store != "") print store
}

BEGIN {
  PLAIN = "openmpi openmpi-nocma openmpi-cma mpich gloo"
  HUGE = "openmpi-huge mpich-huge"
  ALL = PLAIN " " HUGE
}
$1 == "step" { step[$2] = step[$2] " " $3; next }
$1 == "startup" { start[$2] = $3; start_ranks[++start_count] = $2; next }
$1 == "wall" { wall[$2] = wall[$2] " " $4; next }
$1 == "init" { init = init " " $4; next }
$1 == "store" {
  store = sprintf("store server: %d clients connected in %.2f s, %d operations/s, %d threads in its process", $2, $3, $4, $5)
  next
}
$2 == "line" { line = line " " $5; next }
NF == 5 || NF == 6 {
  taken[$1, $2, $3, $4] = taken[$1, $2, $3, $4] " " $5
  measured[$2, $3, $4] = 1
  if (NF == 6) { way[$1, $2, $3, $4] = $6; split($6, sums, ","); if (sums[2] != "") set = sums[2] }
  if (!($4 in known)) { known[$4] = 1; size[++size_count] = $4 }
}
END {
  if (line != "") printf "round trip of a cache line, us:%s\n", line
  if (set != "") printf "sums by %s; way of cddp with alloc, malloc, huge: o one round, d direct, s staged\n", set
  for (i = 2; i <= size_count; i++) {
    t = size[i] + 0
    for (j = i - 1; j > 0 && size[j] + 0 > t; j--) size[j + 1] = size[j]
    size[j + 1] = t
  }
  if (readme) { readme_table(); exit }
  n = split("all_reduce broadcast all_gather reduce_scatter barrier", ops, " ")
  for (r = 2; r <= 8; r *= 2) {
    for (k = 1; k <= n && size_count > 0; k++) {
      any = 0
      for (i = 1; i <= size_count; i++) any += (ops[k], r, size[i]) in measured
      if (any) table(ops[k], r)
    }
  }
  if ("alone" in step || "torch_ddp" in step) steps()
  if (start_count > 0) startups()
}
