"""A teacher in the trainer: the step equals one process in float64, and the teacher is in nothing that is trained."""

import contextlib
import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from infcl.checkpoint.load import full_weights
from infcl.config import TrainConfig
from infcl.convert.export import load_exported
from infcl.data.index import SampleKeys
from infcl.data.tokenizer import Tokenizer
from infcl.engine.parameter_groups import parameter_groups
from infcl.models import CLIP
from infcl.train.build import build_tokenizer_and_model_config
from tests.lib.checkout import GOLDEN_MODEL
from tests.lib.loss_oracle import mean_kl
from tests.lib.ranks import run_ranks
from tests.lib.shown_commands import python_blocks
from tests.lib.small_loader import small_loader
from tests.lib.step_oracle import EPS, LR, adamw, dense_loss, worst_error
from tests.lib.teachers import WIDTH, metrics, with_embeddings, write_teacher
from tests.lib.training import demo_config, fit, new_trainer, rejection

MICRO_BATCHES, WEIGHT = 3, 1.5


@pytest.fixture(scope="module")
def teacher(demo_folder, tmp_path_factory):
    return write_teacher(tmp_path_factory.mktemp("teacher") / "export", demo_folder)


@pytest.fixture(scope="module")
def stored(demo_folder, tmp_path_factory):
    return with_embeddings(demo_folder / "train", tmp_path_factory.mktemp("stored") / "train")


def one_step(rank, world_size, config):
    """Return the rank's micro-batches, the weights before and after a step, its metrics, and the teacher's calls."""
    trainer, calls = new_trainer(config), []
    if trainer.teacher.model is not None:
        trainer.teacher.model.register_forward_hook(
            lambda module, inputs, out: calls.append((module.training, out["image_features"].requires_grad))
        )
    before = full_weights(trainer.engine, keep=True)
    with contextlib.closing(trainer.loader.steps(trainer.batches.pixels.again)) as steps:
        given = [{name: value.clone() for name, value in batch.items()} for batch in next(steps)]
        step = trainer.train_step(iter(given))
    trainer.metrics.close()
    return given, before, full_weights(trainer.engine, keep=True), step.values, calls


def joined(ranks, name):
    return torch.cat([batch[name] for given, *_ in ranks for batch in given])


def reference(ranks, config, teacher):
    """Return loss and weights after the step of one process in float64 that sees the whole batch."""
    _, before, *_ = ranks[0]
    cfg = build_tokenizer_and_model_config(config)[1]
    model = CLIP(cfg, patch_dropout=0.0).double().train()
    model.load_state_dict(before)
    out = model(joined(ranks, "images"), joined(ranks, "texts"))
    if config.teacher_key:
        wanted = torch.nn.functional.normalize(joined(ranks, "teacher").double(), dim=-1).unbind(1)
        scale = 100.0
    else:
        frozen = load_exported(teacher)[0].double().eval()
        with torch.no_grad():
            found = frozen(joined(ranks, "images"), joined(ranks, "teacher_texts"))
        wanted, scale = (found["image_features"], found["text_features"]), found["logit_scale"].exp()
    losses, own_scale = [], out["logit_scale"].exp()
    for width in config.matryoshka_widths or [cfg.embed_dim]:
        sides = [torch.nn.functional.normalize(out[f"{side}_features"][:, :width]) for side in ("image", "text")]
        losses.append(dense_loss(*sides, own_scale) + WEIGHT * mean_kl(*sides, own_scale, *wanted, scale))
    loss = sum(losses) / len(losses)
    groups = parameter_groups(model, TrainConfig(wd=0.0), LR)
    optimizer = adamw(groups)
    loss.backward()
    optimizer.step()
    return loss.item(), {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("world_size", "preset", "kind"),
    [(1, "zero0", "model"), (2, "zero3", "model"), (3, "zero0", "stored, Matryoshka"), (3, "zero3", "stored")],
)
def test_a_distilled_step_equals_the_one_of_a_single_process(
    world_size, preset, kind, demo_folder, teacher, stored, tmp_path
):
    """With the gradient cache: a teacher's model encodes each micro-batch once, in eval mode and without a graph."""
    flags = {"distill_model": teacher} if kind == "model" else {"teacher_key": "t:40", "train_data": stored}
    flags |= {"matryoshka_widths": [8, 24, 64]} if "Matryoshka" in kind else {}
    config = demo_config(
        demo_folder, tmp_path, model=GOLDEN_MODEL, batch_size=3, accum_freq=MICRO_BATCHES, steps=1, warmup=0,
        lr=LR, eps=EPS, wd=0.0, distill_weight=WEIGHT, force_patch_dropout=0.0,
        deepspeed_config=f"ds_configs/{preset}.json", **flags,
    )  # fmt: skip
    ranks = run_ranks(one_step, world_size, config)
    loss, state = reference(ranks, config, teacher)
    for given, _, after, values, calls in ranks:
        assert len(given) == MICRO_BATCHES and len(calls) == (MICRO_BATCHES if kind == "model" else 0)
        assert set(calls) <= {(False, False)}
        assert values["loss"] == pytest.approx(loss, rel=1e-6)
        assert values["micro_distillation_loss"] > 0
        assert worst_error(after, state) < 1e-4  # 1.5e-5 at most was seen, in float32


