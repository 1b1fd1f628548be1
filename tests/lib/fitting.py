"""The memory check at the start of a run of ViT-L-14, on GPUs with a given memory."""

import dataclasses

from infcl.config import parse_args, resolve
from infcl.config.precision import PRECISIONS
from infcl.models import load_model_config
from infcl.plan.fit import Fit
from tests.lib.specs import counts_of

SYNTHETIC = ["--dataset-type", "synthetic", "--train-num-samples", "1000000", "--model", "ViT-L-14"]


GIB = 2**30


def fit(*flags: str, gib: float, ranks: int = 8, stage: int = 1) -> Fit:
    cfg = load_model_config("ViT-L-14")
    spec = resolve(parse_args([*SYNTHETIC, *flags]), device="cuda", ranks=ranks)
    return under(Fit(spec, cfg, counts_of(cfg), gib * GIB), preset={"zero_optimization": {"stage": stage}})


def under(question: Fit, **changes) -> Fit:
    """Return the same question for a run with changed fields; a precision by its name."""
    if "precision" in changes:
        changes["precision"] = PRECISIONS[changes["precision"]]
    return dataclasses.replace(question, spec=dataclasses.replace(question.spec, **changes))
