"""Training over several hosts through ssh, as the README says: hosts are network namespaces (hosts.py).

python -m pytest -m cluster -o addopts=''        needs root, iproute2, openssh-server, pdsh (openmpi-bin)
"""

import json
import re
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.lib.checkout import ROOT
from tests.lib.cluster_run import DEEPSPEED, MARKS, flags, launch_script, ranks_on, start, train, train_without_launcher
from tests.lib.entry import forked, losses
from tests.lib.hosts import Hosts
from tests.lib.waiting import finish, wait_until

pytestmark = MARKS


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    with Hosts(2, folder=tmp_path_factory.mktemp("two")) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def hosts_of_ipv6(tmp_path_factory):
    """Two hosts without IPv4."""
    with Hosts(2, ipv6=True, folder=tmp_path_factory.mktemp("ipv6")) as hosts:
        yield hosts


def test_the_ranks_of_the_kubernetes_jobset_s_pods_train_as_one_rank_does(demo_folder, tmp_path, hosts_of_ipv6):
    """Its container's command, flags and variables, with pod name and index as JobSet gives them: a two-level ring."""
    yaml = pytest.importorskip("yaml")
    jobset = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    smaller = {
        "--train-data": f"{demo_folder}/train", "--tokenizer": f"{demo_folder}/tokenizer.model", "--model": "demo",
        "--batch-size": "4", "--global-batch-size": "32", "--logs": str(tmp_path), "--name": "run",
    }  # fmt: skip
    pairs = [flag.partition("=") for flag in pod["args"]]
    words = [f"{name}={smaller.get(name, value)}" if value else name for name, _, value in pairs]
    words += ["--steps=3", "--warmup=1", "--workers=0", "--device=cpu"]
    given = {one["name"]: one["value"] for one in pod["env"] if "value" in one}
    given |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": hosts_of_ipv6[0].name}
    processes = [
        start(hosts_of_ipv6, [*pod["command"], *words], on=rank, **given, PET_NODE_RANK=str(rank)) for rank in (0, 1)
    ]
    results = [finish(process) for process in processes]
    assert [code for code, _ in results] == [0, 0], results
    assert "4 x cpu" in results[0][1] and "2 micro-batches" in results[0][1], results
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["samples_seen"] == 96
    one = forked([*words[words.index("pretrain_clip.py") :], "--name=one", "--batch-size=32"], 1)
    assert one.returncode == 0, one.stderr
    assert losses(tmp_path) == pytest.approx(losses(tmp_path, "one"), rel=1e-5)


def test_two_hosts_without_ipv4_train(demo_folder, tmp_path, hosts_of_ipv6):
    """By the plain deepspeed command with shards named in every way.

    Its words pass through a shell on each host, which expands braces; a file of urls keeps other characters.
    """
    shards = sorted(Path(demo_folder, "train").glob("*.tar"))
    folder, odd = tmp_path / "folder", tmp_path / "it's (1) {a}.tar"
    folder.mkdir()
    links = [odd, folder / shards[1].name, *(tmp_path / f"{number}.tar" for number in range(len(shards) - 2))]
    for link, shard in zip(links, shards):
        link.symlink_to(shard)
    (tmp_path / "urls.txt").write_text(f"{odd}\n")
    plain = flags(demo_folder, tmp_path, "--batch-size", "8", "--dist-timeout", "90", "--aug-cfg", "scale=1.0,1.0")
    braces = f"{tmp_path}/{{0..{len(shards) - 3}}}.tar"
    plain[plain.index("--train-data") + 1 : plain.index("--train-data") + 2] = [braces, f"@{tmp_path}/urls.txt", folder]
    code, output = train(hosts_of_ipv6, plain)
    assert code == 0 and "2 x cpu" in output and len(losses(tmp_path)) == 3, output
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train_data"].endswith(f"::@{tmp_path}/urls.txt::{folder}") and config["aug_cfg"] == {"scale": [1, 1]}
    assert re.search(r"data +1,536 samples", output), output  # all shards


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (openmpi-bin)")
def test_the_openmpi_launcher_trains_too(demo_folder, tmp_path, two_hosts):
    process = launch_script(two_hosts, flags(demo_folder, tmp_path, "--batch-size", "8"), LAUNCHER="openmpi")
    code, output = finish(process)
    assert code == 0 and "2 x cpu" in output, output
    assert len(losses(tmp_path)) == 3


