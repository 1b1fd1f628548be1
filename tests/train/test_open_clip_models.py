"""Models that open_clip builds, in the trainer: six families, the way back to open_clip, and errors."""

import contextlib
import dataclasses
import json
import shutil
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from infcl.config import TrainConfig
from infcl.config.command_line import parse_args
from infcl.convert.export import load_exported
from infcl.data.tokenizer.open_clip import HuggingFaceTokenizer, OpenClipTokenizer
from infcl.evaluate.load import load_model
from infcl.integrations.open_clip import main as run_open_clip_train
from infcl.models import build_towers
from infcl.models.open_clip_config import load_open_clip_config
from infcl.train.build import build_meta_model, build_tokenizer_and_model_config
from infcl.train.teacher import load_teacher
from tests.lib.open_clip_stub import declare_torchvision_operators, import_open_clip
from tests.lib.ranks import run_ranks
from tests.lib.training import demo_config, fit, new_trainer

CLIP_TEXT = {"context_length": 16, "vocab_size": 512, "width": 64, "heads": 4, "layers": 2}
SIGLIP_TEXT = CLIP_TEXT | {"no_causal_mask": True, "pool_type": "last", "proj_bias": True}
FAMILIES = {
    "vit": {
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8},
        "text_cfg": CLIP_TEXT,
        "quick_gelu": True,
    },
    "siglip": {
        "custom_text": True,
        "init_logit_bias": -10,
        "vision_cfg": {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"},
        "text_cfg": SIGLIP_TEXT,
    },
    "convnext": {
        "vision_cfg": {"image_size": 64, "timm_model_name": "test_convnext", "timm_proj": "mlp", "timm_pool": "avg"},
        "text_cfg": CLIP_TEXT,
    },
    "resnet": {
        "vision_cfg": {"image_size": 32, "layers": [1, 2, 1, 1], "width": 16, "head_width": 32},
        "text_cfg": CLIP_TEXT,
    },
    "eva": {
        "custom_text": True,
        "vision_cfg": {"image_size": 28, "timm_model_name": "eva02_tiny_patch14_224", "timm_pool": "token"},
        "text_cfg": CLIP_TEXT,
    },
    "hf": {
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8},
        "text_cfg": {"hf_proj_type": "mlp", "hf_pooler_type": "mean_pooler", "context_length": 16},
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{family: JSON file}; the text tower of hf, and its tokenizer, in a folder next to it."""
    import_open_clip()
    folder = tmp_path_factory.mktemp("models")
    from transformers import BertConfig, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "red", "blue", "green", "of", "left", "right"]
    letters = [chr(c) for c in range(97, 123)]
    (folder / "vocab.txt").write_text("\n".join([*words, *letters[1:], *(f"##{c}" for c in letters)]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    ).save_pretrained(folder / "bert")  # fmt: skip
    for name, fields in FAMILIES.items():
        fields = {"embed_dim": 64 if name == "siglip" else 32} | fields
        if name == "hf":
            fields["text_cfg"] = fields["text_cfg"] | {"hf_model_name": str(folder / "bert")}
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder


def fit_open_clip(rank, world_size, config: TrainConfig):
    declare_torchvision_operators()
    return fit(rank, world_size, config)


@pytest.mark.long  # of a trained model's features tests/convert/test_doors.py has a case in the first look
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[pytest.mark.slow] * (family not in ("resnet", "hf"))) for family in FAMILIES],
)
def test_a_family_trains_the_same_under_zero_1_and_3_and_loads_in_open_clip(family, models, demo_folder, tmp_path):
    tokenizer = f"hf:{models / 'bert'}" if family == "hf" else str(demo_folder / "tokenizer.model")
    curves = []
    for stage in (1, 3):
        config = demo_config(
            demo_folder, tmp_path, name=f"zero{stage}", model=f"open_clip:{models / family}.json", tokenizer=tokenizer,
            loss="siglip" if family == "siglip" else "inf_cl", batch_size=8, steps=4, warmup=1,
            deepspeed_config=f"ds_configs/zero{stage}.json", grad_checkpointing=stage == 3,
        )  # fmt: skip
        curves.append(run_ranks(fit_open_clip, 2, config)[0])
    assert len(curves[0]) == 4 and curves[0] == pytest.approx(curves[1], abs=1e-4)
    assert curves[0][4] < curves[0][1]
    if family == "hf":
        _, tokenize, _ = load_model(tmp_path / "zero3" / "export", device=torch.device("cpu"))
        texts = ["a red LEFT of the blue", "green"]
        assert torch.equal(tokenize(texts), HuggingFaceTokenizer(tokenizer, 16)(texts))
    if family != "eva":  # at a size that timm did not make it for, which open_clip sets only after loading
        _loads_in_open_clip(tmp_path / "zero3" / "export", tokenizer)


def _loads_in_open_clip(folder, tokenizer):
    import open_clip

    theirs = open_clip.create_model(f"local-dir:{folder}").eval()
    ours, cfg = load_exported(folder)
    size, text = cfg.vision_cfg.image_size, cfg.text_cfg
    images = torch.rand(2, 3, size, size)
    texts = torch.randint(5, 60, (2, text.context_length))
    with torch.no_grad():
        own = ours(images, texts)
        assert (theirs.encode_image(images, normalize=True) - own["image_features"]).abs().max() < 1e-6
        assert (theirs.encode_text(texts, normalize=True) - own["text_features"]).abs().max() < 1e-6
    assert theirs.logit_scale.item() == pytest.approx(own["logit_scale"].item())


def fit_with_a_poisoned_step(rank, world_size, config: TrainConfig, poisoned):
    """In step `poisoned` (from 1) an activation of one micro-batch of the last rank is NaN.

    Returns:
        Of each step the statistics after it and whether it was applied; the first norm's running mean after the first
        step, and the means of its inputs in all ranks' micro-batches then.
    """
    declare_torchvision_operators()
    trainer, calls, statistics = new_trainer(config), [], []
    norm = next(m for m in trainer.engine.module.modules() if isinstance(m, torch.nn.BatchNorm2d))

    def poison(_, inputs):  # in both passes and in the recomputation
        calls.append((trainer.step, inputs[0].detach().mean((0, 2, 3))))
        first = [step for step, _ in calls].count(trainer.step) == 1
        bad = trainer.step + 1 == poisoned and rank == world_size - 1 and first
        return (inputs[0] * float("nan"),) if bad else None

    norm.register_forward_pre_hook(poison)
    update, running = trainer._update, []

    def noted():
        result = update()
        values = {n: v.clone() for n, v in trainer.engine.state.buffers() if "running_" in n or "tracked" in n}
        statistics.append((values, result[1]))
        running.append(norm.running_mean.clone())
        return result

    trainer._update = noted
    trainer.fit()
    everyone = [None] * world_size
    dist.all_gather_object(everyone, torch.stack([mean for step, mean in calls if step == calls[0][0]]).unique(dim=0))
    return statistics, running[0], torch.cat(everyone)


@pytest.mark.long
def test_running_statistics_move_once_in_each_step_that_is_applied(demo_folder, tmp_path):
    """By the mean over micro-batches, with checkpointing. The step whose numbers are not finite leaves them, the next
    ones and a resumed run start from them."""
    import_open_clip()
    vision = {"image_size": 64, "timm_model_name": "test_efficientnet", "timm_pool": "avg", "timm_proj": "linear"}
    (tmp_path / "model.json").write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": CLIP_TEXT}))
    config = demo_config(
        demo_folder, tmp_path, model=f"open_clip:{tmp_path / 'model.json'}", batch_size=8, accum_freq=3, steps=3,
        deepspeed_config="ds_configs/zero3.json", grad_checkpointing=True, save_every_n_steps=2,
    )  # fmt: skip
    (steps, running, means), (other_steps, *_) = run_ranks(fit_with_a_poisoned_step, 2, config, 2)
    assert len(means) == 6
    torch.testing.assert_close(running, 0.1 * means.mean(0), rtol=1e-5, atol=1e-7)
    (first, _), (second, applied), (third, _) = steps
    assert not applied
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(value.isfinite().all() for value in third.values())
    assert all(torch.equal(value, other_steps[2][0][name]) for name, value in third.items())
    assert all(int(value) == 2 for name, value in third.items() if "tracked" in name)
    assert sum(not torch.equal(first[name], value) for name, value in third.items()) > 5
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000003")
    resumed = run_ranks(fit_with_a_poisoned_step, 2, dataclasses.replace(config, resume="latest"), 0)[0][0]
    assert all(torch.equal(resumed[0][0][name], value) for name, value in third.items())


PIXELS = (0.4,) * 3, (0.3,) * 3  # mean and standard deviation


@contextlib.contextmanager
def open_clip_with_a_tag(folder):
    """open_clip with the model of the folder's model_configs/resnet.json, and its weights by the tag "mine"."""
    from open_clip import pretrained

    mean, std = PIXELS
    tags = {"resnet": {"mine": pretrained._pcfg("https://example.org/resnet.pt", mean=mean, std=std)}}
    with (
        mock.patch.dict(pretrained._PRETRAINED, tags),
        mock.patch.object(pretrained, "download_pretrained", return_value=str(folder / "resnet.pt")),
        mock.patch("infcl.models.open_clip_config.open_clip_folder", return_value=folder),
        mock.patch("infcl.data.tokenizer.source.open_clip_folder", return_value=folder),
    ):
        yield


def write_tag(models, folder, **text) -> dict[str, torch.Tensor]:
    """Write the files of `open_clip_with_a_tag`, with other settings of the text tower; return the weights."""
    import open_clip

    fields = json.loads((models / "resnet.json").read_text())
    fields["text_cfg"] |= text
    (folder / "model_configs").mkdir(parents=True)
    (folder / "model_configs" / "resnet.json").write_text(json.dumps(fields))
    torch.manual_seed(3)
    given = open_clip.CLIP(**fields | {"nonscalar_logit_scale": True}).state_dict()
    torch.save(given, folder / "resnet.pt")
    return given


def fit_from_a_tag(rank, world_size, config: TrainConfig, folder):
    declare_torchvision_operators()
    with open_clip_with_a_tag(folder):
        return fit_open_clip(rank, world_size, config)


@pytest.mark.long
def test_weights_of_a_tag_are_taken_and_a_locked_tower_keeps_them(models, demo_folder, tmp_path):
    given = write_tag(models, tmp_path / "open_clip", vocab_size=300, pool_type="eos", eos_id=1)  # as the tokenizer
    config = demo_config(
        demo_folder, tmp_path, model="open_clip:resnet", pretrained="open_clip:mine", lock_image=True, steps=2,
        batch_size=8, deepspeed_config="ds_configs/zero3.json",
    )  # fmt: skip
    run_ranks(fit_from_a_tag, 2, config, tmp_path / "open_clip")
    model, cfg = load_exported(tmp_path / "run" / "export")
    assert (cfg.preprocess.mean, cfg.preprocess.std) == PIXELS
    for name, value in model.state_dict().items():
        kept = torch.equal(value, given[name])
        assert kept == (name.startswith("visual.") or name == "attn_mask"), name


def test_a_tag_is_a_teacher_with_its_pixels_and_its_tokenizer(models, tmp_path, tokenizer_model):
    import open_clip

    given = write_tag(models, tmp_path, vocab_size=49408, context_length=9)
    config = TrainConfig(distill_model="open_clip:resnet", distill_pretrained="open_clip:mine")
    with open_clip_with_a_tag(tmp_path):
        model, tokenizer = load_teacher(config, load_open_clip_config("open_clip:resnet"))
        for options, wrong in (
            ({"tokenizer": tokenizer_model}, "another model: text_cfg.pool_type"),
            ({"ema": False}, "no averaged"),
        ):
            with pytest.raises(ValueError, match=wrong):
                load_model("open_clip:mine", device=torch.device("cpu"), model="open_clip:resnet", **options)
    assert (model.cfg.preprocess.mean, model.cfg.preprocess.std) == PIXELS
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, given[name]) for name, value in model.state_dict().items())
    expected = open_clip.tokenizer.SimpleTokenizer(context_length=9)(["A photo of a dog"])
    assert torch.equal(tokenizer(["A photo of a dog"]), expected)


