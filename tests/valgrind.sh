#!/bin/bash
# Runs a test under valgrind: tests/valgrind.sh groups
set -u
cd "$(dirname "$0")/.." || exit 1
command -v valgrind >/dev/null || { echo "SKIP: valgrind is not installed"; exit 77; }
exec valgrind -q --error-exitcode=9 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
  --track-fds=no --child-silent-after-fork=no "build/plain/$1"
