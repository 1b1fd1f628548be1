"""The step on a GPU: pixels that travel during computation, fp16's skipped steps, every option on."""

import gc
import json
import math

import pytest
import torch

from infcl.models.packing import longest
from infcl.report import read_metrics
from infcl.step.batches import StepBatches
from infcl.step.pixels import PixelCache
from tests.lib.entry import alone, command, losses
from tests.lib.gpu_steps import steps_without_waiting
from tests.lib.step_oracle import EPS, LR, ToyCLIP, global_batch, worst_error

pytestmark = pytest.mark.gpu

M, IMAGES = 9, (16, 3, 224, 224)


def micro_batch(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    images = torch.randint(256, IMAGES, dtype=torch.uint8, generator=generator).pin_memory()
    return {"images": images, "texts": torch.full((16, 4), index), "ids": torch.arange(16) + 16 * index}


@pytest.mark.parametrize(("kept", "on_gpu"), [(0, False), (4, False), (M, False), (M, True)])
def test_pixels_are_not_overwritten_while_they_are_used(kept, on_gpu):
    """The compute stream is kept busy, so that the host runs far ahead of what is read from the slots. Texts are on the
    host for a moment only, as packed ones are.
    """
    device = torch.device("cuda")
    pixels = PixelCache(device, IMAGES, replayed=M - 1, kept=kept, on_gpu=on_gpu)
    batches = StepBatches(pixels, M, device=device, texts=lambda texts: {"texts": texts.pin_memory()})
    assert on_gpu or not pixels.kept.numel() or pixels.kept.is_pinned()
    for _ in range(2):
        batches.begin(micro_batch(i) for i in (*range(M), *pixels.again))
        seen = []
        for order in (range(M), range(M - 1)):
            for index in order:
                batch = batches[index]
                torch.cuda._sleep(20_000_000)
                assert batch["texts"].is_cuda
                seen.append((batch["images"].clone(), batch["texts"].clone()))
        batches.check()
        for index, (images, texts) in zip([*range(M), *range(M - 1)], seen, strict=True):
            expected = micro_batch(index)
            assert torch.equal(images.cpu(), expected["images"]) and torch.equal(texts.cpu(), expected["texts"]), index


def test_fp16_overflows_skip_steps_and_leave_everything_consistent(tmp_path):
    """From a loss scale of 2^32 the first steps overflow; the applied ones are those of a float64 run without them."""
    from infcl.checkpoint.load import full_weights
    from infcl.config import BatchPlan, TrainConfig
    from infcl.parallel import init_parallel
    from tests.lib.engine_steps import TOY, accumulate, one_process
    from tests.lib.specs import engine_of

    preset = tmp_path / "preset.json"
    fp16 = {"enabled": True, "initial_scale_power": 32, "loss_scale_window": 1000, "hysteresis": 1, "min_loss_scale": 1}
    preset.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": fp16}))
    parallel, batch = init_parallel("cuda"), BatchPlan(1, 3, 5)
    config = TrainConfig(
        deepspeed_config=str(preset), lr=LR, eps=EPS, wd=0.0, dataset_type="synthetic", train_num_samples=1
    )
    engine = engine_of(ToyCLIP(), config, parallel, batch)
    images, texts = global_batch(15)
    applied, scales = [], []
    for _ in range(40):
        accumulate(engine, list(zip(images.cuda().split(5), texts.cuda().split(5))), [0] * 3)
        scales.append(engine.loss_scale())
        applied.append(engine.step(LR))
    counters = engine.counters()
    assert not applied[0] and applied[-1], "the scale must come down"
    assert applied == sorted(applied) and scales[0] > scales[-1]
    assert counters["optimizer_step"] == sum(applied) and counters["skipped_steps"] == 40 - sum(applied)
    assert counters["global_steps"] == 40
    subject = TOY._replace(model=ToyCLIP, numbers=[1] * sum(applied), grad_clip_norm=None, wd=0.0, ceiling=math.inf)
    expected = one_process(subject, 1).state  # of this batch, which is the first
    got = {name: value.cpu() for name, value in full_weights(engine, keep=True).items()}
    assert worst_error(got, expected) < 2e-2


@pytest.mark.parametrize("stage", [1, 3])
def test_the_host_never_waits_for_the_gpu_between_the_first_encoding_and_the_last_backward(stage, tmp_path):
    """On one GPU; over several: test_multigpu. In ZeRO-2 (overlap_comm) DeepSpeed waits once a backward.

    Under ZeRO-3 of its sums of gradients alone: parameters as small as these are gathered behind the update.
    """
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps({"zero_optimization": {"stage": stage, "overlap_comm": stage == 3}}))
    steps_without_waiting(preset, last_backward=stage != 3)


def trained(demo_folder, logs, opt: str) -> tuple[list[float], float]:
    """-> (losses of twenty steps, bytes of optimizer state an element)"""
    from tests.lib.training import demo_config, new_trainer

    config = demo_config(demo_folder, logs, opt=opt, precision="bf16", compile_blocks="off")
    trainer = new_trainer(config, "cuda")
    trainer.fit()
    states = trainer.engine.state.optimizer.state
    size = sum(_bytes(value) for state in states.values() for key, value in state.items() if key != "step")
    records = read_metrics(trainer.run.metrics, "train")
    return [record["loss"] for record in records], size / sum(tensor.numel() for tensor in states)


