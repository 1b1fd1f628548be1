"""Print the size of the tree: lines, files, packages, two-way imports and flags: `python dev/measure_tree.py`."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    for folder in ("infcl", "megatron_patches", "benchmarks", "tests"):
        files = list((ROOT / folder).rglob("*.py"))
        print(f"{folder:18} {sum(len(path.read_text().splitlines()) for path in files):6,} lines {len(files):4} files")
    packages = sorted(path.parent.name for path in ROOT.glob("infcl/*/__init__.py"))
    used = {name: imports(name) for name in packages}
    both = [(a, b) for a in packages for b in used[a] if a < b and a in used.get(b, ())]
    print(f"{len(packages)} packages, two-way imports: {both or 'none'}")
    print(f"{len((ROOT / 'tests/golden/flags.txt').read_text().splitlines())} flags")


def imports(package: str) -> set[str]:
    """Return the packages of infcl that a package names in its imports, also those inside functions."""
    text = "".join(path.read_text() for path in ROOT.glob(f"infcl/{package}/**/*.py"))
    return set(re.findall(r"^\s*(?:from|import) infcl\.(\w+)", text, re.MULTILINE)) - {package}


if __name__ == "__main__":
    main()
