"""The planner's own consistency: memory and times."""

import pytest

from infcl.config.precision import PRECISIONS
from infcl.models import load_model_config
from infcl.plan.fit import fits_gpu, largest_batch, with_cached_activations
from infcl.plan.profile import load_gpu, load_link
from infcl.plan.setting import Setting, captions_of
from infcl.plan.timing import loss_phases, phases_of
from tests.lib.measured import stored
from tests.lib.specs import whole


def planned(**changes) -> Setting:
    settings = {
        "model": load_model_config("ViT-L-14"), "gpu": load_gpu("h200"), "gpus": 8, "global_batch": 2**15,
        "micro_batch": 128, "checkpointing": True,
    }  # fmt: skip
    return whole(**settings | changes)


def test_a_loss_that_holds_its_matrix_is_planned_with_its_products_and_what_is_gathered():
    """CLIP's whole matrix on every GPU, open_clip's rows of a rank; on one GPU they are the same."""
    whole, rows = ({phase.name: phase for phase in phases_of(planned(loss=name))} for name in ("clip", "open_clip"))
    assert whole["loss"].seconds == pytest.approx(8 * rows["loss"].seconds)
    assert whole["gather features"].exposed == rows["gather features"].exposed > 0
    assert "ring" not in whole and "ring" not in rows
    alone = [loss_phases(planned(gpus=1, loss=name))[0].seconds for name in ("clip", "open_clip")]
    assert alone[0] == alone[1] == pytest.approx(whole["loss"].seconds)
    tiled = loss_phases(planned(gpus=1))[0].seconds
    assert tiled == pytest.approx(alone[0], rel=0.1)  # 8 b^2 D flops at one rate


def test_the_largest_batch_fits_and_one_micro_batch_more_does_not():
    setting = planned(gpu=load_gpu("a800-80g"), zero=3)
    largest = largest_batch(setting)
    assert fits_gpu(setting.with_(global_batch=largest))
    assert not fits_gpu(setting.with_(global_batch=largest + setting.dp_size * setting.micro_batch))
    assert largest_batch(planned(gpu=load_gpu("h100"), micro_batch=2**14, checkpointing=False)) == 0


@pytest.mark.parametrize(
    ("zero", "precision", "times"), [(1, "bf16", 1), (1, "fp32", 1), (2, "bf16", 1), (2, "amp_bf16", 4), (3, "bf16", 4)]
)
def test_gradients_go_to_an_offloaded_optimizer_as_often_as_deepspeed_sends_them(zero, precision, times):
    setting = planned(
        gpus=1, global_batch=4 * 64, micro_batch=64, zero=zero, precision=PRECISIONS[precision], offloads=("optimizer",)
    )
    seconds = next(phase.seconds for phase in phases_of(setting) if phase.name == "gradients to it")
    once = 4.0 * setting.parameters / (setting.gpu.pcie_gbs * 1e9)
    assert seconds == pytest.approx(times * once)


def test_a_two_level_ring_is_never_slower_and_wins_where_the_network_is_slow():
    for link, gain in (("nic-800", 1.0), ("eth-100", 1.5)):
        setting = planned(gpus=64, global_batch=64 * 1024, link=load_link(link))
        flat, two_level = (
            sum(phase.exposed for phase in phases_of(setting.with_(ring=ring)) if phase.name == "ring")
            for ring in ("flat", "two-level")
        )
        assert flat >= gain * two_level


def test_auto_is_planned_to_keep_the_graphs_that_it_kept():
    for row in stored("step_resident.csv"):
        if "auto" not in row["label"]:
            continue
        given = captions_of(load_model_config(row["model"]), 20)
        sizes = {"global_batch": int(row["global_batch"]), "micro_batch": int(row["micro_batch"])}
        setting = whole(**given, gpu=load_gpu("h200"), gpus=1, zero=0, **sizes)
        assert with_cached_activations(setting).resident == int(row["resident"]), row
        if sizes == {"global_batch": 1024, "micro_batch": 128}:
            assert with_cached_activations(setting.with_(compiled=False)).resident == 3  # as peers_train's
