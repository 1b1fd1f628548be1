"""A real data set for text_retriever.py: WordNet's words and definitions, scored on held-out words next to BM25.

    python examples/wordnet.py prepare --wordnet /usr/share/wordnet --out wordnet
    torchrun --nproc-per-node 1 examples/text_retriever.py --model MODEL --data wordnet/train.jsonl --max-length 48
    python examples/wordnet.py score --data wordnet --models MODEL retriever

WordNet is in Debian's package wordnet-base. In: its files data.noun, data.verb, data.adj and data.adv, one line per
synset (words that share a definition). Out: train.jsonl, each pair of a word and a definition in both directions, and
test.json. One word in fifty is held out, with all definitions and all pairs of its synsets. `score` ranks all words and
all definitions for the held-out ones. It needs PyPI's bm25s, and prints one JSON line per retriever.
"""

import argparse
import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from text_retriever import mean_of_tokens
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

HELD_OUT = 50  # one word of so many
Relevant = dict[int, list[int]]  # of a query: the indices of its right answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare")
    command.add_argument("--wordnet", type=Path, required=True, help="folder with data.noun and the other three")
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("score")
    command.add_argument("--data", type=Path, required=True, help="what `prepare` wrote")
    command.add_argument("--models", nargs="*", default=[], help="encoders in Hugging Face's format, next to BM25")
    command.add_argument("--max-length", type=int, default=48, help="tokens")
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.wordnet, args.out)
    else:
        score(args.data, args.models, args.max_length)


def prepare(wordnet: Path, out: Path) -> None:
    """Write train.jsonl and test.json (words, definitions, and the pairs of held-out synsets as indices)."""
    pairs = list(
        dict.fromkeys(pair for part in ("noun", "verb", "adj", "adv") for pair in read(wordnet / f"data.{part}"))
    )
    words = list(dict.fromkeys(word for word, _ in pairs))
    definitions = list(dict.fromkeys(definition for _, definition in pairs))
    chosen = {word for word in words if int(hashlib.sha256(word.encode()).hexdigest(), 16) % HELD_OUT == 0}
    unseen = {definition for word, definition in pairs if word in chosen}
    train = [pair for pair in pairs if pair[1] not in unseen]
    word_ids, definition_ids = ({text: index for index, text in enumerate(texts)} for texts in (words, definitions))
    test = [(word_ids[word], definition_ids[definition]) for word, definition in pairs if definition in unseen]
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "train.jsonl", "w") as file:
        for pair in train:
            for query, positive in (pair, pair[::-1]):
                file.write(json.dumps({"query": query, "positive": positive, "negatives": []}) + "\n")
    held_out = sorted(word_ids[word] for word in chosen)
    (out / "test.json").write_text(
        json.dumps({"words": words, "definitions": definitions, "held_out": held_out, "pairs": test})
    )
    print(
        f"{len(pairs):,} pairs of {len(words):,} words and {len(definitions):,} definitions; "
        f"held out: {len(chosen):,} words, {len(unseen):,} definitions; {len(train):,} pairs to train on"
    )


def read(path: Path) -> list[tuple[str, str]]:
    """Return (word, definition) of a file of synsets, without the definition's examples of use."""
    pairs = []
    for line in path.read_text(encoding="latin-1").splitlines():
        if line.startswith("  "):  # the licence
            continue
        fields, gloss = line.split(" | ", 1)
        definition = gloss.split('; "')[0].strip()
        parts = fields.split(" ")
        for word in parts[4 : 4 + 2 * int(parts[3], 16) : 2]:
            pairs.append((re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " "), definition))
    return pairs


def score(data: Path, models: list[str], max_length: int) -> None:
    """Print R@1 and nDCG@10 of both directions for BM25 and each model."""
    test = json.loads((data / "test.json").read_text())
    words, definitions = test["words"], test["definitions"]
    defined, named = defaultdict(list), defaultdict(list)
    for word, definition in test["pairs"]:
        defined[word].append(definition)
        named[definition].append(word)
    defined = {word: defined[word] for word in test["held_out"]}
    for name in ("bm25", *models):
        row = {"retriever": name, "words": len(defined), "definitions": len(named)}
        texts = [words, definitions] if name == "bm25" else encode(name, [words, definitions], max_length)
        for direction, (queries, answers), relevant in (
            ("word_to_definition", texts, defined),
            ("definition_to_word", texts[::-1], named),
        ):
            ranked = (bm25 if name == "bm25" else nearest)(queries, answers, list(relevant))
            row |= {f"{direction}_{key}": round(value, 4) for key, value in measures(ranked, relevant).items()}
        print(json.dumps(row), flush=True)


def measures(ranked: list[list[int]], relevant: Relevant) -> dict[str, float]:
    """Return R@1 (the first answer is right) and nDCG@10 of ten answers per query, the queries as in `relevant`."""
    gains = 1 / torch.arange(2, 12).log2()
    hits = torch.tensor([[answer in right for answer in row] for row, right in zip(ranked, relevant.values())]).float()
    ideal = gains.cumsum(0)[[min(len(right), 10) - 1 for right in relevant.values()]]
    return {"r1": hits[:, 0].mean().item(), "ndcg10": (hits @ gains / ideal).mean().item()}


def bm25(queries: list[str], answers: list[str], asked: list[int]) -> list[list[int]]:
    """Return ten answers for each query asked; -1 where no word is shared."""
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(answers, stopwords=None, show_progress=False), show_progress=False)
    tokens = bm25s.tokenize([queries[query] for query in asked], stopwords=None, show_progress=False)
    found, scores = index.retrieve(tokens, k=10, show_progress=False)
    return torch.where(torch.from_numpy(scores) > 0, torch.from_numpy(found).long(), -1).tolist()


def nearest(queries: Tensor, answers: Tensor, asked: list[int]) -> list[list[int]]:
    """Return the ten answers of the highest cosine for each query asked; features [n, D] f32, normalised."""
    return [row for part in queries[asked].split(1024) for row in (part @ answers.T).topk(10).indices.tolist()]


@torch.inference_mode()
def encode(model: str, columns: list[list[str]], max_length: int) -> list[Tensor]:
    """Return [texts, D] f32, normalised, of each list, encoded as text_retriever.py does; similar lengths together."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModel.from_pretrained(model, dtype=torch.float32).to(device).eval()
    encoded = []
    for texts in columns:
        features = torch.empty(len(texts), encoder.config.hidden_size, device=device)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for begin in range(0, len(texts), 512):
            rows = order[begin : begin + 512]
            given = tokenizer(
                [texts[row] for row in rows], padding=True, truncation=True, max_length=max_length, return_tensors="pt"
            ).to(device)
            features[rows] = torch.nn.functional.normalize(mean_of_tokens(encoder(**given), given).float(), dim=-1)
        encoded.append(features)
    return encoded


if __name__ == "__main__":
    main()
