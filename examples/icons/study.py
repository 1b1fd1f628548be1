"""Batch-size study on the icons: run a plan of trainings, --per-gpu at a time, and score each on the held-out sets.

    python examples/icons/study.py examples/icons/plans/tune.json --data .data/icons --gpus 8 --minutes 9 --out results

A plan is a JSON list of settings; a list as a value stands for one run per entry. Keys: batch, lr ("best": that of
the best finished run with "tune" at this batch and loss), warmup (share of the steps), samples or steps, treatment
(negative, mask or positive: other samples with the same caption), loss, seed, start ({...}: settings of a run whose
weights this one starts from), teacher (likewise, of a run to distil), flags (text: further flags of pretrain_clip.py),
model, train (files of DATA/train), micro.

Each run is `pretrain_clip.py` itself. Rows of finished runs are appended to LOGS/rows.csv and skipped the next time;
a run that --minutes cuts off saves a checkpoint and is resumed the next time.

    OUT/rows.csv       a row per run: settings, loss, scores, speed
    OUT/curves.tar.xz  RUN.csv: step, samples, loss, gradient norm
    OUT/best.tar       the export of the best run in half precision (--best PATTERN: among the runs of that name)
"""

import argparse
import csv
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULTS = {
    "samples": 16 * 262144, "warmup": 0.1, "treatment": "negative", "loss": "inf_cl", "seed": 0, "model": "ViT-Ti-8",
    "train": "", "micro": 4096, "start": None, "teacher": None, "flags": "", "tune": False,
}  # fmt: skip
SCORES = ("image_to_text_r1", "image_to_text_r5", "text_to_image_r1", "text_to_image_r5")
POINTS = 200  # of a curve


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", type=Path, help="JSON files; their runs are started in this order")
    parser.add_argument("--data", type=Path, default=Path(".data/icons"), help="folder of build.py")
    parser.add_argument("--logs", type=Path, default=Path("runs/icons"), help="folder of the runs")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--rows", nargs="*", type=Path, default=[], help="rows of runs that were done elsewhere")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="0: one run at a time on the CPU")
    parser.add_argument("--per-gpu", type=int, default=1, help="runs that share a GPU: small ones leave it idle")
    parser.add_argument("--workers", type=int, help="loader processes of a run [cores / runs at a time - 2]")
    parser.add_argument("--minutes", type=float, default=1e6, help="save and stop what runs after this time")
    parser.add_argument("--best", default="*", help="which runs may be exported as the best one")
    parser.add_argument("--commit", help="commit of the trainer [that of the checkout]")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of pretrain_clip.py; last")
    args = parser.parse_args(arguments)
    study = Study(args)
    study.run(list(itertools.chain.from_iterable(map(read_plan, args.plans))))
    sys.exit(1 if study.failed else 0)


def read_plan(path: Path) -> list[dict]:
    """Return the runs of a plan: the products of all lists."""
    runs = []
    for entry in json.loads(path.read_text()):
        values = [value if isinstance(value, list) else [value] for value in entry.values()]
        runs += [DEFAULTS | dict(zip(entry, combination)) for combination in itertools.product(*values)]
    return runs


