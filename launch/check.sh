#!/usr/bin/env bash
# Checks the hosts of a hostfile before a run: ssh, equal commit, source and versions, GPUs there and free, clocks, the
# shared folder. It measures no link: nccl-tests does (docs/howto/multi-node.md).
#   command   bash launch/check.sh HOSTFILE [SHARED_FOLDER]
#   hardware  as the run
#   time      half a minute
# Exit code 0: no error; 1: errors; 2: the hostfile cannot be read.
set -uo pipefail
[ $# -ge 1 ] || { echo "usage: bash launch/check.sh HOSTFILE [SHARED_FOLDER]" >&2; exit 2; }
hosts=$(realpath "$1") shared=$(realpath "${2:-.}")
cd "$(dirname "$0")/.."
exec python -m infcl.cluster.check "$hosts" "$shared"
