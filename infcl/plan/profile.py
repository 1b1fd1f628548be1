"""Hardware profiles: sustained rates of GPUs and of the links between nodes, as JSON in profiles/.

`python -m infcl.plan --measure FILE` writes the profile of a machine's GPU.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infcl.config.json_file import read_record

_PROFILES = Path(__file__).parent / "profiles"
USABLE = 0.94  # share of a GPU's memory for tensors: the rest is the CUDA context, NCCL, libraries and fragments


class _Figures:
    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, float) and not (0 < value < float("inf") or (value == 0 and name == "latency_us")):
                raise ValueError(f"{name} is {value}, not a number above 0")


@dataclass(frozen=True)
class Gpu(_Figures):
    """Sustained rates, not peaks, of a GPU and its host."""

    name: str
    memory_gib: float  # device memory
    matmul_tflops: float  # rate of an 8192^3 BF16 GEMM
    tower_efficiency: float  # share of matmul_tflops that towers with eager blocks reach
    compiled_efficiency: float  # share of matmul_tflops that towers with compiled blocks reach
    loss_efficiency: float  # share of matmul_tflops that the tiled loss reaches, on 8 b^2 D flops
    hbm_gbs: float  # GB/s of its memory
    link_gbs: float  # GB/s in each direction to the other GPUs of the node (NVLink)
    pcie_gbs: float  # GB/s to host memory
    source: str  # which figures are measured, and which are estimated
    fp32_tflops: float = 50.0  # rate of FP32 GEMMs, without tensor cores
    host_factor: float = 1.0  # time its host takes to issue work, relative to the host of the measured H200s
    bf16: bool = True  # whether its tensor cores compute BF16; if not, matmul_tflops is the rate of FP16

    @property
    def usable_bytes(self) -> float:
        return self.memory_gib * 2**30 * USABLE


@dataclass(frozen=True)
class Link(_Figures):
    """A GPU's link to other nodes: its share of the network cards."""

    name: str
    gbs: float  # GB/s in each direction, per GPU
    latency_us: float  # per message
    source: str


Profile = TypeVar("Profile", Gpu, Link)


def load_gpu(name_or_path: str) -> Gpu:
    """Load the profile of a GPU: a name in profiles/gpus, or a JSON file that `--measure` wrote.

    Raises:
        ValueError: there is no such profile, or a figure is missing or invalid.
    """
    return _load("gpu", name_or_path, Gpu)


def load_link(name_or_path: str) -> Link:
    """Load the profile of a link from profiles/links or a JSON file of this form; raises as `load_gpu`."""
    return _load("link", name_or_path, Link)


def _load(kind: str, name: str, profile: type[Profile]) -> Profile:
    path = Path(name) if name.endswith(".json") else _PROFILES / f"{kind}s" / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in (_PROFILES / f"{kind}s").glob("*.json")))
        raise ValueError(f"--{kind} {name}: no such profile (known: {known}; or a JSON file)")
    try:
        return read_record(path, profile)
    except ValueError as error:
        raise ValueError(f"--{kind} {error}") from None
