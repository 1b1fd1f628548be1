"""Rows of raw results: one header, the columns that were asked for, nothing without a path."""

import pytest

from benchmarks.rows import append, read, rows


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    assert read(path) == []
    append(path, [{"a": 1, "b": 2}])
    append(path, [{"a": 3, "b": 4}, {"a": 5, "b": 6}])
    assert read(path) == [{"a": 1, "b": 2}, {"a": 3, "b": 4}, {"a": 5, "b": 6}]
    with pytest.raises(ValueError):
        append(path, [{"a": 1, "b": 2}, {"a": 1, "c": 2}])
    with pytest.raises(ValueError, match="rows.csv has the columns a, b; these rows have a, c"):
        append(path, [{"a": 1, "c": 2}])


def test_numbers_are_read_as_such_and_commits_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.rows.RESULTS", tmp_path)
    row = {"commit": "6e15030", "version": "3.10", "gpus": 4, "ms": 1.5, "text": ""}
    append(tmp_path / "a.csv", [row])
    assert rows("a.csv") == [row]
    with pytest.raises(FileNotFoundError, match="b.csv"):
        rows("b.csv")
