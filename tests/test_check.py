"""What launch/check.sh finds wrong: said from hosts' reports and from figures, without hosts."""

import json
import subprocess
import sys

import pytest

from infcl.cluster.check import ask, problems
from infcl.cluster.host_report import shared_folder
from infcl.cluster.links import _rounds, extremes, slow_ones
from tests.test_entry import ROOT

HOSTS = {"a": 8, "b": 8, "c": 8}


def report(host: str, **changes) -> dict:
    gpus = [{"name": "H200", "memory_used_mib": 4, "memory_mib": 143771}] * 8
    shared = {"error": None, "free_gb": 500.0, "files": [".check-a", ".check-b", ".check-c"]}
    whole = {"host": host, "skew_s": 0.1, "software": {"torch": "2.11"}, "gpus": gpus, "shared": shared}
    return whole | changes


def found(**changes) -> list[str]:
    """The problems when host b's report is changed so."""
    return problems(HOSTS, {host: report(host, **(changes if host == "b" else {})) for host in HOSTS})


def test_equal_hosts_have_no_problems():
    assert found() == []


MARKS = [".check-a", ".check-b", ".check-c"]
USED = {"name": "H200", "memory_used_mib": 60000, "memory_mib": 143771}
OTHER = {"name": "H100", "memory_used_mib": 4, "memory_mib": 81559}
READ_ONLY = {"error": "Read-only file system", "free_gb": 0.0, "files": []}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"skew_s": 7.2}, "b: its clock is 7 s off"),
        ({"gpus": []}, "b: slots=8, but 0 GPUs"),
        ({"software": {"torch": "2.10"}}, "torch: 2.11 on a, c; 2.10 on b"),
        ({"gpus": [USED] * 8}, "b: GPU 0 is in use (60000 of"),
        ({"gpus": [OTHER] * 8}, "GPUs of different kinds: H100, H200"),
        ({"shared": READ_ONLY}, "b: the shared folder cannot be written: Read-only"),
        ({"shared": {"error": None, "free_gb": 3.0, "files": MARKS}}, "b: 3.0 GB free"),
        ({"shared": {"error": None, "free_gb": 500.0, "files": MARKS[1:2]}}, "b: the folder is not shared: what a, c"),
        ({"error": "ssh failed: no route"}, "b: ssh failed: no route"),
    ],
)
def test_what_is_wrong_is_said_with_the_host(changes, line):
    assert any(line in said for said in found(**changes)), found(**changes)


@pytest.mark.parametrize("ranks", [[0, 8], [0, 8, 16], [0, 4, 8, 12], list(range(0, 72, 8))])
def test_every_two_hosts_meet_once_and_no_host_twice_in_a_round(ranks):
    rounds = _rounds(ranks)
    met = [pair for round_ in rounds for pair in round_]
    assert sorted(met) == [(a, b) for a in ranks for b in ranks if a < b]
    for round_ in rounds:
        assert len({rank for pair in round_ for rank in pair}) == 2 * len(round_)


def figures(**between) -> dict:
    links = {f"{a} - {b}": 10.0 for a in "abcd" for b in "abcd" if a < b} | between
    return {"tflops": {"a:0": 700.0, "a:1": 690.0, "b:0": 710.0}, "within_hosts": {}, "between_hosts": links}


def test_even_figures_name_nobody():
    assert slow_ones(figures()) == []


def test_one_slow_link_is_named_and_a_slow_host_instead_of_its_links():
    assert slow_ones(figures(**{"a - b": 5.0})) == ["slow link: a - b, 5 GB/s (usual 10)"]
    slow_host = figures(**{"a - c": 2.0, "b - c": 2.0, "c - d": 2.0})
    assert slow_ones(slow_host) == ["slow link: all of c, 2 GB/s (usual 10)"]


def test_a_slow_host_of_three_is_named_though_most_links_are_slow():
    links = {"a - b": 10.0, "a - c": 2.0, "b - c": 2.0}
    assert slow_ones(figures() | {"between_hosts": links}) == ["slow link: all of c, 2 GB/s (usual 10)"]


def test_the_least_and_the_median_are_said_of_two_hosts_one_link_too():
    one_link = figures() | {"between_hosts": {"a - b": 0.012}}
    assert slow_ones(one_link) == []
    assert extremes(one_link) == [
        "least tflops: 690 TFLOP/s (a:1), median 700",
        "least between hosts: 0.012 GB/s (a - b), median 0.012",
    ]


def test_a_slow_gpu_is_named():
    result = figures() | {"tflops": {"a:0": 700.0, "a:1": 500.0, "b:0": 710.0}}
    assert slow_ones(result) == ["slow GPU or CPU: a:1, 500 TFLOP/s (usual 700)"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    assert shared_folder(tmp_path)["error"] is None
    assert "No such file" in shared_folder(tmp_path / "none")["error"]


def test_a_host_reports_itself_as_one_line_of_json(tmp_path):
    command = [sys.executable, "-m", "infcl.cluster.host_report", str(tmp_path)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(json.loads(printed)) == {"host", "software", "gpus", "shared"}


@pytest.mark.parametrize(
    ("ssh", "error"),
    [
        ("echo last login: today", "its report is no JSON but ends in 'last login: today'"),
        ("true", "its report is no JSON but ends in ''"),
        ("echo no route >&2; exit 255", "ssh failed: no route"),
        (None, "ssh cannot be run here: No such file or directory"),
    ],
)
def test_a_host_that_sends_no_report_is_a_problem_of_that_host(tmp_path, monkeypatch, ssh, error):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if ssh else str(tmp_path))
    if ssh:
        (tmp_path / "ssh").write_text(f"#!/bin/bash\n{ssh}\n")
        (tmp_path / "ssh").chmod(0o755)
    assert ask("a", tmp_path) == {"error": error}


@pytest.mark.parametrize("minutes", [-1, 0, 1])
def test_a_clock_is_read_by_a_connection_of_its_own(tmp_path, monkeypatch, minutes):
    """The report's own stamp was read, within the seconds that a report takes no error showed."""
    (tmp_path / "ssh").write_text(
        "#!/bin/bash\n"
        f'case "${{@: -1}}" in date*) echo "last login"; date -d "{minutes} min" +%s.%N;; '
        '*) echo "{\\"time\\": $(date +%s.%N)}";; esac\n'
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    skew = ask("a", tmp_path)["skew_s"]
    assert 30 < skew <= 60 if minutes else skew == 0.0


def test_a_clock_that_cannot_be_read_is_a_problem_of_that_host(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text('#!/bin/bash\ncase "${@: -1}" in date*) ;; *) echo "{}";; esac\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "its clock cannot be read" in ask("a", tmp_path)["error"]
