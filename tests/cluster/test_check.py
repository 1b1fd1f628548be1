"""Problems that launch/check.sh reports, found in hosts' reports and in measured rates, without hosts."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from infcl.cluster import check, links
from infcl.cluster.check import fetch, gpus, problems, shared_folder
from infcl.cluster.links import _rounds, extremes, slow_ones
from infcl.parallel.rendezvous import nodes_of
from tests.lib.checkout import ROOT
from tests.lib.launch_scripts import executable
from tests.lib.ranks import run_ranks

HOSTS = {"a": 8, "b": 8, "c": 8}


def report(**changes) -> dict:
    gpus = [{"name": "H200", "memory_used_mib": 4, "memory_mib": 143771}] * 8
    shared = {"error": None, "free_gb": 500.0, "files": [".check-a", ".check-b", ".check-c"]}
    whole = {"skew_s": 0.1, "software": {"torch": "2.11"}, "gpus": gpus, "gpu_error": None, "shared": shared}
    return whole | changes


def found(**changes) -> list[str]:
    """The problems when host b's report is changed so."""
    return problems(HOSTS, {host: report(**(changes if host == "b" else {})) for host in HOSTS})


MARKS = [".check-a", ".check-b", ".check-c"]
USED = {"name": "H200", "memory_used_mib": 60000, "memory_mib": 143771}
OTHER = {"name": "H100", "memory_used_mib": 4, "memory_mib": 81559}
READ_ONLY = {"error": "Read-only file system", "free_gb": 0.0, "files": []}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"skew_s": 7.2}, "b: its clock is 7 s off"),
        ({"gpus": []}, "b: slots=8, but 0 GPUs"),
        ({"gpus": [], "gpu_error": "NVML: no (exit code 9)"}, "b: nvidia-smi fails: NVML: no (exit code 9)"),
        ({"software": {"torch": "2.10"}}, "torch: 2.11 on a, c; 2.10 on b"),
        ({"gpus": [USED] * 8}, "b: GPU 0 is in use (60000 of"),
        ({"gpus": [OTHER] * 8}, "GPUs of different kinds: H100, H200"),
        ({"shared": READ_ONLY}, "b: cannot write to the shared folder: Read-only"),
        ({"shared": {"error": None, "free_gb": 3.0, "files": MARKS}}, "b: 3.0 GB free"),
        (
            {"shared": {"error": None, "free_gb": 500.0, "files": MARKS[1:2]}},
            "b: the folder is not shared: files that a, c wrote",
        ),
        ({"error": "ssh failed: no route"}, "b: ssh failed: no route"),
    ],
)
def test_problems_are_reported_with_the_host_and_equal_hosts_have_none(changes, line):
    assert found() == []
    assert any(line in found_line for found_line in found(**changes)), found(**changes)


@pytest.mark.parametrize("hosts", [[8, 8], [1, 2, 3, 2], [1] * 9])
def test_every_two_hosts_are_paired_once_and_no_host_twice_in_a_round(hosts):
    everyone = [(f"h{host}", local) for host, size in enumerate(hosts) for local in range(size)]
    rounds = [[(everyone[a], everyone[b]) for a, b in pairs] for pairs in _rounds(nodes_of(everyone))]
    met = [(a[0], b[0], a[1]) for pairs in rounds for a, b in pairs]
    numbers = range(len(hosts))
    expected = [
        (f"h{a}", f"h{b}", k) for a in numbers for b in numbers if a < b for k in range(min(hosts[a], hosts[b]))
    ]
    assert sorted(met) == sorted(expected)
    for pairs in rounds:
        assert all(a[1] == b[1] for a, b in pairs)
        busy = {(a[0], b[0]) for a, b in pairs}
        assert len({host for two in busy for host in two}) == 2 * len(busy)


def test_containers_with_the_same_hostname_are_separate_hosts():
    nodes = nodes_of([("box", 0), ("box", 1), ("box", 0), ("box", 1), ("other", 0)])
    names = [name for node in nodes for name in links._names(node, nodes)]
    assert names == ["box@0:0", "box@0:1", "box@2:0", "box@2:1", "other:0"]
    assert sorted(pair for pairs in _rounds(nodes) for pair in pairs) == [(0, 2), (0, 4), (1, 3), (2, 4)]


