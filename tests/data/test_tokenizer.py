import html
import pickle
import random
import string

import pytest
import torch

from infcl.data.index import DEFAULT_KEYS, SampleKeys
from infcl.data.records import ShardReader
from infcl.data.shards import load_manifest
from infcl.data.table import TableColumns, TableReader
from infcl.data.tokenizer import EOS_ID, PAD_ID, UNK_ID, Tokenizer, canonicalise, cut_text, repair
from infcl.data.tokenizer.__main__ import main
from infcl.data.tokenizer.learn import captions_of, train_tokenizer
from infcl.data.tokenizer.open_clip import HuggingFaceTokenizer, OpenClipTokenizer
from infcl.data.tokenizer.source import find_tokenizer, read_ids
from infcl.models.open_clip_config import OpenClipConfig
from tests.lib.hf_tokenizers import write_tokenizer
from tests.lib.open_clip_stub import import_open_clip, import_transformers
from tests.lib.shard_files import write_shards
from tests.lib.small_clip import small_config

CAPTIONS = [
    f"a {colour} {shape} {where} a {other}"
    for colour in ("red", "green", "blue", "yellow")
    for shape in ("circle", "square", "triangle")
    for where in ("above", "below", "left of")
    for other in ("house", "tree", "cloud")
]


def shard_captions(folder: str, limit: int, keys: SampleKeys = DEFAULT_KEYS) -> list[str]:
    return list(captions_of(ShardReader(load_manifest(folder, keys=keys), keys), limit))


def test_the_same_captions_give_the_same_file(tmp_path):
    for name in "ab":
        train_tokenizer(iter(CAPTIONS), tmp_path / name, 80)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("model_type, vocab_size", [("bpe", 60), ("unigram", 36)])
def test_ids_end_with_one_eos_and_padding(tmp_path, model_type, vocab_size):
    train_tokenizer(CAPTIONS, tmp_path / "x.model", vocab_size, model_type)
    tokenizer = Tokenizer(tmp_path / "x.model", context_length=40)
    tokens = tokenizer(CAPTIONS)
    assert tokens.dtype == torch.int64 and tokens.shape == (len(CAPTIONS), 40)
    assert ((tokens == EOS_ID).sum(1) == 1).all() and tokenizer.vocab_size == vocab_size and tokens.max() < vocab_size
    after = torch.arange(40) > (tokens == EOS_ID).int().argmax(1, keepdim=True)
    assert (tokens[after] == PAD_ID).all() and (tokens[~after] != PAD_ID).all()
    assert len({tuple(row) for row in tokens.tolist()}) == len(CAPTIONS)


def test_long_captions_are_cut_before_eos_and_counted(tokenizer_model):
    tokenizer, long = Tokenizer(tokenizer_model, context_length=5), Tokenizer(tokenizer_model, context_length=64)
    tokens = tokenizer(["a red circle above a blue square", "a red", "a red circle"])
    assert tokens[0].tolist() == [*long(["a red circle above a blue square"])[0, :4].tolist(), EOS_ID]
    assert (tokens == EOS_ID).sum(1).tolist() == [1, 1, 1]
    assert tokenizer.truncated >= 1 and long.truncated == 0


def test_captions_are_repaired_as_ftfy_and_html_do():
    ftfy = pytest.importorskip("ftfy")
    draw = random.Random(0)
    texts = ["".join(draw.choices(string.printable + "&;;" * 5 + "amplt#39", k=40)) for _ in range(2000)]
    for text in [*texts, "&amp;amp;amp; caf\u00c3\u00a9 \u2018\uff21\u2019 \ufb01 \x1b[1mx"]:
        assert repair(text) == html.unescape(html.unescape(ftfy.fix_text(text)))


def test_captions_are_canonicalised_as_siglip_does(tokenizer_model):
    assert canonicalise("  A_photo of\ta   Dog!, (brown)\n") == "a photo of a dog brown"
    assert canonicalise("one-liner's \ud800") == "oneliners"
    tokenizer = Tokenizer(tokenizer_model)
    assert torch.equal(tokenizer(["A RED, circle."]), tokenizer(["a red circle"]))


def test_odd_captions_encode(tokenizer_model):
    tokenizer = Tokenizer(tokenizer_model, context_length=16)
    tokens = tokenizer(["", "\x00", "\u7ea2\u8272", "x" * 10_000, "\U0001f600"])
    assert ((tokens == EOS_ID).sum(1) == 1).all() and tokens[0].tolist() == [EOS_ID] + [PAD_ID] * 15
    assert UNK_ID in tokens[2].tolist()
    assert (tokenizer(["</s> <pad> </s>"])[0] == EOS_ID).sum() == 1  # special ids cannot be written
    assert tokenizer([]).shape == (0, 16)


