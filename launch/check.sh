#!/usr/bin/env bash
# Checks the hosts of a hostfile before a run: ssh, equal commit, source and versions, GPUs there and free, clocks, the
# shared folder; then the speed of each GPU, of its links and of an all-reduce of all. Reports errors and what
# is below 0.8 of the median. Two hosts with a slot each have one link, which is its own median: look at its GB/s.
#   command   bash launch/check.sh HOSTFILE [SHARED_FOLDER]      (INTERFACE=eth0, LAUNCHER=... as launch/hostfile.sh)
#   hardware  as the run
#   time      half a minute, and a second per host for the links
# Exit code 0: no error; 1: errors; 2: the hostfile cannot be read.
set -uo pipefail
[ $# -ge 1 ] || { echo "usage: bash launch/check.sh HOSTFILE [SHARED_FOLDER]" >&2; exit 2; }
hosts=$1
hosts=$(realpath "$hosts") shared=$(realpath "${2:-.}")
cd "$(dirname "$0")/.."
python -m infcl.cluster.check "$hosts" "$shared" || exit
figures=$(HOSTS=$hosts SCRIPT="--module infcl.cluster.links" bash launch/hostfile.sh) || { echo "$figures"; exit 1; }
measured=$(grep -oE '(all-reduce over|least |slow ).*' <<<"$figures")
slots=$(awk '{sub(/#.*/, "")} match($0, /slots=[0-9]+/) {n += substr($0, RSTART + 6)} END {print n}' "$hosts")
if ! grep -q "^all-reduce over $slots ranks: " <<<"$measured"; then  # whatever the launcher's exit code
  printf '%s\n' "$figures" "nothing was measured over the $slots ranks of the hosts"; exit 1
fi
echo "$measured"
! grep -q '^slow ' <<<"$measured"
