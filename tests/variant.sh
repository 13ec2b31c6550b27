#!/bin/sh
# Makes DIR/cc and DIR/c++, the compilers of one variant of the tests: CC and CXX with the flags. One that cannot
# make an empty program that runs, for want of a compiler or of a sanitizer's library, does nothing instead, and
# DIR/missing says why: tests/run.sh then skips what it should have built.
#
#   tests/variant.sh DIR CC CXX [FLAG...]
dir=$1 cc=$2 cxx=$3
shift 3
mkdir -p "$dir" && rm -f "$dir/missing" || exit 1
# Random addresses of 32 bits are too many for some sanitizers, now and then: five times is enough to see it.
fixed=
setarch -R true 2>/dev/null && fixed='setarch -R'

works() { # COMPILER FLAG...
  echo 'int main(void) { return 0; }' >"$dir/empty.c"
  # shellcheck disable=SC2068
  $@ "$dir/empty.c" -o "$dir/empty" || return 1
  for i in 1 2 3 4 5; do $fixed "$dir/empty" || return 1; done
}

compiler() { # NAME COMPILER FLAG...
  name=$1
  shift
  if works "$@" >"$dir/log" 2>&1; then
    printf '#!/bin/sh\nexec %s "$@"\n' "$*"
  else
    echo "$2 $3: $(grep -m 1 . "$dir/log" || echo "an empty program with it fails")" >>"$dir/missing"
    printf '#!/bin/sh\n'
  fi >"$dir/$name"
  chmod +x "$dir/$name"
}

compiler cc "$cc" "$@"
compiler c++ "$cxx" "$@"
