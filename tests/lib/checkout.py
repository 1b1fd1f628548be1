"""Files and commits of the project, in a clone, in another user's clone, or in an unpacked archive."""

import functools
import os
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN_MODEL = str(ROOT / "tests" / "golden" / "demo_model.json")  # of the golden losses; has a convolutional stem


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the working tree that git tracks, and new files in tracked folders.

    In an archive without git these are all files except those in .gitignore. `patterns` are fnmatch patterns or
    top-level folders.
    """
    files = listed("--cached") if is_checkout() else unpacked()
    if is_checkout():
        folders = {path.parts[0] for path in files if len(path.parts) > 1}  # no files outside of them: a log, venv/
        files += [path for path in listed("--others", "--exclude-standard") if path.parts[0] in folders]
    return [
        path
        for path in files
        if (ROOT / path).is_file()
        and (not patterns or any(fnmatch(path.as_posix(), p) or path.parts[0] == p for p in patterns))
    ]


def git(*words: str) -> subprocess.CompletedProcess:
    """Run git in the repository, even if another user owns the clone."""
    return subprocess.run(["git", "-c", "safe.directory=*", "-C", str(ROOT), *words], capture_output=True, text=True)


@functools.cache
def is_checkout() -> bool:
    """Return False for an archive without git, even inside the checkout of another project."""
    return shutil.which("git") is not None and git("rev-parse", "--show-toplevel").stdout.strip() == str(ROOT.resolve())


def listed(*options: str) -> list[Path]:
    found = git("ls-files", "-z", *options)
    assert found.returncode == 0, found.stderr
    return [Path(name) for name in found.stdout.split("\0") if name]


def unpacked() -> list[Path]:
    ignored = {".git", *(line.strip("/") for line in (ROOT / ".gitignore").read_text().split())}
    files: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        kept = [name for name in (*folders, *names) if not any(fnmatch(name, pattern) for pattern in ignored)]
        folders[:] = sorted(set(folders) & set(kept))
        files += (Path(folder, name).relative_to(ROOT) for name in sorted(set(names) & set(kept)))
    return files