def figures(hosts: str = "abcd", ranks: int = 2, slow: float = 2.0, at: tuple[str, ...] = ()) -> dict:
    """Return equal rates, except for the links, or all links of the ranks, in `at`."""
    names = [(f"{a}:{k}", f"{b}:{k}") for a in hosts for b in hosts if a < b for k in range(ranks)]
    between = {f"{a} - {b}": slow if {a, b, f"{a} - {b}"} & set(at) else 10.0 for a, b in names}
    return {
        "tflops": {f"{host}:{k}": 700.0 for host in hosts for k in range(ranks)} | {f"{hosts[0]}:{ranks}": 690.0},
        "within_hosts": {},
        "between_hosts": between,
    }


@pytest.mark.parametrize(
    ("hosts", "ranks", "at", "named"),
    [
        ("abcd", 2, (), []),
        ("abcd", 2, ("a:1 - b:1",), ["a:1 - b:1"]),
        ("abcd", 2, ("c:1",), ["all of c:1"]),  # a network card of one GPU
        ("abcd", 2, ("c:0", "c:1"), ["all of c"]),
        ("abc", 1, ("c:0",), ["all of c"]),  # though most links are slow
        ("abcde", 2, ("c:0", "c:1", "a:0", "d:0 - e:0"), ["all of a:0", "all of c", "d:0 - e:0"]),
        ("bacd", 1, ("a:0",), ["all of a"]),
        ("acd", 1, ("a:0",), ["all of a:0"]),  # the first host has another rank, without a link
        ("ab", 8, ("a:5",), ["a:5 - b:5"]),  # with two hosts it is unknown whose card it is
        ("ab", 8, tuple(f"a:{k}" for k in range(8)), []),  # all alike
    ],
)
def test_a_slow_link_is_reported_and_a_slow_rank_or_host_instead_of_its_links(hosts, ranks, at, named):
    found = slow_ones(figures(hosts, ranks, at=at))
    assert found == [f"slow link: {name}, 2 GB/s (usual 10)" for name in named]


def test_a_slow_gpu_is_reported():
    result = figures("ab") | {"tflops": {"a:0": 700.0, "a:1": 500.0, "b:0": 710.0, "b:1": 700.0}}
    assert slow_ones(result) == ["slow GPU or CPU: a:1, 500 TFLOP/s (usual 700)"]


def test_minimum_and_median_are_printed_for_the_only_link_of_two_hosts():
    one_link = figures("ab", 1, slow=0.012, at=("a:0",))
    assert slow_ones(one_link) == []
    assert extremes(one_link) == [
        "least tflops: 690 TFLOP/s (a:1), median 700",
        "least between hosts: 0.012 GB/s (a:0 - b:0), median 0.012",
    ]


def measured_on_two_hosts(rank, world_size):
    """Measure two hosts of two ranks; the clock of the first host's second rank runs ten times as fast."""
    import itertools
    from types import SimpleNamespace
    from unittest import mock

    from infcl.parallel import Parallel

    ticks = (tick * (10 if rank == 1 else 1) for tick in itertools.count())
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    host, device = f"host-{rank // 2}", torch.device("cpu")
    with (
        mock.patch.object(links, "time", clock),
        mock.patch.object(links.socket, "gethostname", lambda: host),
        mock.patch.object(links, "_CPU", {"side": 8, "megabytes": 1}),
    ):
        return links.measure(Parallel(rank, world_size, rank % 2, device, dist.group.WORLD))


def test_all_ranks_of_two_hosts_are_measured_at_once_and_the_slow_one_is_reported():
    results, rate, product = run_ranks(measured_on_two_hosts, 4), 2**20 / 1e9, 2 * 8**3 / 1e12
    all_reduce, slower = (results[rank].pop("all_reduce") for rank in (0, 1))
    assert all_reduce == pytest.approx(1.5 * rate) and slower == pytest.approx(0.15 * rate)
    assert results[0] == results[1]
    assert results[0] == {
        "tflops": {"host-0:0": product, "host-0:1": product / 10, "host-1:0": product, "host-1:1": product},
        "within_hosts": {"host-0:0 - host-0:1": rate, "host-1:0 - host-1:1": rate},
        "between_hosts": {"host-0:0 - host-1:0": rate, "host-0:1 - host-1:1": rate / 10},
    }
    found = slow_ones(results[0])
    assert [line.partition(",")[0] for line in found] == [
        "slow GPU or CPU: host-0:1", "slow link: host-0:1 - host-1:1",
    ]  # fmt: skip


