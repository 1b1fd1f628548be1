#!/usr/bin/env bash
# Trains the demo model on the embedded data set through the path that a cluster uses.
#   command   make train            (or: PATH=.venv/bin:$PATH bash launch/demo.sh [flags of pretrain_clip.py])
#   hardware  2 ranks on CPU (gloo) without a GPU, one rank per GPU (NCCL) with
#   time      about 3 minutes on 2 CPU cores
set -euo pipefail
cd "$(dirname "$0")/.."
DATA=${DATA:-.data/demo} LOGS=${LOGS:-runs} PRESET=${PRESET:-zero1} NAME=${NAME:-demo-zero1}
GLOBAL_BATCH=256 STEPS=400

python -m infcl.data.demo --out "$DATA"

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
ranks=$(( gpus > 0 ? gpus : 2 ))
accumulate=2
while (( GLOBAL_BATCH % (ranks * accumulate) )); do ranks=$(( ranks - 1 )); done  # as many as divide the batch
batch=$(( GLOBAL_BATCH / ranks / accumulate ))

RANKS=$ranks exec bash launch/local.sh \
  --train-data "$DATA/train" --val-data "$DATA/val" --zeroshot-data "$DATA/zeroshot" \
  --tokenizer "$DATA/tokenizer.model" --model demo \
  --batch-size "$batch" --accum-freq "$accumulate" --steps "$STEPS" \
  --lr 3e-3 --wd 0.05 --beta2 0.98 --duplicates mask:caption --aug-cfg 'scale=(1.0,1.0)' 'ratio=(1.0,1.0)' \
  --val-frequency 4 --zeroshot-frequency 4 --save-frequency 4 --log-every-n-steps 50 \
  --deepspeed_config "$PRESET" \
  --logs "$LOGS" --name "$NAME" --resume latest "$@"
