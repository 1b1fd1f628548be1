"""What hosts must have been given alike, and what each may have of its own."""

import dataclasses

import pytest

from infcl.config import TrainConfig, option_of, settings_of
from infcl.config.agreement import OF_ONE_START, OWN_PATHS, SAME_CONTENTS, WITHOUT_EFFECT
from infcl.parallel.host_info import differences

FIELDS = [field.name for field in dataclasses.fields(TrainConfig)]


def compare(one: TrainConfig, other: TrainConfig) -> list[str]:
    return differences({"a": settings_of(one), "b": settings_of(other)})


def test_every_flag_has_to_be_the_same_except_paths_and_what_depends_on_the_node():
    assert {*OWN_PATHS, *WITHOUT_EFFECT, *OF_ONE_START, *SAME_CONTENTS} <= set(FIELDS)
    for name in FIELDS:
        different = compare(TrainConfig(), dataclasses.replace(TrainConfig(), **{name: "another"}))
        assert len(different) >= (name not in WITHOUT_EFFECT and name != "logs"), name
    assert compare(TrainConfig(lr=1e-3), TrainConfig(lr=2e-3)) == ["--lr: 0.001 on a; 0.002 on b"]
    assert compare(TrainConfig(), TrainConfig(workers=9, pixel_cache_gb="1", report_to="none")) == []
    together = TrainConfig(log_every_n_steps=9, dist_timeout=9.0, skip_memory_check=True)
    assert len(compare(TrainConfig(), together)) == 3, "ranks that act on other values wait for each other"


def test_a_path_may_differ_and_is_not_shown_but_is_given_everywhere_or_nowhere():
    for name in OWN_PATHS:
        one, other = TrainConfig(**{name: "/a/secret"}), TrainConfig(**{name: "/b/secret"})
        assert compare(one, other) == []
        if name != "logs":  # always given
            (line,) = compare(one, TrainConfig())
            assert "given on a; not given on b" in line and "secret" not in line


@pytest.mark.parametrize("name", ["deepspeed_config", "model", "tokenizer"])
def test_files_are_compared_by_their_bytes_wherever_they_are_stored(name, tmp_path):
    for file, data in (("a", b"\x00\xff1"), ("same", b"\x00\xff1"), ("b", b"[" * 100_000)):
        (tmp_path / file).write_bytes(data)
    a, same, b = (TrainConfig(**{name: str(tmp_path / file)}) for file in ("a", "same", "b"))
    assert compare(a, same) == [] and f"{option_of(name)}: sha256 " in compare(a, b)[0]
