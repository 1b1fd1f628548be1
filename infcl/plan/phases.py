"""What a step's time is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """`seconds` of work; `exposed` of it lengthen the step, the rest hides behind `behind`."""

    name: str
    seconds: float
    exposed: float
    behind: str = ""


def hidden(name: str, seconds: float, room: float, behind: str) -> Phase:
    """All of it that fits into the `room` seconds of another phase costs nothing."""
    return Phase(name, seconds, max(0.0, seconds - room), behind)
