"""A run that begins on two ranks and continues on one, with the same global batch.

    python examples/resume_on_fewer_ranks.py [--folder DIR]

It trains twelve steps on two CPU ranks, continues from the checkpoint of step 6 on one rank, and compares the losses of
steps 7 to 12. The batches hold the same samples, so the losses agree up to the order of FP32 sums.
`--global-batch-size` keeps the batch; `--accum-freq` follows from it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from infcl.data.demo import prepare_demo

ROOT = Path(__file__).resolve().parents[1]
COMMON = (
    "--model demo --global-batch-size 64 --batch-size 32 --steps 12 --warmup 4 --lr 1e-3 --workers 1 --report-to none "
    "--save-every-n-steps 6 --keep-checkpoints 0 --device cpu"
).split()


def train(ranks: int, folder: Path, name: str, *flags: str) -> dict[int, float]:
    """Run pretrain_clip.py on CPU ranks; return {step: loss}."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--"]
    data = ["--train-data", folder / "data" / "train", "--tokenizer", folder / "data" / "tokenizer.model"]
    command = [*launcher, ROOT / "pretrain_clip.py", *COMMON, *data, "--logs", folder, "--name", name, *flags]
    print(f"{name}: {ranks} ranks", *COMMON, *flags, flush=True)
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([str(word) for word in command], check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def main(folder: Path) -> None:
    prepare_demo(folder / "data", num_train=512)
    two = train(2, folder, "two")
    one = train(1, folder, "one", "--resume", str(folder / "two" / "checkpoints" / "step_00000006"))
    print("step  two ranks  then one")
    for step in range(7, 13):
        print(f"{step:4}  {two[step]:9.6f}  {one[step]:8.6f}")
        if abs(one[step] - two[step]) > 2e-5 * abs(two[step]):
            raise RuntimeError(f"the losses of step {step} differ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the runs are written [a temporary folder]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.folder or Path(temporary))
