#!/usr/bin/env bash
# Trains over the hosts of a hostfile ("worker-1 slots=8", one a line; ssh without a password to each; same paths on all).
#   command   HOSTS=hosts bash launch/hostfile.sh --train-data '/data/{00000..41455}.tar' --tokenizer spm.model ...
#   hardware  any number of hosts with GPUs; pdsh on the launching host
#   time      as long as the training
# Only PYTHON*, NCCL* and what .deepspeed_env lists (KEY=VALUE lines, no blank or comment line) reaches the other hosts.
set -euo pipefail
cd "$(dirname "$0")/.."
HOSTS=${HOSTS:-hosts}
[ -r "$HOSTS" ] || { echo "launch/hostfile.sh: no hostfile '$HOSTS' (set HOSTS=...; lines like 'worker-1 slots=8')" >&2; exit 2; }
exec deepspeed --hostfile "$HOSTS" pretrain_clip.py --deepspeed_config "${PRESET:-ds_configs/zero1.json}" "$@"
