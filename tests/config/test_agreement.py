"""What hosts must have been given alike, and what each may have of its own."""

import dataclasses

from infcl.config import TrainConfig, settings_of
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


def test_a_model_of_any_depth_is_compared_by_its_bytes(tmp_path):
    (tmp_path / "deep").write_text("[" * 100_000)
    assert settings_of(TrainConfig(model=str(tmp_path / "deep")))["--model"].startswith("sha256 ")
