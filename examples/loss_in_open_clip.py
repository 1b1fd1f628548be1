"""open_clip's own trainer with the ring loss, on synthetic data with a tiny model.

    python examples/loss_in_open_clip.py                    one CPU process, ten steps

For a run of your own, with open_clip's flags:

    torchrun --nproc-per-node 8 -m infcl.integrations.open_clip --model ViT-B-32 --batch-size 4096 ...

Needs open_clip_torch and pandas.
"""

import json
import tempfile
from pathlib import Path

import open_clip
from open_clip_train.main import main

from infcl.integrations.open_clip import use_ring_loss

MODEL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
FLAGS = (
    "--model tiny --dataset-type synthetic --train-num-samples 640 --batch-size 64 --epochs 1 --warmup 2 --lr 1e-3 "
    "--workers 0 --device cpu --precision fp32 --local-loss --gather-with-grad --log-every-n-steps 1"
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tiny.json").write_text(json.dumps(MODEL))
        open_clip.add_model_config(f"{folder}/tiny.json")
        use_ring_loss()
        main([*FLAGS.split(), "--logs", folder, "--name", "ring"])
