#!/bin/bash
# Builds each example by the command in its top comment, runs it, and reads what it prints.
#
#   tests/examples.sh toy         one
#
# --help must list the options that the source has. Runs on several numbers of ranks, as children and as
# a launcher's, must print the same losses and hashes; pictures and tables must hold the numbers that were
# printed; killed and resumed runs must end as if nothing had happened. digits is built by exactly its
# command; the others link the implementation that ninja has compiled. gpu: those for GPUs, on the double.
set -u
cd "$(dirname "$0")/.." || exit 1
top=$PWD

work=$(mktemp -d "${TMPDIR:-/tmp}/cddp-example.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT

compiled=
[ ! -e build/plain/cddp.o ] || compiled="-DCDDP_IMPLEMENTATION_DONE -D_GNU_SOURCE $top/build/plain/cddp.o"

fail() { echo "$*"; exit 1; }

build() { # NAME: in a directory where cddp.h and examples/ are as in the repository
  local command
  command=$(grep -m 1 -o -E "^ +cc .*examples/$1\.c.*" "examples/$1.c") ||
    fail "examples/$1.c has no line '  cc ... examples/$1.c ...' in its top comment"
  ln -s "$top/cddp.h" "$top/examples" "$work" && cd "$work" || exit 1
  # digits is built by exactly its command; the others link the implementation that ninja has compiled.
  [ "$1" = digits ] || command=${command/ -O[23] / -O1 }
  [ "$1" = digits ] || command=${command/examples\/$1.c/$compiled examples\/$1.c}
  echo "$command"
  eval "$command" || fail "that fails"
  lists_options "./$1" "examples/$1.c"
}

lists_options() { # PROGRAM SOURCE: --help lists all options that the source has and does not refuse; a wrong one is an error with that list
  local option
  "$1" --help >"$work/help" 2>"$work/errors" || fail "$1 --help: exit code $?"
  [ ! -s "$work/errors" ] || fail "$1 --help: $(cat "$work/errors")"
  for option in $(grep -v -E '", "is (not needed|torchrun)' "$2" | grep -o -E '"--?[a-z][a-z_-]*"' | tr -d '"' | sort -u); do
    [[ " --help -h " = *" $option "* ]] || grep -q -E -e "(^|[^a-z-])$option([^a-z-]|\$)" "$work/help" || fail "$1 --help lacks $option"
  done
  for option in '--no-such-option 1' --no-such-option '-n' ; do
    [ "$1 $option" != './cddptrace -n' ] || continue
    # shellcheck disable=SC2086
    "$1" $option >"$work/help2" 2>"$work/errors"
    [ $? = 2 ] && [ ! -s "$work/help2" ] || fail "$1 $option: no exit code 2, or words on stdout"
    grep -q 'see cddprun --help$' "$work/errors" || # a tool, with more options than fit an error
      ! grep -v '^$' "$work/help" | grep -q -v -x -F -f "$work/errors" || fail "$1 $option: $(cat "$work/errors")"
  done
}

run() { # COMMAND...: fails unless it succeeds; its output is in $work/out
  timeout 60 "$@" >"$work/out" 2>&1
  local code=$?
  cat "$work/out"
  [ $code = 0 ] || fail "$*: exit code $code"
}

expect() { # COUNT PATTERN: that many lines of the output match
  local n
  n=$(grep -c -E -e "$2" "$work/out")
  [ "$n" = "$1" ] || fail "$n lines, not $1, match: $2"
}

launched() { # RANKS COMMAND...: as the ranks of a launcher, all in one job; its output is in $work/out
  local ranks=$1 r port=$((20000 + $$ % 9000)) pids=() code=0
  shift
  for ((r = 0; r < ranks; r++)); do
    RANK=$r WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 60 "$@" >"$work/out$r" 2>&1 &
    pids+=($!)
  done
  for r in "${pids[@]}"; do wait "$r" || code=$?; done
  cat "$work"/out[0-9] >"$work/out"
  [ $code = 0 ] || { cat "$work/out"; fail "as $ranks ranks of a launcher: $*: exit code $code"; }
}

# People adapt examples: with other sizes none reads or writes past an array. (Losses are not compared.)
sizes() {
  local name sizes size file
  while read -r name sizes; do
    cp -r examples "$work/examples" && ln -sf "$top/cddp.h" "$work" && file=$work/examples/$name.c
    for size in $sizes; do
      grep -q -E "\b${size%=*} = [0-9]+" "$file" || fail "$name has no constant ${size%=*}"
      sed -i -E "0,/\b${size%=*} = [0-9]+/s//${size%=*} = ${size#*=}/" "$file"
    done
    # shellcheck disable=SC2086
    cc -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -I. ${compiled:-} "$file" -o "$work/$name" -lpthread -lm \
      2>"$work/errors" || { grep -q -i 'cannot find.*san' "$work/errors" && echo 'SKIP: no sanitizer' && exit 77; fail "$(cat "$work/errors")"; }
    ASAN_OPTIONS=detect_leaks=0 timeout 100 "$work/$name" >"$work/out" 2>&1
    ! grep -E -A 6 'AddressSanitizer|runtime error|SIGSEGV|signal 11' "$work/out" || fail "$name with $sizes"
    rm -rf "$work/examples"
  done <<'END'
toy IN=7 HIDDEN=13 OUT=11 BATCH=3
linear IN=3 OUT=17 BATCH=5
embedding WIDTH=17 CLASSES=3 BATCH=5 STEPS=40
powersgd IN=48 OUT=64 STEPS=60
powersgd IN=5 OUT=9 BATCH=3 STEPS=60
sync_batchnorm IN=5 CHANNELS=7 BATCH=12
mesh IN=5 HIDDEN=18 OUT=7 BATCH=6
model_parallel IN=8 MIDDLE=24 OUT=12 STEPS=20
elastic IN=7 HIDDEN=33 BATCH=5 SHARDS=5 steps=100
END
}

toy() {
  local ranks r
  build toy
  for ranks in 2 4; do
    run ./toy -n $ranks
    for ((r = 0; r < ranks; r++)); do
      expect 1 "^Running on rank $r\.\$"
      expect 1 "^Loss on rank $r: [0-9]+\.[0-9]+\$"
    done
    expect $ranks '^Loss on rank '
    [ "$(grep '^Loss' "$work/out" | sed 's/.*: //' | sort -u | wc -l)" = $ranks ] || fail "the losses do not differ by rank"
  done
  RANK=0 WORLD_SIZE=1 run ./toy -n 4 # as srun -n 1 ./toy -n 4
  expect 1 '^-n 4 is ignored: the launcher'
  RANK=0 WORLD_SIZE=1 run ./toy
  expect 0 'is ignored'
  RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 CDDP_TIMEOUT_S=0.1 timeout 60 ./toy -n 4 >"$work/out" 2>&1
  expect 0 'is ignored' # rank 0 has said so
}

linear() {
  local r
  build linear
  run ./linear -n 3
  for r in 0 1 2; do
    expect 1 "^Loss on rank $r: [0-9]+\.[0-9]+\$"
    # The rows after a rank's heading are its parameters.
    awk -v r="Parameters on rank $r:" '$0 == r { on = 1; next } /^[A-Z]/ { on = 0 } on' "$work/out" >"$work/rank$r"
    [ "$(wc -l <"$work/rank$r")" -ge 10 ] || fail "no parameters of rank $r"
    cmp "$work/rank0" "$work/rank$r" || fail "the parameters of ranks 0 and $r differ"
  done
  [ "$(grep '^Loss' "$work/out" | sed 's/.*: //' | sort -u | wc -l)" = 3 ] || fail "the losses do not differ by rank"
  grep '^Hash' "$work/out" >"$work/hash"
  launched 3 ./linear
  expect 3 '^Loss on rank [0-2]: '
  grep '^Hash' "$work/out" | cmp - "$work/hash" || fail "a launcher's ranks have other weights"
}

collectives() {
  build collectives
  run ./collectives -n 3
  expect 3 '^all_gather, rank [0-2]: 1 10 2 20 3 30$'
  expect 1 '^gather, rank 2: 1 10 2 20 3 30$'
  expect 2 '^gather, rank [01]: 0 0 0 0 0 0$'
  expect 3 '^all_reduce, sum, rank [0-2]: 6 60$'
  expect 3 '^broadcast, rank [0-2]: 3 30$'
  expect 9 '^list, array [0-2] of rank [0-2]: '
  expect 1 '^list, array 2 of rank 1: 120 121 122 123$'
  grep -o -E '^[a-z_, ]+, rank [0-9]' "$work/out" >"$work/order"
  for word in mine all_gather gather all_reduce broadcast; do # one rank at a time, in order
    grep "^$word," "$work/order" | sort -c || fail "the ranks did not print in turn"
  done
  launched 3 ./collectives
  expect 3 '^all_gather, rank [0-2]: 1 10 2 20 3 30$'
  expect 1 '^gather, rank 2: 1 10 2 20 3 30$'
}

powersgd() { # the loss of compressed gradients; 3.6 % of the bytes with R = 1
  build powersgd
  for ranks in 1 2 4; do
    run ./powersgd -n $ranks
    expect 1 '^R = 0:  9830400 bytes \(100\.0 %\), loss 0\.2[0-9]+$'
    expect 1 '^R = 1:   358400 bytes \(  3\.6 %\), loss 0\.[23][0-9]+$'
    expect 1 '^R = 4:  1433600 bytes \( 14\.6 %\), loss 0\.2[0-9]+$'
  done
  launched 2 ./powersgd
}

sync_batchnorm() { # the weights of one process with the whole batch; the example compares them
  build sync_batchnorm
  for ranks in 1 2 5; do
    run ./sync_batchnorm -n $ranks
    expect 1 "^loss of $ranks ranks (0\.[0-9]+), of one process 0\.[0-9]+; largest difference of a weight: [0-9]"
  done
  launched 3 ./sync_batchnorm
}

mesh() { # the weights of one process; the example compares them
  build mesh
  for ranks in 2 4 6; do
    run ./mesh -n $ranks
    expect 1 "^mesh of $((ranks / 2)) by 2 ranks, 16 hidden units each$"
    expect 1 '^loss 0\.1[0-9]+, of one process 0\.1[0-9]+$'
  done
  launched 4 ./mesh
  ./mesh -n 3 >out 2>&1 && fail "3 ranks: $(cat out)"
  grep -q '^3 ranks: the number must be a multiple of 2' out || fail "3 ranks: $(cat out)"
}

local_sgd() { # few bytes, and a loss as good; the example compares the losses
  build local_sgd
  for ranks in 1 2 4; do
    run ./local_sgd -n $ranks --every 50
    expect 1 '^data parallel   5120000 bytes a rank, loss 0\.00[0-9]+$'
    expect 1 '^local SGD        102400 bytes a rank, loss 0\.00[0-9]+$'
    expect 1 '^DiLoCo           102400 bytes a rank, loss 0\.00[0-9]+$'
  done
  cp "$work/out" "$work/children"
  launched 4 ./local_sgd --every 50
  cmp "$work/out" "$work/children" || fail "a launcher's ranks have other losses"
}

embedding() { # dense and sparse gradients: the same losses and weights; far fewer bytes
  local dense sparse
  build embedding
  for ranks in 2 3; do
    run ./embedding -n $ranks
    expect 6 '^dense, step [1-6]00: loss [0-9]\.[0-9]{6}$'
    sed -n 's/^dense, //p' "$work/out" >"$work/dense"
    sed -n 's/^sparse, //p' "$work/out" | cmp - "$work/dense" || fail "the losses differ"
    [ "$(grep -o 'weights [0-9a-f]*$' "$work/out" | uniq -c | awk '{ print $1 }')" = 2 ] || fail "the weights differ"
    dense=$(sed -n 's/^dense: \([0-9]*\) bytes .*/\1/p' "$work/out")
    sparse=$(sed -n 's/^sparse: \([0-9]*\) bytes .*/\1/p' "$work/out")
    # A batch is 32 numbers, hardly ever all distinct; a row is 10 floats and its number.
    [ "$dense" = 40000 ] && [ "$sparse" -gt 1440 ] && [ "$sparse" -lt 1536 ] || fail "bytes: $dense and $sparse"
    awk '/^step 100:/ { first = $4 } END { exit !($4 < 0.01 && first > 1) }' "$work/dense" || fail "it does not learn"
  done
  grep -o 'weights [0-9a-f]*$' "$work/out" >"$work/hash"
  launched 3 ./embedding
  grep -o 'weights [0-9a-f]*$' "$work/out" | cmp - "$work/hash" || fail "a launcher's ranks have other weights"
}

data_parallel() { # on digits: one device, DataParallel in both ways and cddp_ddp have the same loss curve
  local option
  build data_parallel
  run ./data_parallel
  grep -E '^ +[0-9]+  [0-9]' "$work/out" >"$work/curve"
  [ "$(wc -l <"$work/curve")" = 10 ] || fail "$(wc -l <"$work/curve") epochs, not 10"
  awk '{ if (NF != 5 || $2 != $3 || $2 != $4 || $2 != $5 || (NR > 1 && $2 >= last)) exit 1; last = $2 }
       END { if (last > 0.1) exit 1 }' "$work/curve" || fail "four equal columns that fall below 0.1 expected"
  for option in '-n 1' '-n 4' '-n 4 --output 2' '-n 8 --output 7'; do
    # shellcheck disable=SC2086
    run ./data_parallel $option
    grep -E '^ +[0-9]+  [0-9]' "$work/out" | cmp - "$work/curve" || fail "$option: another curve"
  done
  # What the output device has beside its share: 64 x (64 pixels + 10 outputs) and momentum, in floats.
  run ./data_parallel -n 4 --output 1
  expect 1 '^loss on output: 39280 bytes on device 1, 17736 on each other, [0-9.]+ ms a step$'
  expect 1 '^loss on each: 36720 bytes on device 1, 17736 on each other, [0-9.]+ ms a step$'
}

model_parallel() { # the order of work changes nothing; two pipelines share the batch, up to rounding
  build model_parallel
  run ./model_parallel
  expect 1 '^3 micro-batches on their way at once, 2 ranks$'
  grep '^step' "$work/out" >"$work/curve"
  [ "$(wc -l <"$work/curve")" = 5 ] || fail "$(wc -l <"$work/curve") losses, not 5"
  run ./model_parallel --ahead 0
  expect 1 '^1 micro-batches on their way at once, 2 ranks$'
  grep '^step' "$work/out" | cmp - "$work/curve" || fail "--ahead 0: other losses"
  run ./model_parallel -n 4
  expect 1 '^3 micro-batches on their way at once, 4 ranks$'
  tail -n 1 "$work/out" | grep -q '^3 micro' || fail "the summary comes before $(tail -n 1 "$work/out")"
  grep '^step' "$work/out" | paste - "$work/curve" |
    awk '{ d = $4 - $8; if (d < 0) d = -d; if (d > 1e-6 || $2 != $6) exit 1; last = $4 }
         END { if (NR != 5 || last > 0.09) exit 1 }' || fail "-n 4: other losses"
  grep '^step' "$work/out" >"$work/curve"
  launched 4 ./model_parallel
  expect 1 '^3 micro-batches on their way at once, 4 ranks$'
  grep '^step' "$work/out" | cmp - "$work/curve" || fail "a launcher's 4 ranks have other losses"
}

digits() {
  local accuracy
  [ "$(cc -print-file-name=libopenblas.so)" != libopenblas.so ] ||
    fail "examples/digits.c needs cblas.h of OpenBLAS: apt-get install libopenblas-dev"
  build digits
  run ./digits -n 2
  accuracy=$(sed -n 's/.*accuracy[^0-9]*\([0-9][0-9.]*\) *%.*/\1/p' "$work/out" | tail -n 1)
  awk -v a="${accuracy:-0}" 'BEGIN { exit !(a >= 96) }' || fail "accuracy ${accuracy:-not found}, at least 96 % expected"
  # The hash of each rank's weights: one for each rank, all equal.
  grep -i 'rank' "$work/out" | grep -o -E '\b[0-9a-f]{16}\b' >"$work/hashes"
  [ "$(wc -l <"$work/hashes")" = 2 ] || fail "$(wc -l <"$work/hashes") weight hashes, 2 expected"
  [ "$(sort -u "$work/hashes" | wc -l)" = 1 ] || fail "the hashes of the ranks' weights differ"
  : >"$work/hashes" # 8 shards give one hash on any number of ranks
  for n in 1 2 3 8; do
    run ./digits -n $n --shards 8 --batch 8 --lr 0.025 --epochs 2 --hidden 64
    sed -n 's/^rank .* weights //p' "$work/out" >>"$work/hashes"
  done
  [ "$(sort "$work/hashes" | uniq -c | awk '{ print $1 }')" = 14 ] || fail "shards: the hashes differ"
  # A checkpoint of more epochs than are asked for is only tested: as it was in the run that saved it.
  run ./digits -n 2 --hidden 64 --epochs 4 --save more.safetensors
  grep '^test accuracy' "$work/out" >"$work/tested"
  for n in 1 2 3; do
    run ./digits -n $n --hidden 64 --epochs 2 --resume more.safetensors
    expect 1 "^$(cat "$work/tested")\$"
  done
  cannot_write ./digits --epochs 2 --hidden 64
  resume
  progress ./digits 'epoch 4/4  loss [0-9.]+  [0-9]+ samples/s  0 s left' --epochs 4
}

# Training that is killed, and goes on from its checkpoint: on 2 ranks with the same bits as if it had not
# been, on 3 and on 1 with the same loss. Each image's noise and the images of a step (96, in shares of
# 48, 32 or 96) do not depend on the number of ranks, so only the order of sums in f32 does: an error of
# about 1e-7 in a gradient, which some 100 steps let grow; 0.002 is what a printed loss of 4 digits may differ.
resume() {
  local common=(--epochs 9 --hidden 128) one pid tries=0
  run ./digits -n 2 --batch 48 "${common[@]}" --plot curve.svg --csv curve.csv
  sed -n 's/^epoch *\([0-9]*\).*loss/\1/p' "$work/out" >"$work/whole"
  [ "$(wc -l <"$work/whole")" = 9 ] || fail "not 9 epochs"
  one=$(grep -o -E '\b[0-9a-f]{16}\b' "$work/out" | head -n 1)
  picture curve.svg 4 9 epoch loss 'accuracy, %' 'training accuracy' 'test accuracy' 'learning rate'
  table curve.csv 9 'epoch,loss,training accuracy,test accuracy,learning rate'
  [ "$(sed 1d curve.csv | awk -F, '{ printf "%.4f %.1f %.1f\n", $2, $3, $4 }')" = "$(sed -n \
    's/^epoch.*loss \([0-9.]*\)  training accuracy \([0-9.]*\) %  test accuracy \([0-9.]*\) %$/\1 \2 \3/p' "$work/out")" ] ||
    fail "curve.csv has other numbers: $(cat curve.csv)"

  : >"$work/killed"
  ./digits -n 2 --batch 48 "${common[@]}" --save half.safetensors >"$work/killed" 2>&1 &
  pid=$!
  until grep -q '^epoch  3' "$work/killed"; do
    [ $((tries += 1)) -le 6000 ] && kill -0 $pid 2>/dev/null || fail "no third epoch: $(cat "$work/killed")"
    sleep 0.01
  done
  { kill -KILL $pid && wait $pid; } 2>/dev/null

  run ./digits -n 2 --batch 48 "${common[@]}" --resume half.safetensors --csv resumed.csv
  cmp curve.csv resumed.csv || fail "after --resume another table"
  expect 2 "^rank [01] weights $one\$" # the same bits
  expect 0 '^epoch  [12]/9' # those were done
  run ./digits -n 3 --batch 32 --lr 0.0666666667 "${common[@]}" --resume half.safetensors
  same_loss 3
  run ./digits -n 1 --batch 96 --lr 0.2 "${common[@]}" --resume half.safetensors
  same_loss 1
}

# One hash on any number of ranks, and after a checkpoint in the middle; the loss falls.
gpt() {
  local small=(--shards 3 --batch 2 --context 24 --layers 2 --heads 2 --channels 32 --sample 40) ranks pid i
  build gpt
  run ./gpt -n 2 "${small[@]}" --steps 40 --text examples/data/shakespeare.txt --plot loss.svg --csv loss.csv
  grep -a -o 'weights [0-9a-f]*' "$work/out" | sort -u >"$work/hash"
  [ "$(wc -l <"$work/hash")" = 1 ] || fail "not one hash: $(cat "$work/hash")"
  picture loss.svg 2 40 step 'loss (nats per byte)' 'learning rate'
  table loss.csv 40 'step,loss,learning rate'
  expect 1 "^step 40/40  loss $(awk -F, 'END { printf "%.4f", $2 }' loss.csv)  [0-9]+ bytes/s\$" # the same numbers
  awk '/loss/ { sub(/.*loss /, ""); exit !($1 > 1 && $1 < 4) }' "$work/out" || fail "the loss did not fall from 5.5"
  cannot_write ./gpt "${small[@]}" --steps 1
  progress ./gpt 'step 40/40  loss [0-9.]+  [0-9]+ bytes/s  0 s left' "${small[@]}" --steps 40 --sample 0
  for ranks in 1 3; do
    run ./gpt -n $ranks "${small[@]}" --steps 40
    expect $ranks "^rank [0-2] $(cat "$work/hash")\$"
  done
  run ./gpt -n 2 "${small[@]}" --steps 40 --elastic 0
  expect 2 "^rank [01] $(cat "$work/hash")\$"
  run ./gpt -n 3 "${small[@]}" --steps 40 --stop 25 --save half.safetensors
  run ./gpt -n 2 "${small[@]}" --steps 40 --resume half.safetensors --csv resumed.csv
  expect 2 "^rank [01] $(cat "$work/hash")\$"
  sed '2,26d' loss.csv | cmp - resumed.csv || fail "after --resume another table"
  run ./gpt -n 1 "${small[@]}" --steps 1000 --sample 0
  grep -o 'weights [0-9a-f]*' "$work/out" >"$work/hash"
  ./gpt -n 3 "${small[@]}" --steps 1000 --sample 0 --elastic 1 >"$work/out" 2>&1 & # a killed rank is started again
  pid=$!
  for ((i = 0; i < 1500; i++)); do grep -q '^step 50/' "$work/out" && break; sleep 0.02; done
  kill -9 "$(pgrep -P $pid | head -n 1)"
  wait $pid || fail "--elastic 1: exit code $?: $(cat "$work/out")"
  expect 3 "^rank [0-2] $(cat "$work/hash")\$"
  expect 0 'ranks disagree'
}

picture() { # FILE LINES ROWS WORD...: lines of that many points each, axes with numbers, and these words
  local file=$1 lines=$2 rows=$3 word
  shift 3
  [ "$(grep '<polyline' "$file" | awk -F, '{ print NF - 1 }' | sort | uniq -c | xargs)" = "$lines $rows" ] ||
    fail "$file: $(grep '<polyline' "$file"), and not $lines lines of $rows points"
  for word in "$@"; do grep -q ">$word</text>" "$file" || fail "$file lacks the text $word"; done
  [ "$(grep -c '>[0-9.]*</text>' "$file")" -ge 9 ] || fail "$file lacks the numbers of its axes"
  ! grep -i -E '[^a-z](nan|inf)' "$file" || fail "$file has a number that is none"
  [ -z "$(command -v xmllint)" ] || xmllint --noout "$file" || fail "$file is no XML"
}

table() { # FILE ROWS HEADER
  [ "$(head -n 1 "$1")" = "$3" ] || fail "$1 begins with $(head -n 1 "$1")"
  awk -F, -v rows="$2" -v columns="$(echo "$3" | tr -cd , | wc -c)" '
    NR > 1 && ($1 != NR - 1 || NF != columns + 1) { exit 1 } END { if (NR != rows + 1) exit 1 }' "$1" || fail "$1: $(cat "$1")"
}

progress() { # PROGRAM LAST OPTION...: on a terminal a bar, at most 10 times a second, and elsewhere none
  local program=$1 end=$2 began=$SECONDS drawn
  shift 2
  run "$program" "$@"
  expect 0 '\[={2}'
  ! grep -q $'\r' "$work/out" || fail "$program: a bar in a file"
  command -v script >/dev/null || { echo "no command script: the bar on a terminal is not tested"; return; }
  script -q -e -c "$program $*" /dev/null </dev/null >"$work/terminal" || fail "$program on a terminal: $(cat "$work/terminal")"
  drawn=$(tr '\r' '\n' <"$work/terminal" | grep -c '^\[')
  [ "$drawn" -ge 1 ] && [ "$drawn" -le $((10 * (SECONDS - began + 2))) ] || fail "$program: drawn $drawn times"
  tr '\r' '\n' <"$work/terminal" | grep -a '^\[' | tail -n 1 | grep -q -E "^\[={20}\] $end *\$" ||
    fail "$program: $(tr '\r' '\n' <"$work/terminal")"
}

cannot_write() { # COMMAND...: a path that cannot be written is an error before any training
  local option
  for option in --plot --csv; do
    timeout 60 "$@" $option no/such/folder.svg >"$work/out" 2>&1 && fail "$* $option: writes to a folder that does not exist"
    grep -q '^no/such/folder.svg: No such file or directory' "$work/out" && ! grep -q -E 'epoch +1|step 1' "$work/out" ||
      fail "$* $option no/such/folder.svg: $(cat "$work/out")"
  done
}

same_loss() { # RANKS: the losses in out are those of the same epochs in whole
  sed -n 's/^epoch *\([0-9]*\).*loss/\1/p' "$work/out" >"$work/part"
  [ "$(wc -l <"$work/part")" -ge 1 ] || fail "no epoch was left after the kill"
  awk -v ranks="$1" 'NR == FNR { loss[$1] = $2; next }
    { d = $2 - loss[$1]; if (d > 0.002 || d < -0.002) { print "epoch " $1 " on " ranks " ranks: loss " $2 ", not " loss[$1]; bad = 1 } }
    END { exit bad }' "$work/whole" "$work/part" || fail "the loss differs after resumption on another number of ranks"
}

cddptrace() {
  build cddptrace
  cat >victim.c <<'END'
#define CDDP_IMPLEMENTATION
#include "cddp.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int train(int rank, void *arg) {
  cddp_group *g;
  float x = 1, w[4] = {0};
  const char *mode = getenv("MODE") ? getenv("MODE") : "";
  cddp_group *other;
  cddp_param p = {"w", w, NULL, 4, CDDP_F32};
  cddp_ddp *d;
  (void)arg;
  if (cddp_init(&g, NULL) || cddp_group_split(g, 0, rank, &other) || cddp_barrier(other)) return 1;
  if (!strcmp(mode, "model") && cddp_ddp_create(&d, g, &p, 1, NULL)) return 1;
  for (int i = 1; i <= 9; i++) {
    bool now = rank == 1 && i == 6;
    if (now && (getenv("LEAVES") || !strcmp(mode, "model"))) break;
    if (now && !strcmp(mode, "mismatch"))
      return cddp_all_reduce(other, &x, 1, CDDP_F32, CDDP_SUM, NULL) == CDDP_MISMATCH;
    while (now && !strcmp(mode, "hang")) pause();
    if (now) raise(SIGKILL);
    if (cddp_all_reduce(g, &x, 1, CDDP_F32, CDDP_SUM, NULL)) break;
  }
  cddp_destroy(g);
  return !strcmp(mode, "hang");
}
int main(void) { return cddp_spawn(train, NULL, 3) == CDDP_PEER_LOST || getenv("LEAVES") || getenv("MODE") ? 0 : 1; }
END
  # shellcheck disable=SC2086
  cc victim.c $compiled -o victim -lpthread -lm && mkdir rings || exit 1
  CDDP_RECORD=$PWD/rings run ./victim
  head -c 50000 /dev/urandom >rings/cddp-noise.rec
  run ./cddptrace -o trace.json rings/cddp-*.rec
  expect 1 "^MISSING: rank 1 was killed, or exited without leaving the group, before all_reduce\(1\), call 8 of group 0000, where 2 ranks waited for it\$"
  expect 1 '^MISSING: '
  expect 1 '^rank 1 \(pid [0-9]+ on .*\): all_reduce\(1\), call 7 of group 0000, ended well '
  expect 3 '^late: rank [0-2] began its calls '
  expect 1 'cddp-noise.rec is no flight recorder.s file$'
  grep -c '"name":"all_reduce"' trace.json >"$work/spans"
  [ "$(cat "$work/spans")" = 17 ] || fail "$(cat "$work/spans") calls in the trace, 17 expected"
  mkdir left && CDDP_RECORD=$PWD/left LEAVES=1 run ./victim
  run ./cddptrace left
  expect 1 "^MISSING: rank 1 left before all_reduce\(1\), call 8 of group 0000, where 2 ranks waited for it\$"
  expect 1 '^MISSING: '
  # A model that lives longer than the group; ranks that wait for each other; a rank that hangs, and a time-out.
  CDDP_RECORD=$PWD/model MODE=model run ./victim
  run ./cddptrace model
  expect 1 "^MISSING: rank 1 left before all_reduce\(1\), call [0-9]+ of group 0000, where 2 ranks waited for it\$"
  CDDP_RECORD=$PWD/mismatch MODE=mismatch run ./victim
  run ./cddptrace mismatch
  expect 1 '^MISSING: rank 1 was in all_reduce\(1\), call 2 of group .*, which ended CDDP_MISMATCH, and did not begin all_reduce\(1\), call 8 of group 0000, where 2 ranks waited for it$'
  expect 2 '^MISSING: rank [02] was in all_reduce\(1\), call 8 of group 0000, which ended CDDP_MISMATCH, and did not begin all_reduce\(1\), call 2 of group .*, where 1 rank waited for it$'
  expect 3 '^MISSING: '
  hangs
  head -c 3000 left/cddp-*-0.rec >mismatch/cut.rec
  run ./cddptrace mismatch
  expect 1 'mismatch/cut.rec is incomplete$'
  mkdir nothing
  ./cddptrace nothing >"$work/out" 2>&1 && fail "no file, and no error"
  expect 1 '^nothing has no file \*\.rec$'
  command -v python3 >/dev/null || return 0
  python3 -c 'import json, sys; json.load(open(sys.argv[1]))' trace.json || fail "trace.json is not JSON"
}

