"""These towers and open_clip's are the same functions of the same weights.

Needs open_clip_torch (requirements-test.txt installs it). Alone:
`python -m pytest tests/models/test_open_clip_parity.py`.
"""

import pytest
import torch

from infcl.models import CLIP, list_models, load_model_config
from infcl.models.config import parse_model_config
from tests.lib.open_clip_stub import import_open_clip

OURS_ALONE = ("demo", "ViT-B-16-BERT-base")
VIT_MODELS = [name for name in list_models() if name not in OURS_ALONE]

VISION = {"image_size": 32, "layers": 2, "width": 48, "head_width": 16, "patch_size": 8}
TEXT = {"context_length": 12, "vocab_size": 90, "width": 32, "heads": 4, "layers": 2}
VARIANTS = {
    "plain": ({}, {}, {}),
    "quick_gelu": ({"quick_gelu": True}, {"mlp_ratio": 3.7}, {"mlp_ratio": 2.0}),
    "eos": ({}, {"pool_type": "avg"}, {"pool_type": "eos", "eos_id": 1}),
    "bidirectional": ({"init_logit_bias": -10.0}, {}, {"pool_type": "last", "no_causal_mask": True}),
    "first": ({}, {}, {"pool_type": "first", "no_causal_mask": True}),
}


@pytest.mark.parametrize("name", VIT_MODELS)
def test_config_and_names_and_shapes_of_all_parameters_equal_open_clips(name):
    open_clip = import_open_clip()
    cfg, theirs_cfg = load_model_config(name), open_clip.get_model_config(name)
    assert cfg == parse_model_config(theirs_cfg)
    with torch.device("meta"):
        ours, theirs = CLIP(cfg), open_clip.model.CLIP(**theirs_cfg)
    shapes = {key: tuple(value.shape) for key, value in ours.state_dict().items()}
    assert shapes.pop("logit_scale") == (1,)
    expected = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    assert expected.pop("logit_scale") == ()
    assert shapes == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_features_and_gradients_of_small_models_equal_open_clips(variant):
    open_clip = import_open_clip()
    top, vision, text = VARIANTS[variant]
    fields = {"embed_dim": 24, "vision_cfg": {**VISION, **vision}, "text_cfg": {**TEXT, **text}, **top}
    torch.manual_seed(0)
    ours = CLIP(parse_model_config(fields))
    theirs = open_clip.model.CLIP(**fields)
    scalars = {"logit_scale", "logit_bias"}
    theirs.load_state_dict({name: value[0] if name in scalars else value for name, value in ours.state_dict().items()})
    images, texts = torch.randn(3, 3, 32, 32), _texts(3, 12, 90)
    image_weights, text_weights = torch.randn(3, 24), torch.randn(3, 24)

    out = ours(images, texts)
    image_features, text_features = theirs.encode_image(images, True), theirs.encode_text(texts, True)
    torch.testing.assert_close(out["image_features"], image_features, rtol=0, atol=1e-5)
    torch.testing.assert_close(out["text_features"], text_features, rtol=0, atol=1e-5)

    ((out["image_features"] * image_weights).sum() + (out["text_features"] * text_weights).sum()).backward()
    ((image_features * image_weights).sum() + (text_features * text_weights).sum()).backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if name not in ("logit_scale", "logit_bias"):
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_initial_weights_have_open_clips_spread():
    open_clip = import_open_clip()
    fields = {"embed_dim": 64, "vision_cfg": {**VISION, "width": 128}, "text_cfg": {**TEXT, "width": 96}}
    torch.manual_seed(0)
    ours, theirs = CLIP(parse_model_config(fields)), open_clip.model.CLIP(**fields)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.numel() >= 1000:
            ratio = (parameter.std() / expected[name].std()).item()
            assert 0.9 < ratio < 1.1, f"{name}: std is {ratio:.2f} times open_clip's"
        elif parameter.numel() > 1 and expected[name].std() == 0:
            assert torch.equal(parameter, expected[name]), name


def _texts(m: int, length: int, vocab_size: int) -> torch.Tensor:
    """Rows as a tokenizer writes them: ids, the largest id and id 1 at the end, zeros."""
    texts = torch.zeros(m, length, dtype=torch.int64)
    for row in range(m):
        end = length - 2 - 3 * row
        texts[row, :end] = torch.randint(2, vocab_size - 1, (end,))
        texts[row, end], texts[row, end + 1] = vocab_size - 1, 1
    return texts
