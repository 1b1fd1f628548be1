"""Documents with regions that a program fills; what lies around them is written by hand.

<!-- results: table-3 -->
...made anew...
<!-- end -->
"""

import re
from collections.abc import Callable, Mapping

_REGION = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, regions: Mapping[str, Callable[[], str]]) -> str:
    """`text` with each region's content replaced by what its function returns.

    ValueError naming a region that nothing fills, or one that is not closed.
    """

    def replace(match: re.Match) -> str:
        opening, name, closing = match.groups()
        if name not in regions:
            raise ValueError(f"no function fills the region {name!r}; there are {', '.join(sorted(regions))}")
        return f"{opening}{regions[name]().strip()}\n{closing}"

    if text.count("<!-- results:") != len(_REGION.findall(text)):
        raise ValueError("a region has no <!-- end -->, or its name is not letters, digits and dashes")
    return _REGION.sub(replace, text)


def names(text: str) -> list[str]:
    return [name for _, name, _ in _REGION.findall(text)]
