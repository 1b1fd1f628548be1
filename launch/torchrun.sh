#!/usr/bin/env bash
# Trains under torchrun: on one host, or started on each of several (by a scheduler, or by hand).
#   command   bash launch/torchrun.sh --train-data '/data/{00000..00331}.tar' --tokenizer spm.model --model ViT-B-16 ...
#             on each of 4 hosts: NODES=4 NODE_RANK=0..3 MASTER_ADDR=10.0.0.1 bash launch/torchrun.sh ...
#   hardware  one rank per visible GPU, one without a GPU (RANKS=2 for two)
#   time      as long as the training
# It ends with the code of the rank that failed first, as launch/supervise.sh needs it; torchrun alone ends with 1. SIGTERM,
# SIGINT, SIGHUP and SIGUSR1 are passed to the ranks, which have five minutes to save and end.
# INTERFACE=ib0 is the network interface of NCCL and gloo; MASTER_ADDR has to be an address of it.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v torchrun > /dev/null || {
  echo "launch: there is no torchrun command on PATH: activate the environment (source .venv/bin/activate)" >&2
  exit 2
}
NODES=${NODES:-1}
if [ "$NODES" -eq 1 ]; then
  where=(--standalone)
else
  [ -n "${NODE_RANK:-}" ] && [ -n "${MASTER_ADDR:-}" ] || {
    echo "launch/torchrun.sh: NODES=$NODES needs NODE_RANK (0 to $((NODES - 1)), another one on each node) and MASTER_ADDR (address of node 0)" >&2
    exit 2
  }
  where=(--nnodes "$NODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
[ -z "${INTERFACE:-}" ] || export NCCL_SOCKET_IFNAME="=$INTERFACE" GLOO_SOCKET_IFNAME=$INTERFACE
# without "--", torchrun takes --logs for an abbreviation of its own flags
exec python -m infcl.cluster.torchrun "${where[@]}" ${RANKS:+--nproc-per-node "$RANKS"} -- pretrain_clip.py \
  --deepspeed_config "${PRESET:-ds_configs/zero1.json}" "$@"
