#!/usr/bin/env bash
# Looks at the hosts of a hostfile before a run: ssh, equal commit, source and versions, GPUs there and free, clocks, the
# shared folder; then the speed of each GPU and link. Names what is wrong and whatever is below 0.8 of the median.
#   command   bash launch/check.sh HOSTFILE [SHARED_FOLDER]      (INTERFACE=eth0, LAUNCHER=... as launch/hostfile.sh)
#   hardware  as the run
#   time      half a minute, and a second per host for the links
# Exit code 0: all is right; 1: it is not; 2: the hostfile cannot be read.
set -uo pipefail
hosts=${1:?usage: bash launch/check.sh HOSTFILE [SHARED_FOLDER]}
hosts=$(realpath "$hosts") shared=$(realpath "${2:-.}")
cd "$(dirname "$0")/.."
python -m infcl.cluster.check "$hosts" "$shared" || exit
figures=$(HOSTS=$hosts SCRIPT="--module infcl.cluster.links" bash launch/hostfile.sh) || { echo "$figures"; exit 1; }
figures=$(echo "$figures" | grep -oE '(all-reduce over|slow ).*')
echo "$figures"
! grep -q '^slow ' <<<"$figures"