hangs() { # a job that hangs is looked at while it does, and after its time-out
  local pid i least
  CDDP_TIMEOUT_S=3 CDDP_RECORD=$PWD/hang MODE=hang ./victim >victim.out 2>&1 &
  pid=$!
  for ((i = 0; i < 200; i++)); do
    sleep 0.05
    [ "$(ls hang 2>/dev/null | wc -l)" = 3 ] && run ./cddptrace hang >/dev/null && grep -q 'call 8 .* in it' "$work/out" && break
  done
  sleep 1
  run ./cddptrace -o hang.json hang
  expect 1 '^MISSING: rank 1 has not begun all_reduce\(1\), call 8 of group 0000, where 2 ranks waited for it$'
  expect 1 '^MISSING: '
  expect 2 '^rank [02] .* all_reduce\(1\), call 8 of group 0000, in it for [0-9.]* ms until now$'
  least=$(sed -n 's/^rank [02] .* in it for \([0-9]*\)\..*/\1/p' "$work/out" | sort -n | head -n 1)
  [ "$least" -ge 900 ] && [ "$least" -lt 60000 ] || fail "in it for $least ms, not 1000 or more"
  [ "$(grep -o '"dur":[0-9]*' hang.json | cut -d: -f2 | awk '$1 > 900000' | wc -l)" = 2 ] || fail "no span of a second"
  wait $pid || fail "victim: $(cat victim.out)"
  run ./cddptrace hang
  expect 1 '^MISSING: rank 1 did not reach all_reduce\(1\), call 8 of group 0000, where 2 ranks waited for it until the time-out$'
  expect 0 'until now'
}

