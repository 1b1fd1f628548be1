"""Problems that launch/check.sh reports, found in hosts' reports, without hosts."""

import pytest

from infcl.cluster.check import fetch, gpus, problems, shared_folder
from tests.lib.launch_scripts import executable

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


@pytest.mark.parametrize(
    ("ssh", "error"),
    [
        ("echo last login: today", "cannot read its report or clock, 'last login: today' and 'last login: today'"),
        ('case "${@: -1}" in date*) ;; *) echo "{}";; esac', "cannot read its report or clock, '{}' and ''"),
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
