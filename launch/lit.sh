#!/usr/bin/env bash
# LiT as in the Inf-CL paper's Table 4: a locked ViT-B/16, a text tower of BERT-base's size, AdaFactor, micro-batches of 256.
#   command   IMAGE=ViT-B-16.safetensors bash launch/lit.sh --train-data '/data/{00000..41455}.tar' --tokenizer spm.model \
#                 --global-batch-size 262144 --warmup 534
#   hardware  one host, one rank per visible GPU (the paper: 8 A100); HOSTS=hosts for those of a hostfile
#   time      as long as the training; not measured yet
# IMAGE is open_clip's or CLIPModel's ViT-B-16; --warmup is half an epoch of the data. docs/howto/learning-rates.md has the
# recipe. Its weight decay is 1e-4 times lr, 1e-7 a step at the peak. Flags given after these override them.
set -euo pipefail
[ -n "${IMAGE:-}" ] || { echo "launch/lit.sh: IMAGE is not set: set it to the weights of the locked image tower, such as IMAGE=ViT-B-16.safetensors" >&2; exit 2; }
script=local.sh
[ -z "${HOSTS:-}" ] || script=hostfile.sh  # which quotes what is in brackets for the hosts' shells
exec bash "$(dirname "$0")/$script" \
  --model ViT-B-16-BERT-base --pretrained-image "$(realpath -ms "$IMAGE")" --lock-image --batch-size 256 --epochs 8 \
  --aug-cfg 'scale=(0.08,1.0)' 'ratio=(0.75,1.3333)' \
  --opt adafactor --lr 1e-3 --wd 1e-4 --beta1 0.9 --beta2 0.95 --lr-scheduler cosine --grad-clip-norm 1.0 "$@"
