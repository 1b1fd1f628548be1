"""--dry-run: what it prints is the run's plan, what the run would reject it rejects, and it leaves nothing behind."""

from tests.lib.entry import command, forked


def test_dry_run_prints_the_plan_and_leaves_nothing(demo_folder, tmp_path):
    flags = ["--dry-run", "--val-data", f"{demo_folder}/val", "--deepspeed_config", "ds_configs/zero2.json"]
    result = forked(command(demo_folder, tmp_path / "logs", *flags), 1)
    assert result.returncode == 0, result.stdout + result.stderr
    for shown in (
        "32 samples per step = 1 data-parallel rank x 2 micro-batches",
        " GFLOP a step, towers alone",
        "for 1 rank of ",
        "3 = 0.0625 epochs of 48",
        "8 shards",
        "1,536 usable samples; left out by the index: none",
        "peak 0.001 after 5 warm-up steps (167% of the run)",
        "the warm-up takes",
        "image tower 0.28M",
        "ZeRO-0 (stage 2 over one rank)",
        "ZeRO-0*     ZeRO-3 ",
        "retrieval every epoch and at the end",
    ):
        assert shown in result.stdout
    buckets = next(line for line in result.stdout.splitlines() if "gradient buckets" in line)
    assert "MiB" in buckets and "GiB" not in buckets  # on a CPU a small model leaves most of a bucket untouched
    assert not (tmp_path / "logs").exists()


def test_dry_run_rejects_what_the_run_would_reject(demo_folder, tmp_path):
    for flags, reason in (
        (["--batch-size", "4096"], "fewer than one global batch of 8192"),
        (["--lock-text", "--lock-text-unlocked-layers", "5"], "5 unlocked groups: this tower has 3, embeddings, each"),
        (["--tile", "triton", "--device", "cpu"], "tile 'triton' needs features on a GPU"),
        (["--resume", "latst"], "--resume latst: no such folder; give latest, or "),
    ):
        result = forked(command(demo_folder, tmp_path, "--dry-run", *flags), 1)
        assert result.returncode == 2 and reason in " ".join(result.stderr.split()), (flags, result.stderr)
