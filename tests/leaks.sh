#!/bin/bash
# Many starts in a row, and what they leave behind. tests/leaks.sh list; tests/leaks.sh starts [count]
#
# tests/starts.c looks for descriptors and children; this script looks for files: in a mount namespace
# of its own, /tmp and /dev/shm are empty before and have to be empty afterwards. Without the right to
# make one, the listings before and after are compared.
set -u
cd "$(dirname "$0")/.." || exit 1

listing() { ls -A /dev/shm /tmp | grep -v -e '^cddp-run\.' -e '^$'; }

starts() {
  local count=${1:-200} test=build/plain/starts
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
    return
  fi
  before=$(listing)
  "$test" "$count" || return 1
  after=$(listing)
  [ "$before" = "$after" ] && return 0
  echo "the listings of /dev/shm and /tmp differ after the starts:"
  diff <(echo "$before") <(echo "$after")
  return 1
}

case ${1:-} in
list) echo starts ;;
starts) starts "${2:-}" ;;
*) echo "usage: $0 list | starts [count]"; exit 2 ;;
esac