def test_a_run_that_is_its_own_teacher_has_nothing_to_learn_from_it(demo_folder, tmp_path):
    """The teacher is in no checkpoint and export, whose card names it."""
    first = demo_config(demo_folder, tmp_path, batch_size=8, steps=2, name="first")
    run_ranks(fit, 1, first)
    run = str(tmp_path / "first")
    flags = {"pretrained": run, "name": "second", "save_every_n_steps": 1, "ema_decay": 0.9}
    plain = dataclasses.replace(first, **flags)
    distilled = dataclasses.replace(plain, distill_model=run, distill_weight=3.0, name="third")
    losses = [run_ranks(fit, 1, config)[0] for config in (plain, distilled)]
    assert losses[1][1] == pytest.approx(losses[0][1], abs=1e-5)
    assert abs(metrics(tmp_path / "third")[0]["micro_distillation_loss"]) < 1e-5
    assert metrics(tmp_path / "third")[1]["micro_distillation_loss"] > 1e-5
    plain, distilled = (
        load_file(tmp_path / name / "checkpoints" / "step_00000001" / "state_00000.safetensors")
        for name in ("second", "third")
    )
    assert plain.keys() == distilled.keys()
    card = (tmp_path / "third" / "export" / "README.md").read_text()
    assert f"| distilled from | {tmp_path.name}/first, weight 3 |" in card
    assert "distilled" not in (tmp_path / "second" / "export" / "README.md").read_text()


def test_a_teacher_of_another_image_size_is_rejected_with_the_sizes(demo_folder, tmp_path):
    folder = write_teacher(tmp_path / "large", demo_folder, image_size=64)
    message = run_ranks(rejection, 1, demo_config(demo_folder, tmp_path, distill_model=folder))[0]
    assert "takes images of 64 pixels" in message and f"--model {GOLDEN_MODEL} of 32" in message
    assert "--force-image-size 64" in message


def test_the_script_of_the_page_stores_what_the_model_computes(demo_folder, teacher, tmp_path, monkeypatch):
    (script,) = [source for source in python_blocks().values() if "TarWriter" in source]
    changes = {"logs/large": teacher, "data/train": str(demo_folder / "val"), "data/": f"{tmp_path}/", ".cuda()": ""}
    for shown, here in {**changes, '"cuda"': '"cpu"', "jpg": "png", "l14": "t"}.items():
        assert shown in script
        script = script.replace(shown, here)
    exec(compile(script, "the page", "exec"), {})
    tokenizer, keys = Tokenizer(demo_folder / "tokenizer.model", 20), SampleKeys(teacher="t.npy", teacher_width=WIDTH)
    aug = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    loader = small_loader(str(tmp_path / "with_teacher"), tokenizer, image_size=32, keys=keys, aug_cfg=aug)
    model, (batch,) = load_exported(teacher)[0], next(iter(loader))
    with torch.no_grad():
        found = model(batch["images"], None)["image_features"]
    assert torch.allclose(batch["teacher"][:, 0].float(), found, atol=2e-3)
    assert loader.num_samples > 100 and torch.allclose(batch["teacher"].float().norm(dim=-1), torch.ones(1), atol=1e-3)
