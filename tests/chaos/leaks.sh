#!/bin/bash
# Many starts in a row, and what they leave behind. tests/chaos/leaks.sh [count]
#
# tests/chaos/leaks.c looks for descriptors and children; this script looks for files: in a mount namespace
# of its own, /tmp and /dev/shm are empty before and have to be empty afterwards. Without the right to
# make one, the listings before and after are compared.
set -u
cd "$(dirname "$0")/../.." || exit 1

listing() { ls -A /dev/shm /tmp | grep cddp | grep -v '^cddp-run\.'; } # other tests run beside this one

count=${1:-200}
test=build/plain/leaks
if unshare -m true 2>/dev/null; then own="unshare -m"
elif unshare -rm true 2>/dev/null; then own="unshare -rm"
else own=; fi
if [ -n "$own" ]; then
  # shellcheck disable=SC2016
  $own sh -c '
    mount -t tmpfs none /tmp && mount -t tmpfs none /dev/shm && mkdir /tmp/own || exit 1
    TMPDIR=/tmp/own "$0" "$1" || exit 1
    left=$(find /tmp /dev/shm -mindepth 1 ! -path /tmp/own)
    [ -z "$left" ] || { echo "files left behind: $left"; exit 1; }' "$test" "$count"
  exit
fi
before=$(listing)
"$test" "$count" || exit 1
after=$(listing)
[ "$before" = "$after" ] && exit 0
echo "the listings of /dev/shm and /tmp differ after the starts:"
diff <(echo "$before") <(echo "$after")
exit 1
