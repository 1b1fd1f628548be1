#!/usr/bin/env bash
# Trains on all GPUs of this host.
#   command   bash launch/local.sh --train-data '/data/{00000..00331}.tar' --tokenizer spm.model --model ViT-B-16 ...
#   hardware  one host, one rank per visible GPU
#   time      as long as the training
set -euo pipefail
cd "$(dirname "$0")/.."
command -v deepspeed > /dev/null || {
  echo "launch/local.sh: there is no deepspeed command on PATH: activate the environment (source .venv/bin/activate)" >&2
  exit 2
}
exec deepspeed -q pretrain_clip.py --deepspeed_config "${PRESET:-ds_configs/zero1.json}" "$@"
