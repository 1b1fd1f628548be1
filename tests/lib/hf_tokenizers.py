"""Small Hugging Face tokenizers and text towers, written to a folder."""

from pathlib import Path

from tests.lib.small_clip import CAPTIONS, TEXTS

VOCAB_SIZE = 400


def write_tokenizer(
    folder: Path,
    *,
    pad: str = "<pad>",
    side: str = "right",
    start: str = "<s>",
    end: str = "</s>",
    bert: bool = False,
    also: str = "",
) -> Path:
    """Write a case-sensitive byte-pair tokenizer with ids [start, ..., end]; "" for a token that is not there.

    Args:
        folder: where to write.
        pad: padding token.
        side: of padding and truncation.
        start, end: tokens around a caption.
        bert: tokens of BERT, and a BERT of two layers in the same folder.
        also: bos and eos token, with `bert`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, PreTrainedTokenizerFast

    if bert:
        pad, start, end = "[PAD]", "[CLS]", "[SEP]"
    special = [pad if pad != end else "<unused>", "<unk>", start or "<none>", end or "<end>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*TEXTS, *CAPTIONS], trainer)
    around = [token for token in (start, "$A", end) if token]
    tokens = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around) if token != "$A"]
    tokenizer.post_processor = TemplateProcessing(around, None, tokens)
    names = {"cls_token": start, "sep_token": end, "bos_token": also, "eos_token": also}
    if not bert:
        names = {"bos_token": start, "eos_token": end or "<end>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token="<unk>", padding_side=side, truncation_side=side,
        **{name: token for name, token in names.items() if token},
    ).save_pretrained(folder)  # fmt: skip
    if bert:
        BertConfig(
            vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32,
        ).save_pretrained(folder)  # fmt: skip
    return folder
