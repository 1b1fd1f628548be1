"""open_clip's trainer with the ring loss. Run this module instead of `open_clip_train.main`.

    torchrun --nproc-per-node 8 -m infcl.integrations.open_clip --model ViT-B-32 --batch-size 4096 ...

In your own script, call `use_ring_loss()` before `open_clip_train.main.main(arguments)`. The gradients equal those of
--local-loss --gather-with-grad, with or without these flags. Memory is linear in the batch. --siglip selects the
sigmoid loss. Tested with open_clip_torch 3.3.
"""

import argparse
import sys

from torch import nn

from infcl.loss.contrastive import InfCLLoss, SigLipLoss
from infcl.models.open_clip_config import import_open_clip
from infcl.parallel.process import report_mistake


def use_ring_loss() -> None:
    """Replace the loss of open_clip_train.main with `create_loss` of this module.

    Raises:
        ValueError: open_clip_train, or a package that it needs, is not installed.
    """
    try:
        from open_clip_train import main
    except ImportError as error:
        raise ValueError(f"open_clip's trainer needs pip install 'open_clip_torch[training]' ({error})") from error
    main.create_loss = create_loss


def create_loss(args: argparse.Namespace) -> nn.Module:
    """Create the loss for open_clip_train's parsed flags.

    Raises:
        ValueError: the flags ask for distillation, a CoCa model or --horovod, which the ring loss does not support.
    """
    if args.distill or "coca" in args.model.lower():
        kind = "--distill-model" if args.distill else f"--model {args.model}"
        instead = "; pretrain_clip.py of infcl distils with it" if args.distill else ""
        raise ValueError(
            f"{kind}: open_clip's loss has another term than the contrastive one, which the ring lacks{instead}"
        )
    place = {"rank": args.rank, "world_size": args.world_size}
    if args.siglip:
        return SigLipLoss(**place)
    return InfCLLoss(local_loss=True, gather_with_grad=True, use_horovod=args.horovod, **place)


def main(arguments: list[str]) -> int:
    """Run open_clip's trainer with the ring loss. Return 2 for a usage error, which is reported in one line."""
    program = "infcl.integrations.open_clip"
    try:
        import_open_clip(program)
        use_ring_loss()
    except ValueError as error:
        return report_mistake(program, error)
    sys.modules["open_clip_train.main"].main(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
