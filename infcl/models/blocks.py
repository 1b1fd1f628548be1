"""Repeated blocks of a model's towers."""

from collections import Counter

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return a model's repeated blocks, in order.

    A block contains other modules and shares an nn.ModuleList or nn.Sequential with another module of its class. Of
    nested blocks only the innermost count, such as the blocks of a ConvNeXt's stages.
    """
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(child) for child in module)
            found |= {m: None for m in module if kinds[type(m)] > 1 and next(m.children(), None) is not None}
    return [block for block in found if not any(below in found for below in block.modules() if below is not block)]