def name_of(run: dict) -> str:
    """Return the name of a run, which its settings determine."""
    steps = run["steps"] if "steps" in run else -(-run["samples"] // run["batch"])
    parts = [f"b{run['batch']}", f"n{steps}", f"lr{run['lr']:g}", f"w{run['warmup']:g}", run["treatment"], run["loss"]]
    parts += [run["model"]] if run["model"] != DEFAULTS["model"] else []
    parts += [run["train"].partition("-")[0]] if run["train"] else []
    parts += [f"from{run['start']['batch']}"] if run["start"] else []
    parts += [f"taught{run['teacher']['batch']}"] if run["teacher"] else []
    parts += [re.sub(r"[^\w.]+", "-", run["flags"]).strip("-")] if run["flags"] else []
    return "-".join([*parts, f"s{run['seed']}"])


class Study:
    """The queue of runs, the GPUs that take from it, and the rows of the finished runs."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.deadline = args, time.monotonic() + 60 * args.minutes
        self.slots = max(1, args.gpus * args.per_gpu)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.devices = visible.split(",") if visible else list(map(str, range(args.gpus)))
        if args.gpus > len(self.devices):
            raise ValueError(f"--gpus {args.gpus}, but CUDA_VISIBLE_DEVICES is {visible}")
        self.workers = max(1, (os.cpu_count() or 1) // self.slots - 2) if args.workers is None else args.workers
        self.rows_file = args.logs / "rows.csv"
        self.changed = threading.Condition()
        self.rows: dict[str, dict] = {}
        for path in [*args.rows, self.rows_file]:
            if path.is_file():
                with open(path, newline="") as file:
                    self.rows |= {row["name"]: row for row in csv.DictReader(file)}
        self.busy: dict[str, dict] = {}  # name -> run
        self.pending: list[dict] = []
        self.failed: dict[str, str] = {}  # name -> why
        self.held_out = HeldOut(args.data)
        self.commit = args.commit or _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])

    def run(self, runs: list[dict]) -> None:
        self.args.logs.mkdir(parents=True, exist_ok=True)
        self.pending = runs
        threads = [threading.Thread(target=self._work, args=(slot,)) for slot in range(self.slots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"{len(self.rows)} rows, {len(self.pending)} runs left, {len(self.failed)} failed", flush=True)
        if self.args.out:
            self._publish()

    def _work(self, slot: int) -> None:
        while (taken := self._take()) is not None:
            run, name = taken
            try:
                finished = self._train(run, name, slot)
                if finished:
                    self._record(run, name, slot)
            except (RuntimeError, OSError, ValueError) as error:  # other runs continue; it is listed at the end
                self.failed[name] = f"{type(error).__name__}: {error}"
                print(f"slot {slot} failed {name}: {self.failed[name]}", flush=True)
            finally:
                with self.changed:
                    self.busy.pop(name)
                    self.changed.notify_all()

    def _take(self) -> tuple[dict, str] | None:
        """Return the next run that can start and its name; wait for runs that it depends on. None: nothing is left."""
        with self.changed:
            while self.pending and time.monotonic() < self.deadline - 45:
                before = len(self.pending)
                for run in list(self.pending):
                    ready = self._resolve(run)
                    if ready is None:
                        continue
                    name = name_of(ready)
                    if name not in self.busy:
                        self.pending.remove(run)
                        if name not in self.rows:
                            self.busy[name] = ready
                            return ready, name
                        for key in ("start", "teacher"):  # only their batches are in the name
                            wanted, there = (ready[key] or {"name": ""})["name"], self.rows[name].get(key) or ""
                            if wanted != there:
                                self.failed[name] = f"{key} is {wanted or 'none'}, the run of this name had {there}"
                                print(f"left out {name}: {self.failed[name]}", flush=True)
                if not self.busy and len(self.pending) == before:
                    return None  # what is left depends on runs that failed
                self.changed.wait(timeout=1.0)
        return None

    def _resolve(self, run: dict) -> dict | None:
        """Replace "best" by a number and name the run of `start`. None: a run that it needs is not finished."""
        if run["lr"] == "best":
            coming = [other for other in [*self.pending, *self.busy.values()] if _tunes(other, run)]
            known = [row for row in self.rows.values() if _tunes(row, run)]
            if coming or not known:
                return None
            best = max(known, key=lambda row: float(row["score"]))
            run = run | {"lr": float(best["lr"]), "warmup": float(best["warmup"])}
        for key in ("start", "teacher"):
            if run[key]:
                first = self._resolve(DEFAULTS | {"seed": run["seed"]} | run[key])
                if first is None:
                    return None
                name = name_of(first)
                if not (self.args.logs / name / "summary.json").is_file():  # its row may be of another machine
                    if name not in self.busy and name not in self.failed and first not in self.pending:
                        self.rows.pop(name, None)
                        self.pending.insert(0, first)
                    return None
                run = run | {key: first | {"name": name}}
        return run

    def _train(self, run: dict, name: str, slot: int) -> bool:
        """Train one run. Return whether it is finished; False if the time is up."""
        batch, data = run["batch"], self.args.data
        micro = min(run["micro"], batch)
        steps = run["steps"] if "steps" in run else -(-run["samples"] // batch)
        command = [sys.executable, str(ROOT / "pretrain_clip.py"), "--config", str(HERE / "settings.json")]
        command += ["--train-data", str(data / "train" / run["train"]), "--tokenizer", str(data / "tokenizer.model")]
        model = HERE / f"{run['model']}.json"
        command += ["--model", model if model.is_file() else run["model"]]
        command += ["--batch-size", micro, "--accum-freq", batch // micro]
        command += ["--steps", steps, "--warmup", max(1, round(run["warmup"] * steps)), "--lr", run["lr"]]
        command += ["--loss", run["loss"], "--seed", run["seed"], "--workers", self.workers]
        command += ["--duplicates", f"{run['treatment']}:caption"]
        command += ["--logs", str(self.args.logs), "--name", name, "--resume", "latest"]
        command += ["--device", "cuda" if self.args.gpus else "cpu", "--log-every-n-steps", max(1, steps // 20)]
        command += ["--pretrained", str(self.args.logs / run["start"]["name"])] if run["start"] else []
        command += ["--distill-model", str(self.args.logs / run["teacher"]["name"])] if run["teacher"] else []
        command += shlex.split(run["flags"])
        environment = {"OMP_NUM_THREADS": "2"} | os.environ
        environment |= {"CUDA_VISIBLE_DEVICES": self.devices[slot % self.args.gpus] if self.args.gpus else ""}
        started = time.monotonic()
        print(f"slot {slot} starts {name}", flush=True)
        with open(self.args.logs / f"{name}.log", "a") as log:
            words = list(map(str, [*command, *self.args.flags]))
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = process.wait(timeout=max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)  # the trainer saves a checkpoint and exits
                try:
                    process.wait(timeout=40)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                print(f"slot {slot} stopped {name} after {time.monotonic() - started:.0f} s", flush=True)
                return False
        if code:
            tail = (self.args.logs / f"{name}.log").read_text().splitlines()[-3:]
            raise RuntimeError(f"exit code {code}: {' / '.join(tail)}")
        return True

    def _record(self, run: dict, name: str, slot: int) -> None:
        """Score a finished run and write its row."""
        folder = self.args.logs / name
        records = [r for r in _records(folder / "metrics.jsonl") if r["kind"] == "train"]
        summary = json.loads((folder / "summary.json").read_text())
        scores = self.held_out.scores(folder, f"cuda:{slot % self.args.gpus}" if self.args.gpus else "cpu")
        tail, chance = records[-max(1, len(records) // 20) :], math.log(run["batch"])
        warm = records[min(3, len(records) - 1) :]
        loss = statistics.mean(r["loss"] for r in tail if "loss" in r)
        row = {"name": name, **{key: run.get(key) for key in ("batch", "lr", "warmup", "treatment", "loss", "seed")}}
        row |= {key: run[key]["name"] if run[key] else "" for key in ("start", "teacher")}
        row |= {"tune": run["tune"], "flags": run["flags"], "model": run["model"]}
        row |= {"train": run["train"], "micro": min(run["micro"], run["batch"]), "steps": summary["steps"]}
        row |= {"samples": summary["samples_seen"], "final_loss": round(loss, 5), "ln_batch": round(chance, 5)}
        row |= {"score": scores["score"], **scores}
        row |= {
            "samples_per_second": round(statistics.median(r["samples_per_second"] for r in warm)),
            "data_wait": round(statistics.mean(r["data_wait"] for r in warm), 4),
            "peak_memory_mb": summary["peak_memory_mb"],
            "train_seconds": summary["train_seconds"],
            "per_gpu": self.args.per_gpu,
            "logit_scale": round(records[-1]["logit_scale"], 3),
            "commit": self.commit,
            "device": torch.cuda.get_device_name(0) if self.args.gpus else "cpu",
            "torch": torch.__version__,
        }
        with self.changed:
            self.rows[name] = row
            self._write_rows(self.rows_file)
            if self.args.out:
                self.args.out.mkdir(parents=True, exist_ok=True)
                self._write_rows(self.args.out / "rows.csv")
        print(
            f"slot {slot} finished {name}: loss {loss:.3f} of {chance:.3f}, score {row['score']:.4f}, "
            f"{row['samples_per_second']:,} samples/s, data wait {row['data_wait']:.0%}",
            flush=True,
        )

    def _write_rows(self, path: Path) -> None:
        columns = list(dict.fromkeys(itertools.chain.from_iterable(self.rows.values())))
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows.values())

    def _publish(self) -> None:
        """Write the rows, the curves of all runs that are on this machine, and the best export."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        self._write_rows(self.args.out / "rows.csv")
        with tarfile.open(self.args.out / "curves.tar.xz", "w:xz") as tar:
            for metrics in sorted(self.args.logs.glob("*/metrics.jsonl")):
                _add(tar, f"{metrics.parent.name}.csv", _curve(metrics))
        exported = [name for name in self.rows if fnmatch(name, self.args.best) and (self.args.logs / name).is_dir()]
        if exported:
            best = max(exported, key=lambda name: float(self.rows[name]["score"]))
            with tarfile.open(self.args.out / "best.tar", "w") as tar:
                _add(tar, "model.safetensors", _half(self.args.logs / best / "export"))
                for path in sorted((self.args.logs / best / "export").iterdir()):
                    if path.is_file() and path.suffix != ".safetensors":
                        tar.add(path, path.name)
                _add(tar, "row.json", json.dumps(self.rows[best], indent=1, default=str).encode())
            print(f"best: {best}, score {float(self.rows[best]['score']):.4f}", flush=True)


class HeldOut:
    """The held-out sets in memory, and the scores of a run on them."""

    def __init__(self, data: Path):
        from infcl.data.evaluation import EvalConfig, eval_source

        self.lock = threading.Lock()
        self.sets = {}
        for folder in [data / "val", *sorted((data / "zeroshot").iterdir())]:
            samples = list(eval_source(EvalConfig(data=str(folder / "00000.tar"), image_size=64))())
            seen = torch.tensor([bool(sample.metadata["seen"]) for sample in samples])
            self.sets[folder.name] = torch.stack([s.image for s in samples]), [s.caption for s in samples], seen

    @torch.no_grad()
    def scores(self, run: Path, device: str) -> dict[str, float]:
        """Return recalls over all sets, top-1 by name within each set, and `score`, the mean recall at 1 of both ways.

        Ties count as in infcl.evaluate. "seen" and "new" split the images by whether a training icon has their name.
        """
        from infcl.evaluate.load import load_model
        from infcl.evaluate.retrieval import retrieval_counts

        with self.lock:
            clip, tokenize, _ = load_model(run, device=torch.device(device))
        result: dict[str, float] = {}
        for name, (images, captions, seen) in self.sets.items():
            image = torch.cat([clip(part.to(device), None)["image_features"].float() for part in images.split(1024)])
            tokens = tokenize(captions).to(device)
            text = torch.cat([clip(None, part)["text_features"].float() for part in tokens.split(1024)])
            counts = retrieval_counts(image, text, torch.arange(len(image), device=device))
            recalls = {
                f"{way}_r{k}": ((k - c[:, 0]) / (c[:, 1] + 1)).clamp(0, 1).cpu()
                for way, c in zip(("image_to_text", "text_to_image"), counts)
                for k in (1, 5)
            }
            if name == "val":
                result |= {key: round(float(recalls[key].mean()), 5) for key in SCORES}
                for part, mask in (("seen", seen), ("new", ~seen)):
                    result[f"image_to_text_r1_{part}"] = round(float(recalls["image_to_text_r1"][mask].mean()), 5)
            else:
                result[f"top1_{name}"] = round(float(recalls["image_to_text_r1"].mean()), 5)
        return {"score": round((result[SCORES[0]] + result[SCORES[2]]) / 2, 5), **result}


def _tunes(other: dict, run: dict) -> bool:
    """Return whether a run or row is one of those that the best learning rate of `run` is chosen from."""
    return str(other["tune"]) == "True" and all(str(other[k]) == str(run[k]) for k in ("batch", "loss", "model"))


def _records(path: Path) -> Iterator[dict]:
    with open(path) as file:
        for line in file:
            if line.endswith("}\n"):
                yield json.loads(line)


def _curve(metrics: Path) -> bytes:
    """Return step, samples, loss and gradient norm as CSV, the means of at most POINTS groups of steps."""
    records = [r for r in _records(metrics) if r["kind"] == "train" and "loss" in r]
    width = -(-len(records) // POINTS) or 1
    lines = ["step,samples,loss,grad_norm"]
    for start in range(0, len(records), width):
        group = records[start : start + width]
        norms = [r["grad_norm"] for r in group if "grad_norm" in r] or [math.nan]
        loss = statistics.mean(r["loss"] for r in group)
        lines.append(f"{group[-1]['step']},{group[-1]['samples_seen']},{loss:.5f},{statistics.mean(norms):.4g}")
    return ("\n".join(lines) + "\n").encode()


def _half(export: Path) -> bytes:
    from safetensors.torch import load_file, save

    weights = load_file(next(export.glob("*.safetensors")))
    return save({name: value.half() for name, value in weights.items()})


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