def test_check_finds_equal_hosts_right_and_names_a_dead_one_and_an_unshared_folder(tmp_path, two_hosts):
    shared, hostfile = tmp_path / "shared", tmp_path / "hosts"
    shared.mkdir()
    check = ["bash", "launch/check.sh", hostfile, shared]
    hostfile.write_text(two_hosts.hostfile.read_text())
    code, output = finish(start(two_hosts, check))
    assert code == 0 and "2 hosts, 2 slots, 0 GPUs: right" in output, output
    mounted = two_hosts[1].run(["mount", "-t", "tmpfs", "tmpfs", shared])
    assert mounted.returncode == 0
    hostfile.write_text(hostfile.read_text() + "worker-9 slots=1\n")
    code, output = finish(start(two_hosts, check))
    assert code == 1 and "worker-9: ssh failed" in output
    assert "worker-2: the folder is not shared: files that worker-1 wrote there are missing" in output


def test_three_hosts_of_which_one_has_a_slow_link_resume_evaluate_and_export(demo_folder, tmp_path):
    """Interrupted by a signal to the rank of the slow host; the losses are those of one rank."""
    more = ("--steps", "6", "--accum-freq", "1", "--val-data", f"{demo_folder}/val")
    more += ("--zeroshot-data", f"{demo_folder}/zeroshot", "--dist-timeout", "90")
    arguments = flags(demo_folder, tmp_path, *more, "--batch-size", "8")
    metrics = tmp_path / "run" / "metrics.jsonl"
    with Hosts(3, folder=tmp_path / "hosts") as hosts:
        hosts[2].shape("tbf rate 20mbit burst 32kb latency 400ms")
        process = start(hosts, [*DEEPSPEED, hosts.hostfile, *arguments])
        wait_until(lambda: metrics.exists() and '"step": 2,' in metrics.read_text(), 400, "no second step", process)
        ranks_on(hosts[2])[0].send_signal(signal.SIGUSR1)
        code, output = finish(process)
        assert code == 138 and "SIGUSR1 received at step" in output, output
        assert 2 <= len(losses(tmp_path)) < 6
        hosts[2].shape("pfifo")  # all that follows would take minutes
        ended = [finish(process) for process in train_without_launcher(hosts, [*arguments, "--resume", "latest"])]
    output = ended[0][1]
    assert [code for code, _ in ended] == [0, 0, 0] and "resumed from" in output and "3 x cpu" in output, ended
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"], summary["samples_seen"]) == (3, 6, 6 * 24)
    assert summary["zero_shot_top1"] is not None and summary["image_to_text_r1"] is not None
    assert (tmp_path / "run" / "export" / "open_clip_config.json").is_file()

    one = tmp_path / "one"
    result = forked(flags(demo_folder, one, "--steps", "6", "--accum-freq", "1", "--batch-size", "24"), 1)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.slow  # up to 32 starts; over two hosts the pods' ranks have the ring, over four those of the slow link
@pytest.mark.parametrize("slots", [2, 8])
def test_the_ranks_of_four_hosts_train_as_one_rank_does(demo_folder, tmp_path, slots):
    """Two-level rings of 8 or 32 ranks, the whole trainer; one rank takes the same 64 pairs a step alone."""
    if slots == 8 and (free := psutil.virtual_memory().available / 1e9) < 13:
        pytest.skip(f"32 ranks take 11 GB of memory, 2 GB stay for the rest: 13 GB are needed, {free:.1f} are free")
    more, one = ("--steps", "2", "--accum-freq", "1"), tmp_path / "one"
    many = (*more, "--global-batch-size", "64", "--batch-size", str(16 // slots), "--dist-timeout", "450")
    with Hosts(4, slots=slots, folder=tmp_path / "hosts") as hosts:
        code, output = train(hosts, flags(demo_folder, tmp_path, *many))
    assert code == 0 and f"{4 * slots} x cpu" in output, output
    result = forked(flags(demo_folder, one, *more, "--batch-size", "64"), 1)
    assert result.returncode == 0, result.stderr
    assert len(losses(tmp_path)) == 2 and losses(tmp_path) == pytest.approx(losses(one), rel=1e-5)
