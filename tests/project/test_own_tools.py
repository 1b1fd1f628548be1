"""The tests' own tools: forked ranks are like launched ones, and a missing program is reported."""

import random

import numpy
import pytest

from tests.conftest import LONGEST
from tests.lib import hosts
from tests.lib.checkout import ROOT
from tests.lib.cluster_run import small_disk
from tests.lib.ranks import run_ranks

pytest_plugins = ["pytester"]


def draw_and_seed(rank: int, world_size: int) -> tuple[float, float]:
    drawn = numpy.random.random(), random.random()
    numpy.random.seed(0), random.seed(0)
    return drawn


def test_ranks_draw_their_own_random_numbers_whatever_was_seeded_before():
    run_ranks(draw_and_seed, 2)
    first, second = run_ranks(draw_and_seed, 2)
    assert first[0] != second[0] and first[1] != second[1]


def test_the_files_that_run_first_exist():
    assert {f"test_{name}" for name in LONGEST.split()} <= {path.stem for path in ROOT.glob("tests/*/test_*.py")}


def test_with_skips_fail_a_skip_fails_and_an_expected_failure_does_not(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.xfail
        def test_fails():
            assert False

        @pytest.mark.xfail(run=False)
        def test_is_not_run():
            assert False

        def test_is_skipped():
            pytest.skip("no cable")
        """
    )
    result = pytester.runpytest_inprocess("-p", "tests.conftest", "--skips-fail")
    result.assert_outcomes(xfailed=2, failed=1)
    result.stdout.fnmatch_lines(["*no cable (--skips-fail)*"])


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("no root", "tests over several hosts: 0 ran, 3 were skipped (no root)"),
        (None, "tests over several hosts: 2 ran, 1 were skipped (no mpirun)"),
    ],
)
def test_the_last_line_counts_the_tests_over_several_hosts(pytester, monkeypatch, missing, line):
    monkeypatch.setattr(hosts, "missing", lambda: missing)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.cluster
        def test_passes(): pass

        @pytest.mark.cluster
        def test_fails(): assert False

        @pytest.mark.cluster
        def test_is_skipped(): pytest.skip("no mpirun")

        def test_of_one_host(): pass
        """
    )
    assert pytester.runpytest_inprocess("-p", "tests.conftest").stdout.lines[-1] == line


def test_a_small_disk_skips_where_there_is_no_mount(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="not installed: mount, umount"), small_disk(tmp_path / "disk", 1):
        pass
