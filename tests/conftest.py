"""Fixtures that several test files share, and what makes a test's surroundings the same everywhere."""

import os
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

# Variables of a launcher, a scheduler, a git hook or a terminal around the suite are not for the programs of its tests.
_FROM_OUTSIDE = re.compile(
    "(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_SIZE|MASTER_(ADDR|PORT)|(OMPI|PMIX?|SLURM|TORCHELASTIC)_.*"
    "|GIT_(DIR|WORK_TREE|INDEX_FILE)|COLUMNS|LINES|(FORCE|NO)_COLOR|CLICOLOR.*|TRITON_INTERPRET"
)
if len(os.fsencode(tempfile.gettempdir())) > 75:  # too long for the sockets of Python's process pools
    os.environ["TMPDIR"], tempfile.tempdir = "/tmp", None
_home = None
if not os.access(os.path.expanduser("~"), os.W_OK):  # compilers keep their caches there
    _home = tempfile.TemporaryDirectory(prefix="home-")
    os.environ["HOME"] = _home.name
for _name in filter(_FROM_OUTSIDE.fullmatch, list(os.environ)):
    del os.environ[_name]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more would wait for each other: the ranks of tests have the cores


# These files run first, in this order, so that no worker of `make test` has a long file left at the end.
LONGEST = (
    "faults engine attention triton_tile trainer open_clip_models megatron_trainer entry loader checkpoint resume"
    " contrastive_step partly_used sentence_transformers doors losses offload evaluate_command engine_zero3"
    " ema plan_memory finite observers diagnostics torchrun supervise open_clip"
)


def pytest_collection_modifyitems(items):
    """Make the cases of a table after its `first` ones `long`, and sort the files."""
    seen = Counter()
    for item in items:
        if mark := item.get_closest_marker("first"):
            table = item.nodeid.partition("[")[0]
            seen[table] += 1
            if seen[table] > mark.args[0]:
                item.add_marker("long")
    order = {f"test_{name}.py": position for position, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_a_file():
    yield
    if ranks := sys.modules.get("tests.lib.ranks"):
        ranks.end_ranks()


def pytest_addoption(parser):
    parser.addoption("--skips-fail", action="store_true", help="a skipped test fails: nothing may be missing")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = not_skipped((yield), item.config)
    report.over_hosts = item.get_closest_marker("cluster") is not None  # a report's keywords hold its folder too
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return not_skipped((yield), collector.config)


def not_skipped(report, config):
    if report.skipped and not hasattr(report, "wasxfail") and config.getoption("skips_fail"):
        why = report.longrepr if isinstance(report.longrepr, tuple) else (report.longrepr,)
        report.outcome, report.longrepr = "failed", f"{': '.join(map(str, why))} (--skips-fail)"
    return report


def pytest_runtest_setup(item):
    """Skip tests over several hosts, with the reason, where hosts cannot be made. Checked when the first one runs."""
    if item.get_closest_marker("cluster"):
        from tests.lib.hosts import missing

        if reason := missing():
            pytest.skip(reason)


def pytest_unconfigure(config):
    """Print a last line that counts the tests over several hosts, because skipped ones look like success."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return

    def reports(*outcomes):
        found = [report for outcome in outcomes for report in reporter.stats.get(outcome, ())]
        return [report for report in found if getattr(report, "over_hosts", False)]

    ran, skipped = {report.nodeid for report in reports("passed", "failed", "error")}, reports("skipped")
    if ran or skipped:
        why = sorted({str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped})
        line = f"tests over several hosts: {len(ran)} ran, {len(skipped)} were skipped"
        reporter.write_line(line + (f" ({'; '.join(why)})" if why else ""))


@pytest.fixture(autouse=True)
def _process_groups_end_with_their_test(request):
    """Fail a test that leaves a process group, which later tests would inherit. GPU tests share one, for DeepSpeed."""
    import torch.distributed as dist

    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before and not request.node.get_closest_marker("gpu"):
        dist.destroy_process_group()
        pytest.fail("this test left a process group behind: run_ranks has processes with one")


@pytest.fixture(autouse=True)
def _signals_are_handled_as_before():
    """A program that a test runs in this process may set handlers; processes that later tests fork would have them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _from_the_repository():
    """Run in the repository root, because presets are given by paths below it."""
    before = Path.cwd()
    os.chdir(Path(__file__).parent.parent)
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def _the_same_draws_in_any_order():
    import torch

    torch.manual_seed(0), random.seed(0)


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory):
    """Return the folder of the embedded data set with 1,536 training pairs: shards, tokenizer, evaluation sets."""
    from infcl.data.demo import prepare_demo

    return prepare_demo(tmp_path_factory.mktemp("data") / "demo", num_train=1536)


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory):
    """Return the path of a small BPE model, trained on the captions of tests/lib/small_clip.py."""
    from infcl.data.tokenizer.learn import train_tokenizer
    from tests.lib.small_clip import CAPTIONS

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(CAPTIONS, path, 300, "bpe", num_threads=1)
    return path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from tests.lib.small_loader import caption_tokenizer

    return caption_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Return the URL of a folder of five shards with 53 samples; one shard is empty. Tests do not write to it."""
    from tests.lib.shard_files import write_shards

    return write_shards(tmp_path_factory.mktemp("shards"), [7, 19, 0, 4, 23])
