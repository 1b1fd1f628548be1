#!/usr/bin/env bash
# Trains on all GPUs of this host.
#   command   bash launch/local.sh --train-data '/data/{00000..00331}.tar' --tokenizer spm.model --model ViT-B-16 ...
#   hardware  one host, one rank per visible GPU
#   time      as long as the training
NODES=1 exec bash "$(dirname "$0")/torchrun.sh" "$@"
