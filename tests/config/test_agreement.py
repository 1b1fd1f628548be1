"""What hosts must have been given alike, and what each may have of its own."""

import dataclasses

import pytest

from infcl.config import TrainConfig, settings_of
from infcl.config.agreement import OWN_PATHS, OWN_VALUES, SAME_CONTENTS
from infcl.parallel.host_info import differences

FIELDS = [field.name for field in dataclasses.fields(TrainConfig)]


def compare(one: TrainConfig, other: TrainConfig) -> list[str]:
    return differences({"a": settings_of(one), "b": settings_of(other)})


def test_every_name_is_a_flag_and_belongs_to_one_kind():
    names = [*OWN_PATHS, *OWN_VALUES, *SAME_CONTENTS]
    assert set(names) <= set(FIELDS) and len(names) == len(set(names))


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in (*OWN_PATHS, *OWN_VALUES, *SAME_CONTENTS)])
def test_every_other_flag_has_to_be_the_same(name):
    assert len(compare(TrainConfig(), dataclasses.replace(TrainConfig(), **{name: "another"}))) == 1


def test_a_flag_that_differs_is_reported_as_it_is_typed():
    one, other = TrainConfig(lr=1e-3), TrainConfig(lr=2e-3)
    assert compare(one, other) == ["--lr: 0.001 on a; 0.002 on b"]


@pytest.mark.parametrize("name", OWN_PATHS)
def test_a_path_may_differ_and_is_not_shown_but_is_given_everywhere_or_nowhere(name):
    one, other = TrainConfig(**{name: "/a/secret"}), TrainConfig(**{name: "/b/secret"})
    assert compare(one, other) == []
    if name != "logs":  # always given
        (line,) = compare(one, TrainConfig())
        assert "given on a; not given on b" in line and "secret" not in line


@pytest.mark.parametrize("name", OWN_VALUES)
def test_what_a_host_has_of_its_own_may_differ(name):
    assert compare(TrainConfig(), dataclasses.replace(TrainConfig(), **{name: "another"})) == []


def test_presets_and_models_are_compared_by_key_wherever_they_are_stored(tmp_path):
    for name, text in (("a", '{"zero": {"stage": 1}, "x": 2}'), ("b", '{"x": 2,\n"zero": {"stage": 3}}')):
        (tmp_path / name).write_text(text)
    (tmp_path / "same").write_text('{"x":2, "zero":{"stage":1}}')
    a, b, same = (str(tmp_path / name) for name in ("a", "b", "same"))
    for name, option in (("deepspeed_config", "--deepspeed_config"), ("model", "--model")):
        assert compare(TrainConfig(**{name: a}), TrainConfig(**{name: same})) == []
        assert compare(TrainConfig(**{name: a}), TrainConfig(**{name: b})) == [f"{option} zero.stage: 1 on a; 3 on b"]


def test_another_tokenizer_is_seen_by_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"\x00\xff1")
    (tmp_path / "b").write_bytes(b"\x00\xff2")
    one, other = (TrainConfig(tokenizer=str(tmp_path / name)) for name in "ab")
    assert compare(one, one) == [] and "--tokenizer: sha256 " in compare(one, other)[0]
