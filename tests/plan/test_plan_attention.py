"""The planner's attention: torch's and our own, compared with measured steps and with what training takes."""

import pytest

from infcl.models import load_model_config
from infcl.plan import timing
from infcl.plan.profile import load_gpu
from infcl.plan.search import resolved
from infcl.plan.setting import Setting, captions_of
from tests.lib.measured import compare, stored

KEPT = compare(stored("step_resident.csv"), load_gpu("h200"))


@pytest.mark.parametrize(
    "one", [one for one in KEPT if "auto" in one["row"]["label"]], ids=lambda one: one["row"]["label"]
)
def test_auto_is_planned_to_keep_the_graphs_that_it_kept(one):
    row = one["row"]
    given = captions_of(load_model_config(row["model"]), 20)
    sizes = {"global_batch": int(row["global_batch"]), "micro_batch": int(row["micro_batch"])}
    setting = Setting(**given, gpu=load_gpu("h200"), gpus=1, resident=0, **sizes)
    assert resolved(setting).resident == int(row["resident"])
    if sizes == {"global_batch": 1024, "micro_batch": 128}:
        assert resolved(setting.with_(compiled=False)).resident == 3  # as peers_train's: dev/log/2026-11.md


@pytest.mark.parametrize(("micro_batch", "kept"), [(32, 8), (128, 2), (256, 1), (512, 1)])
def test_on_a_smaller_gpu_fewer_graphs_are_planned_to_stay_and_never_none(micro_batch, kept):
    """ViT-L-14 in 72 of 79.3 GiB: 8 are of all else, and graphs are 0.24 GiB a pair."""
    given = captions_of(load_model_config("ViT-L-14"), 20)
    setting = Setting(
        **given, gpu=load_gpu("a100-80g"), gpus=1, global_batch=16 * micro_batch, micro_batch=micro_batch,
        resident=0,
    )  # fmt: skip
    assert resolved(setting).resident == kept


def test_attention_is_counted_in_whole_tiles():
    lengths = (20, 50, 99, 128, 129, 197, 257)
    assert [timing.positions(length) for length in lengths] == [128, 128, 128, 128, 256, 256, 384]
    assert [timing.own_positions(length) for length in lengths] == [32, 64, 128, 128, 144, 208, 272]


def test_own_attention_is_planned_where_training_has_it():
    """Whole or packed; not in float32, not for heads of 80, not where torch's is asked for."""

    def seconds(name: str, attention: str, tokens: int | None = None, **changes) -> float:
        given = captions_of(load_model_config(name), tokens)
        setting = Setting(**given, gpu=load_gpu("h200"), gpus=1, global_batch=1024, micro_batch=128)
        return timing.tower_phases(setting.with_(attention=attention, **changes))[0].seconds

    for name, tokens in (
        ("ViT-B-32", None),
        ("ViT-B-32", 20),
        ("ViT-B-32", 70),
        ("ViT-B-16", None),
        ("ViT-B-16", 20),
        ("ViT-L-14", None),
    ):
        assert seconds(name, "auto", tokens) < 0.99 * seconds(name, "torch", tokens)
    assert seconds("ViT-B-32", "triton", 20) == seconds("ViT-B-32", "auto", 20)
    assert seconds("ViT-B-32", "auto", precision="fp32") == seconds("ViT-B-32", "torch", precision="fp32")

    def shapes(given: dict, attention: str) -> tuple:
        return timing._towers(
            Setting(**given, gpu=load_gpu("h200"), gpus=1, global_batch=8, micro_batch=8, attention=attention)
        )

    # Packed or not, no tile holds captions of 248 tokens.
    long = load_model_config("ViT-B-32").with_overrides(context_length=248)
    assert shapes(captions_of(long, 20), "auto")[1] == shapes(captions_of(long, 20), "torch")[1]
    huge = captions_of(load_model_config("ViT-H-14"), None)
    assert shapes(huge, "auto")[0] == shapes(huge, "torch")[0]
