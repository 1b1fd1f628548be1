"""The exact loss of the global batch in a plain DistributedDataParallel loop.

    python examples/loss_in_ddp.py                      two CPU processes over gloo, a few seconds
    torchrun --nproc-per-node 4 examples/loss_in_ddp.py --device cuda

Each rank passes its own features to InfCLLoss. The program checks that the averaged gradient of the towers is that of
one process with the complete batch, then trains.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from infcl import InfCLLoss


class TwoTowers(torch.nn.Module):
    """Return L2-normalised features [b, 32] of both sides and the multiplicative scale."""

    def __init__(self):
        super().__init__()
        self.image = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.text = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.log_scale = torch.nn.Parameter(torch.tensor(2.66))  # ln(1 / 0.07)

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.log_scale.exp()


def batch(step: int, samples: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same global batch on every rank: both sides are noisy views of one hidden vector."""
    generator = torch.Generator().manual_seed(step)
    hidden = torch.randn(samples, 12, generator=generator)
    sides = [hidden @ torch.randn(12, width, generator=torch.Generator().manual_seed(width)) for width in (48, 24)]
    return tuple(side + 0.1 * torch.randn(side.shape, generator=generator) for side in sides)


def train(rank: int, world_size: int, device: str, steps: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(TwoTowers().to(device))
    loss_fn = InfCLLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=world_size)
    check_gradient(model, loss_fn, rank, world_size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        images, texts = (side.to(device).chunk(world_size)[rank] for side in batch(step))
        loss = loss_fn(*model(images, texts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3}  loss {loss.item() / world_size:.4f}")


def check_gradient(model, loss_fn, rank: int, world_size: int, device: str) -> None:
    """Compare DDP's gradient with that of the dense loss of the complete batch."""
    images, texts = (side.to(device) for side in batch(0))
    loss_fn(*model(images.chunk(world_size)[rank], texts.chunk(world_size)[rank])).backward()
    own = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    image_features, text_features, scale = model.module(images, texts)
    logits, labels = scale * image_features @ text_features.T, torch.arange(len(images), device=device)
    dense = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    expected = torch.cat([grad.flatten() for grad in torch.autograd.grad(dense, list(model.module.parameters()))])
    error = (own - expected).norm() / expected.norm()
    if rank == 0:
        print(f"gradient of {world_size} ranks against one process: relative error {error:.1e}")
    if error > 1e-3:
        raise RuntimeError(f"gradients differ by {error:.1e}")
    model.zero_grad()


def worker(rank: int, world_size: int, device: str, steps: int) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    train(rank, world_size, device, steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=61)
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # torchrun
        worker(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), arguments.device, arguments.steps)
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29531")}
        mp.spawn(worker, args=(2, arguments.device, arguments.steps), nprocs=2)
