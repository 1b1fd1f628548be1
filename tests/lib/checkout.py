"""Files of the project that git tracks, in one's own clone or in another user's."""

import subprocess
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN_MODEL = str(ROOT / "tests" / "golden" / "demo_model.json")  # of the golden losses; has a convolutional stem


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the working tree that git tracks, and new files in tracked folders.

    Args:
        patterns: fnmatch patterns or top-level folders; default: all files.
    """
    files = _listed("--cached")
    folders = {path.parts[0] for path in files if len(path.parts) > 1}  # no files outside of them: a log, venv/
    files += [path for path in _listed("--others", "--exclude-standard") if path.parts[0] in folders]
    return [
        path
        for path in files
        if (ROOT / path).is_file()
        and (not patterns or any(fnmatch(path.as_posix(), p) or path.parts[0] == p for p in patterns))
    ]


def _listed(*options: str) -> list[Path]:
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z", *options]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in names.split("\0") if name]
