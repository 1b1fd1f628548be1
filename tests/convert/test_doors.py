"""What trained is what is evaluated and exported: every door of a run gives the trainer's ids and features.

Doors: `infcl.evaluate` of the run, of its checkpoint, of its average and of its exports; open_clip; transformers. A run
of each kind of tokenizer and model trains two steps. An export that cannot be exact is rejected with the reason.
"""

import json
import shutil

import pytest
import torch

from infcl.convert.__main__ import main as convert
from infcl.convert.import_weights import load_pretrained
from infcl.evaluate.load import load_model
from infcl.models import build_towers
from infcl.models.config import load_any_config
from tests.lib.hf_tokenizers import write_tokenizer
from tests.lib.open_clip_stub import declare_torchvision_operators, import_open_clip, import_transformers
from tests.lib.ranks import run_ranks
from tests.lib.shard_files import picture
from tests.lib.small_clip import CONTEXT_LENGTH, LANGUAGES, TEXTS
from tests.lib.training import demo_config, new_trainer

CPU, OUTPUT = torch.device("cpu"), ("image_features", "text_features", "logit_scale")
RAW = ["A Photo, of a DOG.", "a photo of a dog", "", "the_Work!  'is' &amp; \u201cfree\u201d", *LANGUAGES, *TEXTS]
VISION = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
TEXT = {"context_length": CONTEXT_LENGTH, "vocab_size": 400, "width": 32, "heads": 4, "layers": 1}
CLIP_WORDS, CANONICAL = {"vocab_size": 49408}, {"tokenizer_kwargs": {"clean": "canonicalize"}}
SIGLIP = {"custom_text": True, "text_cfg": {"pool_type": "last", "no_causal_mask": True, "proj_bias": True}}
MODELS = {  # towers, and the config's own fields
    "own": {"quick_gelu": True},
    "open_clip": {"preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.4, 0.3], "resize_mode": "squash"}},
    "custom_text": SIGLIP,
    "hf_tower": {"text_cfg": {"hf_model_name": "{folder}/bert", "hf_pooler_type": "mean_pooler"}},
}
TOKENIZERS = {  # --tokenizer, and what the model's text_cfg says
    "sentencepiece": ("{sentencepiece}", {"hf_tokenizer_name": "elsewhere", "tokenizer_mode": None}),
    "bpe": ("open_clip:ViT-B-32", CLIP_WORDS | CANONICAL | {"hf_tokenizer_name": "elsewhere"}),
    "hf": ("hf:{folder}/plain", {}),
    "hf canonical": ("hf:{folder}/plain", CANONICAL),
    "named": ("open_clip:named", {}),  # canonical by its own config
    "named raw": ("open_clip:raw", CANONICAL),  # not canonical by its own config
    "left": ("hf:{folder}/left", {}),
    "no sep": ("hf:{folder}/bert", {"tokenizer_kwargs": {"strip_sep_token": True}}),
}
CASES = [("sentencepiece", "own"), ("no sep", "hf_tower"), ("bpe", "open_clip"), ("hf canonical", "custom_text")]
CASES += [("bpe", "own"), ("hf", "own"), ("hf canonical", "own"), ("named", "own"), ("named raw", "custom_text")]
CASES += [("left", "own")]  # of models by open_clip the tokenizers that are not slow have cases above
CASES += [pytest.param(one, "open_clip", marks=pytest.mark.slow) for one in ("sentencepiece", "hf", "named")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokenizers, a BERT and an installed open_clip with two more models."""
    import_open_clip()
    import_transformers()
    folder = tmp_path_factory.mktemp("tokenizers")
    write_tokenizer(folder / "plain")
    write_tokenizer(folder / "left", pad="</s>", side="left")
    write_tokenizer(folder / "bert", bert=True)
    for name, kwargs in (("named", {"clean": "canonicalize"}), ("raw", None), ("ViT-B-32", None)):
        text = {} if name == "ViT-B-32" else {"hf_tokenizer_name": str(folder / "plain")}
        text |= {} if kwargs is None else {"tokenizer_kwargs": kwargs}
        file = folder / "open_clip" / "model_configs" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"embed_dim": 24, "vision_cfg": VISION, "text_cfg": text}))
    return folder


def model_file(kind, text, folder, path):
    fields = {"embed_dim": 24, "vision_cfg": VISION} | {k: v for k, v in MODELS[kind].items() if k != "preprocess_cfg"}
    fields["text_cfg"] = TEXT | fields.get("text_cfg", {}) | text
    if kind == "own":
        fields["text_cfg"].pop("tokenizer_mode", None)
    whole = {"model_cfg": fields, "preprocess_cfg": MODELS[kind].get("preprocess_cfg", {})}
    path.write_text(json.dumps(fields if kind == "own" else whole).replace("{folder}", str(folder)))
    return str(path) if kind == "own" else f"open_clip:{path}"


def train(rank, world_size, config, open_clip_folder, pixels):
    """Train; return the trainer's ids of RAW, its features, and those of the average."""
    from unittest import mock

    declare_torchvision_operators()
    with (
        mock.patch("infcl.train.results.draw_loss_curve"),
        mock.patch("infcl.data.tokenizer.source.open_clip_folder", return_value=open_clip_folder),
    ):
        trainer = new_trainer(config)
        trainer.fit()
    ids = trainer.inputs.tokenizer(RAW)
    trainer.engine.train(False)

    def features():
        with torch.no_grad():
            out = trainer._encode_for_evaluation(pixels, ids)
        return [out[name].clone() for name in OUTPUT]

    own = features()
    with trainer.engine.showing_average():
        return ids, own, features()


def by_infcl(checkpoint, pixels, **options):
    clip, tokenize, _ = load_model(checkpoint, device=CPU, **options)
    ids = tokenize(RAW)
    with torch.no_grad():
        out = clip(pixels, ids)
    return ids, *(out[name] for name in OUTPUT)


def by_open_clip(export, pixels):
    import open_clip

    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{export}")
    ids = open_clip.get_tokenizer(f"local-dir:{export}")(RAW)
    mean, std = (torch.tensor(model.visual.preprocess_cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        model.eval()
        features = model.encode_image((pixels / 255 - mean) / std, True), model.encode_text(ids, True)
    return ids, *features, model.logit_scale.detach().view(1)


def by_transformers(export, pixels):
    import transformers

    model, info = transformers.CLIPModel.from_pretrained(export, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ids = transformers.AutoTokenizer.from_pretrained(export)(RAW, padding="max_length", truncation=True)["input_ids"]
    fields = json.loads((export / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(fields[f"image_{name}"]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        out = model.eval()(input_ids=torch.tensor(ids), pixel_values=(pixels / 255 - mean) / std)
    return torch.tensor(ids), out.image_embeds, out.text_embeds, model.logit_scale.detach().view(1)


@pytest.mark.first(1)
@pytest.mark.parametrize(("tokenizer", "model"), CASES)
def test_every_door_gives_the_trainers_ids_and_features(
    tokenizer, model, folder, tokenizer_model, demo_folder, tmp_path, capsys
):
    name, text = TOKENIZERS[tokenizer]
    config = demo_config(
        demo_folder, tmp_path, model=model_file(model, text, folder, tmp_path / "model.json"), batch_size=8, steps=2,
        accum_freq=1, ema_decay=0.5, tokenizer=name.format(folder=folder, sentencepiece=tokenizer_model),
    )  # fmt: skip
    pixels = torch.stack([torch.from_numpy(picture(i, 32, 32)).permute(2, 0, 1) for i in range(3)])
    ids, own, average = run_ranks(train, 1, config, folder / "open_clip", pixels)[0]
    assert ids.shape == (len(RAW), CONTEXT_LENGTH)
    raw, spelled = (ids[i].tolist() for i in (0, 1))
    assert (raw == spelled) == (tokenizer in ("sentencepiece", "hf canonical", "named")), "the kind is what it says"
    run = tmp_path / "run"
    for more in ([], ["--no-ema", "--out", str(run / "own")]):
        assert convert(["export", str(run), *more]) == 0
    assert convert(["import", str(run / "export"), "--out", str(run / "imported")]) == 0
    doors = {
        "run": (by_infcl(run, pixels), average),
        "checkpoint": (by_infcl(run / "checkpoints" / "step_00000002", pixels), average),
        "without the average": (by_infcl(run, pixels, ema=False), own),
        "export": (by_infcl(run / "export", pixels), average),
        "export without the average": (by_infcl(run / "own", pixels), own),
        "imported export": (by_infcl(run / "imported", pixels), average),
        "open_clip": (by_open_clip(run / "export", pixels), average),
    }
    if (tokenizer, model) == ("bpe", "own"):  # a file alone: CLIP's own tokenizer by the number of its ids
        shutil.copy(run / "export" / "open_clip_model.safetensors", tmp_path / "w.safetensors")
        alone = model_file(model, CLIP_WORDS, folder, tmp_path / "alone.json")
        doors["file"] = (by_infcl(tmp_path / "w.safetensors", pixels, model=alone), average)
    capsys.readouterr()
    if (code := convert(["export", str(run), "--format", "hf"])) == 0:
        doors["hf export"] = (by_infcl(run / "export-hf", pixels), average)
        doors["transformers"] = (by_transformers(run / "export-hf", pixels), average)
    assert (code == 0) == (model == "own"), capsys.readouterr().err
    for door, ((its_ids, *features), expected) in doors.items():
        padded = door in ("hf export", "transformers") and tokenizer == "bpe"  # CLIP's own pads with its end there
        same = its_ids == ids if not padded else (its_ids == ids) | (ids == 0)
        assert same.all(), (door, [RAW[row] for row in (~same).any(1).nonzero()[:, 0].tolist()])
        for got, wanted in zip(features, expected):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6, msg=lambda why, door=door: f"{door}: {why}")
    again = build_towers(load_any_config(run / "model_config.json"))
    load_pretrained(again, str(run))
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(pixels)["image_features"], average[0], rtol=0, atol=1e-6)