elastic() { # ranks are killed while it trains, by cddprun's processes and alone; the hash stays
  local want pid victim round i
  build elastic
  (work=$work/run; mkdir "$work"; build cddprun) || exit 1
  run ./elastic -n 1 --steps 400
  want=$(sed -n 's/^rank 0: weights //p' "$work/out")
  [ ${#want} = 16 ] || fail "no hash"
  for round in cddprun alone; do
    if [ $round = alone ]; then ./elastic -n 3 --steps 400 >"$work/out" 2>&1 &
    else run/cddprun -n 3 --elastic --max-restarts 9 ./elastic --steps 400 >"$work/out" 2>&1 & fi
    pid=$!
    for victim in 1 0; do
      for ((i = 0; i < 300; i++)); do grep -q "rank $victim is process" "$work/out" && break; sleep 0.02; done
      kill -9 "$(sed -n "s/.*rank $victim is process \([0-9]*\),.*/\1/p" "$work/out" | tail -n 1)"
      sleep 0.2
    done
    wait $pid || fail "$round: exit code $?: $(cat "$work/out")"
    cat "$work/out"
    [ $round = alone ] || expect 2 'killed by signal 9 .*; it joins again: restart [12] of 9'
    [ "$(grep -c 'rank . is process' "$work/out")" -ge 4 ] || fail "no rank has come again"
    [ "$(sed -n 's/.*rank .: weights //p' "$work/out" | sort -u)" = "$want" ] || fail "a death has changed the weights"
  done
}

cddprun() { # also: options in torchrun's two spellings, exit codes, --help
  build cddprun
  (work=$work/toy; mkdir "$work"; build toy) || exit 1
  run ./cddprun -n 3 toy/toy
  for r in 0 1 2; do expect 1 "^\[$r\] Loss on rank $r: [0-9]+\.[0-9]+\$"; done
  run ./cddprun --nproc_per_node=2 --standalone --log-dir logs -- toy/toy
  expect 1 '^\[1\] Loss on rank 1: '
  [ "$(grep -c '^Loss on rank 1: ' logs/rank1.log)" = 1 ] || fail "logs/rank1.log: $(cat logs/rank1.log)"
  run ./cddprun --help
  expect 1 '^usage: cddprun '
  # shellcheck disable=SC2016
  ./cddprun -n 2 sh -c '[ $RANK = 0 ] || exit 9; exec sleep 20' >out 2>&1
  [ $? = 9 ] && grep -q '^cddprun: rank 1 (pid [0-9]*) exited with code 9$' out || fail "code 9: $(cat out)"
  ./cddprun -n 0 true >out 2>&1
  [ $? = 2 ] && grep -q 'must be a whole number from 1' out || fail "-n 0: $(cat out)"
  ./cddprun --nodes 2 true >out 2>&1
  [ $? = 2 ] && grep -q '^cddprun: no such option: --nodes$' out || fail "a wrong option: $(cat out)"
}

# Those for GPUs, on the test double of CUDA and NCCL (tests/gpu/hostcuda), where ninja has built them.
gpu() {
  local ranks r
  cd build/plain && [ -x toy.cu ] && [ -x digits.cu ] || {
    echo "SKIP: not built: ninja on_double; $(cat missing 2>/dev/null)"
    exit 77
  }
  for r in toy linear collectives data_parallel digits gpt; do lists_options "./$r.cu" "$top/examples/$r.cu"; done
  run ./toy.cu -n 2 # its thousands of small steps take their time on the double
  for r in 0 1; do expect 1 "^Loss on rank $r: [0-9]+\.[0-9]+\$"; done
  cp "$work/out" "$work/toy2"
  for ranks in 1 2 4; do
    run ./linear.cu -n $ranks
    expect 1 '^Hash [0-9a-f]{16}, and the same on all ranks$'
    run ./collectives.cu -n $ranks
    expect $ranks "^broadcast, rank [0-3]: $ranks $((10 * ranks))\$"
    expect $ranks "^all_reduce, sum, rank [0-3]: $((ranks * (ranks + 1) / 2)) $((5 * ranks * (ranks + 1)))\$"
  done
  export HOSTCUDA_CONTEXTS
  for r in '--backend cpu' '--device cpu'; do # the same numbers through the host, and without a GPU
    HOSTCUDA_CONTEXTS=1
    [ "$r" = '--backend cpu' ] || HOSTCUDA_CONTEXTS=0 # a machine's GPUs are left alone
    # shellcheck disable=SC2086
    run ./toy.cu -n 2 $r
    [ "$(grep ^Loss "$work/out" | sort)" = "$(grep ^Loss "$work/toy2" | sort)" ] || fail "other losses with $r"
  done
  run ./linear.cu -n 2 --device cpu
  cd "$top" || exit 1
  HOSTCUDA_CONTEXTS=1
  run build/plain/digits.cu -n 2 --hidden 32 --epochs 1
  cp "$work/out" "$work/digits"
  HOSTCUDA_CONTEXTS=0
  run build/plain/digits.cu -n 2 --hidden 32 --epochs 1 --device cpu
  HOSTCUDA_CONTEXTS=1
  grep ^epoch "$work/out" | cmp - <(grep ^epoch "$work/digits") || fail "another loss without a GPU"
  run build/plain/digits.cu -n 4 --hidden 64 --epochs 8 --device cpu
  grep -E '^test accuracy: (8[5-9]|9)' "$work/out" || fail "an accuracy of 85 % expected"
  [ "$(grep -o -E '[0-9a-f]{16}$' "$work/out" | uniq -c | awk '{ print $1 }')" = 4 ] || fail "weights differ"
  gpt_gpu
  run build/plain/data_parallel.cu -n 4 --output 1 --epochs 2 --images 64 # compares the losses itself
  expect 2 '^ +[0-9]+( +[0-9]\.[0-9]{5}){4}$'
  HOSTCUDA_DEVICES=2 build/plain/data_parallel.cu -n 4 --epochs 1 --images 64 >"$work/out" 2>&1 && fail "4 threads on 2 GPUs"
  expect 4 '^rank [0-3]: cddp_set_device: .*rank [23] needs cuda:[23], but the GPUs visible here are 2,'
  for r in 'check 2' 'sharded 1' 'sharded 2' 'sharded 3' 'lost 2' 'lost0 2' 'lostfree 2' 'contexts 2'; do # of tests/gpu/gpu.sh
    # shellcheck disable=SC2086
    run build/plain/gpu.cu $r
    expect 1 '^ok: '
  done
  HOSTCUDA_DEVICES=0 no_gpu build/plain/toy.cu
  HOSTCUDA_DEVICES=2 build/plain/toy.cu -n 3 >"$work/out" 2>&1 && fail "3 ranks on 2 GPUs: $(cat "$work/out")"
  expect 3 ', but the GPUs visible here are 2, from cuda:0 on: start at most 2 ranks here'
}

# gpt.cu's loss is gpt.c's, and falls; gpt.c goes on with its checkpoint: it has the same weights.
gpt_gpu() {
  local small=(-n 2 --batch 2 --context 8 --layers 2 --heads 2 --channels 16 --lr 4e-2 --steps 12) loss there
  (work=$work/gpt; mkdir "$work"; build gpt >/dev/null) || fail "gpt.c does not compile"
  HOSTCUDA_DELAY_US=0 run build/plain/gpt.cu "${small[@]}" --save "$work/gpt/model"
  loss=$(sed -n 's,^step 12/12  loss ,,p' "$work/out")
  grep -o 'weights [0-9a-f]*$' "$work/out" | sort -u >"$work/hash"
  [ "$(wc -l <"$work/hash")" = 1 ] || fail "not one hash of the weights: $(cat "$work/hash")"
  run "$work/gpt/gpt" "${small[@]}" --sample 1
  there=$(sed -n 's,.*step 12/12  loss \([0-9.]*\) .*,\1,p' "$work/out")
  awk -v a="$loss" -v b="$there" 'BEGIN { d = a - b; exit !(a > 1 && a < 4 && d < 0.0005 && d > -0.0005) }' ||
    fail "a loss of ${loss:-none}, and of ${there:-none} by gpt.c: both are to be the same, below 4"
  run "$work/gpt/gpt" "${small[@]}" --sample 1 --resume "$work/gpt/model"
  expect 2 "^rank [01] $(cat "$work/hash")\$"
}

# Two ranks share a GPU, one of them is killed and joins again: the weights of a run that nobody disturbs. Its GPU is free
# again when the process has ended.
gpu_elastic() {
  local small=(--batch 1 --context 2 --layers 1 --heads 1 --channels 4 --steps 60 --shards 2) pid i
  cd "$top" && [ -x build/plain/gpt.cu ] || {
    echo "SKIP: not built: ninja on_double"
    exit 77
  }
  export HOSTCUDA_DELAY_US=0 HOSTCUDA_DEVICES=1 HOSTNCCL_VERSION=23000 NCCL_MULTI_RANK_GPU_ENABLE=1
  build/plain/gpt.cu "${small[@]}" >"$work/out" 2>&1 || fail "one rank: $(cat "$work/out")"
  grep -o 'weights [0-9a-f]*$' "$work/out" >"$work/hash"
  build/plain/gpt.cu -n 2 "${small[@]}" --elastic 1 >"$work/out" 2>&1 &
  pid=$!
  for ((i = 0; i < 5000; i++)); do grep -q '^step 50/' "$work/out" && break; sleep 0.02; done
  kill -9 "$(pgrep -P $pid | tail -n 1)"
  wait $pid || fail "--elastic 1: exit code $?: $(cat "$work/out")"
  cat "$work/out"
  expect 2 "^rank [01] $(cat "$work/hash")\$"
}

no_gpu() { # COMMAND...: says in one line that there is none, and exits with 1
  "$@" >"$work/out" 2>&1
  local code=$?
  cat "$work/out"
  [ $code = 1 ] && [ "$(wc -l <"$work/out")" = 1 ] || fail "$*: exit code $code"
  expect 1 '^rank 0: cddp_init: CUDA finds no GPU here'
}

case ${1:-} in
sizes | toy | linear | collectives | embedding | local_sgd | powersgd | sync_batchnorm | mesh | data_parallel | model_parallel | digits | gpt | elastic | cddptrace | cddprun | gpu | gpu_elastic) "$1" ;;
*) fail "usage: $0 NAME" ;;
esac
