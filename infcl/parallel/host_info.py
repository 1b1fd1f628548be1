"""Host info: versions of the software that must be equal on all nodes, and the commit of the source tree."""

import hashlib
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "triton", "deepspeed", "megatron-core", "sentencepiece", "webdataset", "numpy", "pillow")


def package_versions() -> dict[str, str | None]:
    """Return the versions of PACKAGES; None for a package that is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def software() -> dict[str, str | None]:
    """Return what all ranks of a run must have in common: {"commit", "source", "python", package: version}."""
    commit = git_commit()
    return {
        "commit": commit and commit.removesuffix("+"),
        "source": _source_digest(),
        "python": platform.python_version(),
        **package_versions(),
    }


def _source_digest() -> str:
    """Hash all code and model configs, since checkouts of one commit may have different local changes."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parent.parent
    root = package.parent
    paths = [*package.rglob("*.py"), *package.rglob("*.json"), *(root / "megatron_patches").rglob("*.py")]
    if (entry := root / "pretrain_clip.py").is_file():  # absent where only the package is installed
        paths.append(entry)
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def git_commit(where: Path | None = None) -> str | None:
    """Return the commit of the tree around `where` (None: this package), with '+' if it has local changes.

    Return None outside a checkout or without git.
    """
    where = where or Path(__file__).resolve().parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain"], cwd=where, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


def differences(there: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    """Return a line per name whose value differs between nodes, with the nodes of each value.

    Args:
        there: {host: its software or settings}.
    """
    lines = []
    for name in sorted({name for facts in there.values() for name in facts}):
        having: dict[str, list[str]] = {}
        for host, facts in there.items():
            having.setdefault(str(facts.get(name)), []).append(host)
        if len(having) > 1:
            fewest_last = sorted(having.items(), key=lambda item: -len(item[1]))
            lines.append(f"{name}: " + "; ".join(f"{value} on {_some(hosts)}" for value, hosts in fewest_last))
    return lines


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