def _with(family, **changes):
    """A config of FAMILIES with keys of its parts replaced."""
    fields = {"embed_dim": 64 if family == "siglip" else 32} | FAMILIES[family]
    for name, value in changes.items():
        fields[name] = fields[name] | value if isinstance(value, dict) and name in fields else value
    return fields


NO_PROJECTION = {"custom_text": True, "text_cfg": {"width": 48, "proj_type": "none"}}
BERT = {"hf_model_name": "{folder}/bert", "vocab_size": 100}
MORE_IDS = BERT | {"vocab_size": 200}
OTHER = "{folder}/other.pt"
ERRORS = {  # config or name, flags, what the error has
    "name": ("no-such-model", (), "open_clip:no-such-model: not a file, and not a model that is built into open_clip"),
    "name of another file": ("../model_configs/RN50", (), "not a file, and not a model that is built into open_clip"),
    "decoder": ("coca_ViT-B-32", (), "captioning decoder"),
    "timm name": (_with("siglip", vision_cfg={"timm_model_name": "vit_no"}), (), "cannot be built"),
    "hf name": (_with("hf", text_cfg={"hf_model_name": "none"}), (), "text tower none cannot be loaded"),
    "text width": (_with("vit", **NO_PROJECTION), (), r"text tower gives \[2, 48\] .* needs \[2, 32\]"),
    "image size": (_with("siglip"), ("--force-image-size", "31"), r"image tower cannot encode \[2, 3, 31, 31\]"),
    "resnet lock": (_with("resnet"), ("--lock-image", "--lock-image-unlocked-groups", "1"), "image tower .*partial"),
    "preprocessing": ({"model_cfg": _with("vit"), "preprocess_cfg": {"mean": 0.5}}, (), "preprocessing: mean is 0.5"),
    "vocabulary": (_with("vit"), ("--tokenizer", "open_clip:ViT-B-32"), "49408 ids, the text tower .* 512 embeddings"),
    "hf vocabulary": (_with("hf", text_cfg=MORE_IDS), (), "200 ids, the text tower .*/bert .* has 128 embeddings"),
    "padding": (_with("hf", text_cfg=BERT), ("--tokenizer", "hf:{folder}/pads"), "pads with 5, .*/bert masks 0"),
    "tokenizer": (_with("vit"), ("--tokenizer", "hf:none"), "--tokenizer hf:none is not a name on the hub or a folder"),
    "image weights": (_with("vit"), ("--pretrained-image", OTHER), "does not fit the image tower of --model"),
    "tag": (_with("vit"), ("--pretrained", "open_clip:openai"), "no weights of that name for --model .*it has none"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_names_the_model_and_the_part_that_failed(case, models, tmp_path):
    config, flags, message = ERRORS[case]
    name = config
    if isinstance(config, dict):
        (tmp_path / "model.json").write_text(json.dumps(config).replace("{folder}", str(models)))
        name = str(tmp_path / "model.json")
    if case == "padding":
        from transformers import BertTokenizerFast

        tokenizer = BertTokenizerFast.from_pretrained(models / "bert", pad_token="a")
        tokenizer.save_pretrained(models / "pads")
    torch.save({"visual.other": torch.zeros(2)}, models / "other.pt")
    flags = [flag.replace("{folder}", str(models)) for flag in flags]
    synthetic = ("--dataset-type", "synthetic", "--train-num-samples", "8")
    with pytest.raises(ValueError, match=message) as raised:
        run = parse_args([*synthetic, "--model", f"open_clip:{name}", *flags])
        build_meta_model(run, build_tokenizer_and_model_config(run)[1])
    assert name in str(raised.value) or "--tokenizer" in str(raised.value)


@pytest.mark.parametrize(
    "source, message",
    [
        ("raise ImportError('no package')", "pip install open_clip_torch"),
        ("raise RuntimeError('operator torchvision::nms')", "install the torchvision that was built for torch"),
    ],
)
def test_an_open_clip_that_cannot_be_imported_is_one_error(source, message, tmp_path, monkeypatch, capsys):
    cfg = load_open_clip_config("open_clip:ViT-B-32")
    (tmp_path / "open_clip.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    for needed_by, call in (
        ("--model open_clip:ViT-B-32", lambda: build_towers(cfg)),
        ("CLIP's own tokenizer", OpenClipTokenizer),
    ):
        with pytest.raises(ValueError, match=f"{needed_by} needs open_clip.*{message}"):
            call()
    assert run_open_clip_train([]) == 2
    assert "infcl.integrations.open_clip needs open_clip" in capsys.readouterr().err
