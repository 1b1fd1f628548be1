"""Hostfiles: errors are reported with their line; which hosts a run continues with."""

import pytest

from infcl.cluster.hostfile import choose_alive, main, read_hostfile


def written(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_hosts_come_in_the_files_order_with_comments_left_out(tmp_path):
    path = written(tmp_path, "# the rack\nworker-2 slots=8\n\n10.0.0.1\tslots=4  # old\nfe80::1 slots=1\n")
    assert list(read_hostfile(path).items()) == [("worker-2", 8), ("10.0.0.1", 4), ("fe80::1", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=8\nb\n", "line 2: 'b': after the host comes slots=N"),
        ("a slots=8\n\nb slots=x\n", "line 3: 'b slots=x': after the host"),
        ("a slots=0\n", "line 1: 'a slots=0': slots must be at least 1"),
        ("a slots=8 port=22\n", "line 1: .*nothing else"),
        ("a slots=8\nb slots=4\na slots=8\n", "line 3: a occurs twice"),
        ("-oProxyCommand=x slots=1\n", "line 1: .*a host is a name or address"),
        ("a;reboot slots=1\n", "line 1: .*a host is a name or address"),
        ("# nothing\n", "has no host"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(tmp_path, text, message, capsys):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        read_hostfile(path)
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err.startswith("hostfile: ")


HOSTS = {"a": 8, "b": 8, "c": 8, "d": 8}
UNEQUAL, LARGE_FIRST = {"a": 6, "b": 8, "c": 8}, {"a": 16, "b": 4, "c": 4}


@pytest.mark.parametrize(
    ("hosts", "alive", "minimum", "batch", "chosen"),
    [
        (HOSTS, "acd", 3, None, "acd"),  # all that answer
        (HOSTS, "acd", 2, 4096, "ac"),  # as many as divide the batch
        (HOSTS, "abd", 3, 49152, "abd"),
        (UNEQUAL, "abc", 1, 84, "ab"),
        (LARGE_FIRST, "abc", 1, 16, "a"),
        (LARGE_FIRST, "bc", 1, 16, "bc"),
    ],
)
def test_a_run_continues_with_the_first_hosts_that_divide_the_batch(hosts, alive, minimum, batch, chosen):
    found = choose_alive(hosts, set(alive), min_hosts=minimum, global_batch_size=batch)
    assert list(found.items()) == [(host, hosts[host]) for host in chosen]


@pytest.mark.parametrize(("alive", "minimum"), [({"a"}, 2), ({"a", "b", "c"}, 3), (set(), 1)])
def test_too_few_hosts_are_rejected_with_their_names(alive, minimum):
    with pytest.raises(ValueError, match="at least . are needed .without an answer: .*d"):
        choose_alive(HOSTS, alive, min_hosts=minimum, global_batch_size=4096)