def test_byte_fallback_spells_unknown_characters(tmp_path):
    train_tokenizer(CAPTIONS, tmp_path / "x.model", 320, byte_fallback=True)
    tokens = Tokenizer(tmp_path / "x.model")(["\u7ea2", "\u8272"])
    assert UNK_ID not in tokens and not torch.equal(tokens[0], tokens[1])


def test_texts_and_words_are_cut_alike_for_every_tokenizer():
    """BPE takes quadratic time in the length of a word."""
    assert cut_text("a photo, of: dogs!? " * 100) == "a photo, of: dogs!? " * 100
    assert cut_text("x" * 5000 + " 12 " + "?" * 4000) == "x" * 128  # 4 KB, then its words
    assert cut_text("d\u00f6g " * 10 + "x" * 500 + "-" * 500 + "1" * 300 + "_" * 500) == (
        "d\u00f6g " * 10 + "x" * 128 + "-" * 128 + "1" * 300 + "_" * 128
    )
    assert cut_text("\u732b" * 3000) == "\u732b" * 128 and len(cut_text("\u732b " * 3000).encode()) <= 4096


def test_a_tokenizer_pickles_without_its_file(tokenizer_model, tmp_path):
    Tokenizer(tokenizer_model).save(tmp_path)
    copy = tmp_path / "tokenizer.model"
    tokenizer = Tokenizer(copy, context_length=12)
    copy.unlink()
    clone = pickle.loads(pickle.dumps(tokenizer))
    assert torch.equal(clone(CAPTIONS), tokenizer(CAPTIONS)) and clone.sha256 == tokenizer.sha256
    assert (clone.context_length, clone.pad_id, clone.eos_id) == (12, PAD_ID, EOS_ID)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((5000,), r"no tokenizer of 5000 pieces from these captions: .* set it to a value <= \d+"),
        ((60, "word"), "'bpe' or 'unigram'"),
    ],
)
def test_impossible_requests_are_rejected(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(CAPTIONS, tmp_path / "x.model", *options)
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_written_or_used_are_rejected(tokenizer_model, tmp_path):
    import sentencepiece

    options = {"vocab_size": 60, "model_type": "bpe", "minloglevel": 2, "model_prefix": str(tmp_path / "other")}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CAPTIONS), **options)
    with pytest.raises(ValueError, match="cannot write .*x.model"):
        train_tokenizer(CAPTIONS, "/dev/full/x.model", 60)
    for path, length, message in (
        (__file__, 64, r"is no sentencepiece model \(it cannot be parsed\)"),
        (tmp_path, 64, r"is no sentencepiece model \(Is a directory\)"),
        (tmp_path / "other.model", 64, "pad id -1 and eos id 2"),
        (tokenizer_model, 1, "context length 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Tokenizer(path, length)


def test_the_command_learns_from_shards_and_from_tables(tmp_path, capsys):
    folder = write_shards(tmp_path / "a", [30, 10])
    captions = shard_captions(folder, 1000)
    assert len(captions) == 40 and len(shard_captions(folder, 7)) == 7
    in_json = shard_captions(folder, 9, SampleKeys(json_text="caption"))
    assert all(caption.startswith("from json") for caption in in_json)
    table, out = tmp_path / "t.csv", tmp_path / "new" / "x.model"
    (tmp_path / "x.jpg").write_bytes(b"")
    table.write_text("\n".join(["title;filepath", *(f"{caption};x.jpg" for caption in captions)]))
    assert sorted(captions_of(TableReader(str(table), columns=TableColumns(";")), 1000)) == sorted(captions)
    as_table = ["--csv-separator", ";"]

    def run(data, out, *options) -> str:
        of_model = ["--vocab-size", "30", "--model-type", "bpe", "--out", str(out)]
        main(["train", "--train-data", str(data), *of_model, *options])
        return capsys.readouterr().out

    for data, options in ((folder, []), (table, as_table)):
        assert "30 pieces" in run(data, out, *options) and Tokenizer(out).vocab_size == 30
    no_caption = tmp_path / "none.csv"
    no_caption.write_text("title;filepath\n!;x.jpg\n")
    for data, to, options, message in (
        (folder, tmp_path, [], "name a file in a folder that can be written to"),
        (folder, f"{out}/x.model", [], "name a file in a folder that can be written to"),  # below a file
        (table, out, [], "--csv-separator (now"),
        (no_caption, out, as_table, "there are none (--text-key"),
    ):
        with pytest.raises(SystemExit):
            run(data, to, *options)
        assert message in capsys.readouterr().err


def test_open_clips_tokenizer_has_the_same_interface_and_open_clips_ids():
    open_clip = import_open_clip()
    tokenizer, theirs = OpenClipTokenizer(16), open_clip.get_tokenizer("ViT-B-32")
    captions = ["A photo of a Dog, brown!", "caf\u00e9 &amp; tea", "", "one two three four " * 10]
    assert torch.equal(tokenizer(captions), theirs(captions, context_length=16))
    assert torch.equal(tokenizer(["z" * 4096]), theirs(["z" * 128], context_length=16))  # BPE is quadratic in a word
    assert tokenizer.truncated == 2 and (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (49408, 49407, 0)
    clone = pickle.loads(pickle.dumps(tokenizer))
    assert clone.sha256 == tokenizer.sha256 and torch.equal(clone(captions), tokenizer(captions))
    tokenizer._bpe.cache |= {str(i): "x" for i in range(200_001)}
    assert torch.equal(clone(captions), tokenizer(captions)) and len(tokenizer._bpe.cache) < 100  # bounded


RAW = ["A photo of a Dog, brown!", "caf\u00e9 &amp;  tea_pot", "", "\u201cone\u201d two three four " * 10, "a </s> b"]


@pytest.mark.parametrize(
    ("kwargs", "mode", "bert"),
    [
        ({}, None, False),
        ({"clean": "canonicalize"}, None, False),
        ({"clean": "lower"}, None, False),
        ({"strip_sep_token": True}, None, True),
        ({"clean": "canonicalize"}, "clips", True),
    ],
)
def test_a_hugging_face_tokenizer_gives_open_clips_ids_and_counts_what_it_cuts(kwargs, mode, bert, tmp_path):
    open_clip = import_open_clip()
    folder = write_tokenizer(tmp_path / "here", bert=bert, also="</s>" if mode else "")
    fields = {"tokenizer_kwargs": kwargs, "tokenizer_mode": mode}
    for length in (12, 64):
        tokenizer = HuggingFaceTokenizer(str(folder), length, fields)
        theirs = open_clip.tokenizer.HFTokenizer(str(folder), length, tokenizer_mode=mode, **kwargs)
        assert torch.equal(tokenizer(RAW), theirs(RAW))
        whole = theirs.tokenizer([theirs.clean_fn(text) for text in RAW])["input_ids"]
        assert tokenizer.truncated == sum(len(row) > length - (mode == "clips") for row in whole)
        assert tokenizer([]).shape == (0, length)
        clone = pickle.loads(pickle.dumps(tokenizer))
        assert clone.sha256 == tokenizer.sha256 and torch.equal(clone(RAW), tokenizer(RAW))


def test_padding_and_truncation_are_on_the_right_and_each_caption_ends_in_eos(tmp_path):
    """A tokenizer of a language model pads on the left with its eos; pooling would take column 0 of every caption."""
    import_transformers()
    left = HuggingFaceTokenizer(str(write_tokenizer(tmp_path / "left", pad="</s>", side="left")), 12)
    right = HuggingFaceTokenizer(str(write_tokenizer(tmp_path / "right")), 12)
    exact = next(text for n in range(30) if len(right.rows([text := "a" + " b" * n])[0]) == 12)
    texts = ["a red circle", "", exact, exact + " c", "one two three four " * 10]
    ids, padded = left(texts), right(texts)
    assert left.pad_id == left.eos_id and right.pad_id != right.eos_id
    ends = [row.tolist().index(left.eos_id) for row in ids]
    assert ends == [(row == right.eos_id).nonzero().item() for row in padded] and ends[2:] == [11] * 3
    assert all(ids[i, : ends[i]].tolist() == padded[i, : ends[i]].tolist() for i in range(len(texts)))
    assert len(set(ends)) > 2 and left.truncated == right.truncated == 2


@pytest.mark.parametrize("around", [{"end": ""}, {"start": "</s>"}, {"start": "", "end": ""}])
def test_a_tokenizer_without_an_end_of_its_own_is_rejected_where_the_tower_pools_there(around, tmp_path):
    import_transformers()
    folder = write_tokenizer(tmp_path / "here", **around)
    cfg = small_config()
    source = find_tokenizer(f"hf:{folder}", cfg)
    with pytest.raises(ValueError, match="here does not end each caption with an id that occurs nowhere else"):
        read_ids(cfg, source, source.open(12))
    text = {"vocab_size": 400, "context_length": 12}
    fields = {"embed_dim": 8, "vision_cfg": {"image_size": 32}, "text_cfg": text}
    with pytest.raises(ValueError, match="does not end each caption"):
        read_ids(OpenClipConfig("x", fields), source, source.open(12))
    for others in ({"pool_type": "last"}, {"hf_model_name": "bert"}):  # these do not pool at an end
        theirs = read_ids(OpenClipConfig("x", fields | {"text_cfg": text | others}), source, source.open(12))
        assert theirs.text_cfg.pool_type == others.get("pool_type", "argmax")
