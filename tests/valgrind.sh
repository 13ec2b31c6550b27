#!/bin/bash
# A test program under valgrind: reads of uninitialised memory, and memory that is lost at the end.
#
#   tests/valgrind.sh groups      build/plain/groups, which ninja has built
#
# Forked ranks are watched too, but silent: their findings are in their exit codes. Skipped where
# valgrind is not installed.
set -u
cd "$(dirname "$0")/.." || exit 1
command -v valgrind >/dev/null || { echo "SKIP: valgrind is not installed"; exit 77; }
exec valgrind -q --error-exitcode=9 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
  --track-fds=no --child-silent-after-fork=no "build/plain/$1"