def test_hosts_with_the_same_hostname_do_not_mistake_their_own_marks_for_each_others(tmp_path):
    """Marks have the hostfile's names. Otherwise clones of one image, each with its own folder, would see all marks."""
    reports = {}
    for name in ("10.0.0.1", "10.0.0.2"):
        (tmp_path / name).mkdir()
        reports[name] = report(shared=shared_folder(tmp_path / name, name))
    found = problems(dict.fromkeys(reports, 8), reports)
    assert [line for line in found if "not shared" in line] == [
        "10.0.0.1: the folder is not shared: files that 10.0.0.2 wrote there are missing",
        "10.0.0.2: the folder is not shared: files that 10.0.0.1 wrote there are missing",
    ]


@pytest.mark.parametrize(
    ("nvidia_smi", "expected"),
    [
        (None, ([], None)),
        ("echo 'NVIDIA-SMI has failed'; exit 9", ([], "NVIDIA-SMI has failed (exit code 9)")),
        ("echo 'H100, PCIe, 4, 81559'", ([{"name": "H100, PCIe", "memory_used_mib": 4, "memory_mib": 81559}], None)),
    ],
)
def test_a_failing_nvidia_smi_is_not_a_host_without_gpus(tmp_path, monkeypatch, nvidia_smi, expected):
    """On all hosts at once it would look like hosts without GPUs."""
    if nvidia_smi:
        executable(tmp_path / "nvidia-smi", nvidia_smi)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if nvidia_smi else str(tmp_path))
    assert gpus() == expected


def test_hosts_without_gpus_are_right_only_for_ranks_on_cpus(tmp_path, monkeypatch, capsys):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    folder = {"error": None, "free_gb": 500.0, "files": [".check-a", ".check-b"]}
    monkeypatch.setattr(check, "fetch", lambda host, shared: report(gpus=[], shared=folder))
    assert check.main([str(tmp_path / "hosts"), str(tmp_path)]) == 0
    assert capsys.readouterr().out == "2 hosts, 2 slots, 0 GPUs: right for ranks on CPUs (no host has nvidia-smi)\n"


def test_a_host_reports_itself_as_one_line_of_json(tmp_path):
    command = [sys.executable, "-m", "infcl.cluster.check", "--report", "a", str(tmp_path)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(json.loads(printed)) == {"software", "gpus", "gpu_error", "shared"}
    assert (tmp_path / ".check-a").is_file()


@pytest.mark.parametrize(
    ("ssh", "error"),
    [
        ("echo last login: today", "cannot read its report or clock, 'last login: today' and 'last login: today'"),
        (
            'case "${@: -1}" in date*) ;; *) echo "{}";; esac',
            "cannot read its report or clock, '{}' and ''",
        ),
        ("echo no route >&2; exit 255", "ssh failed: no route"),
        (None, "ssh cannot be run here: No such file or directory"),
    ],
)
def test_a_host_that_sends_no_report_is_a_problem_of_that_host(tmp_path, monkeypatch, ssh, error):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if ssh else str(tmp_path))
    if ssh:
        executable(tmp_path / "ssh", ssh)
    assert fetch("a", tmp_path) == {"error": error}


@pytest.mark.parametrize("minutes", [-1, 0, 1])
def test_a_clock_is_read_over_a_separate_connection(tmp_path, monkeypatch, minutes):
    """A time stamp in the report would hide errors as long as the report takes."""
    script = f'case "${{@: -1}}" in date*) echo "last login"; date -d "{minutes} min" +%s.%N;; '
    executable(tmp_path / "ssh", script + '*) echo "{\\"time\\": $(date +%s.%N)}";; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    skew = fetch("a", tmp_path)["skew_s"]
    assert 30 < skew <= 60 if minutes else skew == 0.0
