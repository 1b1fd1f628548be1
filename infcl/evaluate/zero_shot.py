"""Zero-shot classification: class names and prompts -> a [K, D] classifier -> accuracy over all ranks' images.

A class embedding is the normalised mean of its prompts' unit-norm features (Radford et al. 2021). Prompts and images
are distributed over the ranks, which exchange only the [K, D] sum and three counts. docs/howto/evaluate.md has the
formats of the files of class names, prompts and competing classes.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from infcl.evaluate.features import at_width, in_step
from infcl.loss.matryoshka import prefix

_IMAGENET = Path(__file__).with_name("imagenet.json")
DEFAULT_TEMPLATE = "a photo of a {}"  # for class folders without templates.txt


class ClassSet(NamedTuple):
    """K competing classes, and how labels map to them."""

    names: list[str]  # [K]
    rows: dict[str, int]  # label in the data -> row of `right`
    right: torch.Tensor  # bool [labels, K]: the correct classes of each label


def read_classes(
    classnames: str | Path | None, subset: str | Path | None = None, *, folders: Iterable[str] | None = None
) -> ClassSet:
    """Read the classes of a data set.

    A label is an index into the classnames file, a LABEL of that file, or a class name. A number that is both an index
    and a name is read as the name if all folders are names, else as the index. If no folder matches any of these and
    there are as many folders as classes, the sorted folders are mapped to the classes in order.

    Args:
        classnames: file of names, or "imagenet". None: each folder is a class; its name with spaces for underscores.
        folders: all labels of a class-folder data set, for files that have no labels.

    Raises:
        ValueError: the folders do not match the classes, or a line of the classes file is invalid.
    """
    if classnames is None:
        fields = [[folder, folder.replace("_", " ")] for folder in sorted(folders or ())]
    else:
        fields = [line.split("\t", 1) for line in _read_lines(classnames, "classnames")]
    names = [line[-1].strip() for line in fields]
    by_name: dict[str, tuple[int, ...]] = {name: (k,) for k, name in enumerate(names) if names.count(name) == 1}
    by_number = {str(k): (k,) for k in range(len(names))}
    all_are_names = folders is not None and set(folders) <= by_name.keys()
    indices = by_number | by_name if all_are_names else by_name | by_number
    indices |= {line[0].strip(): (k,) for k, line in enumerate(fields) if len(line) == 2}
    if subset is not None:
        indices = _subset_indices(subset, indices, len(names))
    elif folders is not None:
        indices = _folder_indices(sorted(folders), indices, len(names), classnames)
    right = torch.zeros(len(indices), len(names), dtype=torch.bool)
    for row, accepted in enumerate(indices.values()):
        right[row, list(accepted)] = True
    compete = right.any(0)
    rows = {label: row for row, label in enumerate(indices)}
    return ClassSet([name for name, is_in in zip(names, compete.tolist()) if is_in], rows, right[:, compete])


def read_templates(path: str | Path | None) -> list[str]:
    """Read prompts with {} for the class name. Without a path, return DEFAULT_TEMPLATE.

    Raises:
        ValueError: a prompt lacks {}.
    """
    if path is None:
        return [DEFAULT_TEMPLATE]
    templates = [line.replace("{c}", "{}") for line in _read_lines(path, "templates")]
    for template in templates:
        if "{}" not in template:
            raise ValueError(f"--zeroshot-templates: {template!r} has no {{}} for the class name")
    return templates


def build_classifiers(
    encode: Callable[..., dict[str, torch.Tensor]],
    tokenize: Callable[[list[str]], torch.Tensor],
    classnames: Sequence[str],
    templates: Sequence[str],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    batch_size: int,
    widths: Sequence[int] = (),
) -> list[torch.Tensor]:
    """Compute class embeddings [K, D] f32, unit norm, on every rank. Collective: one all-reduce of [K, D] each.

    Args:
        encode, tokenize: see tasks.Task.run and tasks.Task.
        batch_size: prompts per forward.

    Returns:
        The class embeddings of full width, and [K, w] for each of the widths.
    """
    prompts = [(k, template.replace("{}", name)) for k, name in enumerate(classnames) for template in templates]
    chunks = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    own_chunks = chunks[dist.get_rank(group) :: dist.get_world_size(group)]
    sums: list[torch.Tensor] = []
    for chunk, is_real in in_step(own_chunks, chunks[0], group, device):
        labels = torch.tensor([k for k, _ in chunk], device=device)
        with torch.no_grad():
            features = encode(None, tokenize([text for _, text in chunk]))["text_features"].float()  # [chunk, D]
        of_widths = [features, *(prefix(features, width) for width in widths)]
        sums = sums or [rows.new_zeros(len(classnames), rows.shape[1]) for rows in of_widths]
        if is_real:
            for total, rows in zip(sums, of_widths):
                total.index_add_(0, labels, rows)
    for total in sums:
        dist.all_reduce(total, group=group)
    return [F.normalize(total, dim=-1) for total in sums]


def evaluate_zero_shot(
    encode: Callable[..., dict[str, torch.Tensor]],
    batches: Iterable[tuple[torch.Tensor, ...]],
    filler: tuple[torch.Tensor, ...],
    classifiers: list[torch.Tensor],
    right: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, float]:
    """Compute top-1 and top-5 accuracy over all ranks' images. Collective.

    Args:
        encode: see tasks.Task.run.
        batches: this rank's (uint8 images [m, 3, H, W], int64 labels [m], which are rows of `right`).
        filler: a batch for ranks that run out early.
        classifiers, right: of `build_classifiers`, and of a ClassSet.

    Returns:
        top1, top5 (shares) and num_samples; width_W_top1, width_W_top5 of further classifiers.

    Raises:
        ValueError: no rank has a labelled sample.
    """
    right = right.to(device)
    hits = torch.zeros(len(classifiers), 2, dtype=torch.float64, device=device)  # top-1 and top-5
    samples = torch.zeros((), dtype=torch.float64, device=device)
    top = min(5, len(classifiers[0]))
    for (images, labels), is_real in in_step(batches, filler, group, device):
        with torch.no_grad():
            features = encode(images.to(device, non_blocking=True), None)["image_features"].float()
        if not is_real:
            continue
        samples += len(labels)
        for count, classifier in zip(hits, classifiers):
            rows = features if classifier is classifiers[0] else prefix(features, classifier.shape[1])
            best = (rows @ classifier.T).topk(top, dim=-1).indices  # [m, top]
            is_hit = right[labels.to(device)].gather(1, best)
            count += torch.stack([is_hit[:, 0].sum(), is_hit.any(1).sum()])
    for count in (hits, samples):
        dist.all_reduce(count, group=group)
    if samples == 0:
        raise ValueError("zero-shot evaluation found no labelled sample")
    shares = [dict(zip(("top1", "top5"), count)) for count in (hits / samples).tolist()]
    metrics = shares[0] | {"num_samples": float(samples)}
    for classifier, of_width in zip(classifiers[1:], shares[1:]):
        metrics |= at_width(classifier.shape[1], of_width)
    return metrics


def _read_lines(source: str | Path, kind: str) -> list[str]:
    """Read the non-blank lines of a text file, stripped, or infcl's own for the name "imagenet".

    Raises:
        ValueError: the file is missing, empty or not UTF-8.
    """
    if source == "imagenet" and kind != "classes":  # ./imagenet is a file of that name
        return json.loads(_IMAGENET.read_text(encoding="utf-8"))[kind]
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"--zeroshot-{kind} {source}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--zeroshot-{kind} {source} is not UTF-8: {error}") from None
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"--zeroshot-{kind} {source}: the file is empty")
    return lines


def _folder_indices(
    folders: list[str], known: dict[str, tuple[int, ...]], num_classes: int, classnames: str | Path | None
) -> dict[str, tuple[int, ...]]:
    unknown = [name for name in folders if name not in known]
    if not unknown:
        return known
    if len(unknown) == len(folders) == num_classes:
        return {name: (k,) for k, name in enumerate(folders)}
    raise ValueError(
        f"{len(folders)} class folders ({unknown[0]!r} is not in {classnames}) and {num_classes} class names: write "
        "FOLDER<TAB>name lines into the classnames file, or give infcl-evaluate a file with --zeroshot-classes"
    )


def _subset_indices(
    subset: str | Path, known: dict[str, tuple[int, ...]], num_classes: int
) -> dict[str, tuple[int, ...]]:
    chosen: dict[str, tuple[int, ...]] = {}
    for line in _read_lines(subset, "classes"):
        label, tab, listed = line.partition("\t")
        label = label.strip()
        try:
            chosen[label] = tuple(int(k) for k in listed.split(",")) if tab else known[label]
        except (KeyError, ValueError):
            raise ValueError(
                f"--zeroshot-classes {subset}: {line!r} is neither a class (0 to {num_classes - 1}, or a label of the "
                "classnames file) nor LABEL<TAB>INDEX[,INDEX...]"
            ) from None
        if not all(0 <= k < num_classes for k in chosen[label]):
            raise ValueError(f"--zeroshot-classes {subset}: {line!r}: there are {num_classes} class names")
    return chosen