def _bytes(value) -> int:
    return sum(x.nbytes for x in ([value] if isinstance(value, torch.Tensor) else [value.codes, value.largest]))


def test_adamw_in_8_bits_trains_as_adamw_does_with_a_quarter_of_its_state(demo_folder, tmp_path):
    """That it resumes exactly: test_deterministic."""
    pytest.importorskip("bitsandbytes")
    plain, plain_bytes = trained(demo_folder, tmp_path / "plain", "adamw")
    losses, state_bytes = trained(demo_folder, tmp_path / "8 bits", "adamw8bit")
    worst = max(abs(a / b - 1) for a, b in zip(losses, plain))
    print(f"state: {plain_bytes:.3f} and {state_bytes:.3f} bytes an element; losses differ by {worst:.2e} at most")
    assert losses == pytest.approx(plain, rel=2e-2) and losses != plain and plain[-1] < plain[0] - 0.5
    assert plain_bytes == 8 and 2 < state_bytes < 2.1


@pytest.mark.parametrize(("checkpointing", "size"), [(False, 512), (True, 2048)])
def test_auto_keeps_the_graphs_that_memory_has_room_for_and_leaves_the_headroom(tmp_path, checkpointing, size):
    """All four of ViT-B-32 on an empty GPU; two where tensors lie on it that leave room for two and a half.

    It wants the GPU alone: memory that other processes take or free in the meantime changes what is kept.
    """
    from infcl.train import resident

    roomy = synthetic_trainer(tmp_path / "roomy", checkpointing, size)
    assert roomy.resident == 4
    batch, cfg, parallel = roomy.batch, roomy.model_config, roomy.parallel
    texts = roomy.texts_for_model(longest(cfg.text_cfg, batch.micro_batch_size))
    graph = resident._graph_bytes(roomy.engine, texts, batch.micro_batch_size, cfg, parallel.device)
    room = resident._free_bytes(parallel.device)
    room -= resident._needed_bytes(roomy.spec, roomy.engine, cfg, parallel, graph, 0)
    roomy.metrics.close()
    roomy.engine.engine.destroy()
    del roomy
    gc.collect()

    others = torch.empty(int(room - 2.5 * graph), dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    narrow = synthetic_trainer(tmp_path / "narrow", checkpointing, size)
    assert narrow.resident == 2
    with narrow.signals:
        narrow._train()
    records = read_metrics(narrow.run.metrics, "train")
    narrow.metrics.close()
    narrow.engine.engine.destroy()
    assert len(records) == 3 and all(math.isfinite(record["loss"]) for record in records)
    total = torch.cuda.mem_get_info()[1]
    peak = torch.cuda.max_memory_allocated()
    print(f"others {others.nbytes / 2**30:.1f}, a graph {graph / 2**30:.2f}, peak {peak / 2**30:.1f} GiB")
    assert peak <= (1 - resident.HEADROOM) * total


def synthetic_trainer(logs, checkpointing: bool, size: int):
    from infcl.config import TrainConfig
    from tests.lib.training import new_trainer

    config = TrainConfig(
        dataset_type="synthetic", train_num_samples=16384, model="ViT-B-32", batch_size=size, accum_freq=4, steps=3,
        grad_checkpointing=checkpointing, compile_blocks="off", save_frequency=0, report_to="none", logs=str(logs),
        name="run",
    )  # fmt: skip
    return new_trainer(config, "cuda")


OPTIONS = {
    "compiled": ["--compile-blocks", "on"],
    "compiled bf16": ["--compile-blocks", "on", "--precision", "bf16"],
    "all": [
        *("--compile-blocks", "on", "--grad-checkpointing", "--resident-micro-batches", "2"),
        *("--pixel-cache-gb", "0"),
    ],
    "auto": ["--resident-micro-batches", "auto", "--pixel-cache-gb", "gpu"],
    "zero3": ["--deepspeed_config", "ds_configs/zero3.json", "--compile-blocks", "on", "--grad-checkpointing"],
}


def losses_with(demo_folder, logs, name, flags) -> list[float]:
    fixed = ["--name", name, "--steps", "12", "--device", "cuda", "--accum-freq", "4", "--save-frequency", "0"]
    result = alone(command(demo_folder, logs, *fixed, *flags), environment={})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "run eagerly" not in result.stderr, "the compiler failed"
    kept = 4 if "auto" in flags else 2 if "2" in flags else 1  # a GPU has room for all of the demo's
    assert f"cached activations of {kept} micro-batch" in result.stdout + result.stderr
    return losses(logs, name)


@pytest.mark.parametrize("option", OPTIONS)
def test_no_tuning_option_changes_the_curve(demo_folder, tmp_path, option):
    """Against eager fp32 parameters under bf16 autocast and torch's attention, over twelve steps."""
    expected = losses_with(demo_folder, tmp_path, "plain", ["--compile-blocks", "off", "--attention", "torch"])
    assert losses_with(demo_folder, tmp_path, "option", OPTIONS[option]) == pytest.approx(expected, rel=2e-2)
