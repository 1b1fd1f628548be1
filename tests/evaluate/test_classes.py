"""Class files: labels, subsets and templates mean one thing each, and a wrong one is rejected with its line."""

import pytest

from infcl.evaluate.zero_shot import read_classes, read_templates
from tests.lib.open_clip_stub import import_open_clip


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def names(tmp_path):
    return write(tmp_path / "classnames.txt", "n05\ttench", "n03\tgreat white shark", "n09\tcock")


def right_classes(classes, label):
    row = classes.right[classes.rows[label]]
    return [name for name, is_right in zip(classes.names, row.tolist()) if is_right]


def test_a_label_may_be_an_index_a_label_of_the_file_or_the_name(names):
    classes = read_classes(names, folders=["n03", "2", "tench"])
    assert classes.names == ["tench", "great white shark", "cock"]
    for label, name in {"n03": "great white shark", "2": "cock", "tench": "tench"}.items():
        assert right_classes(classes, label) == [name]


def test_folders_that_are_all_names_are_not_taken_for_numbers(tmp_path):
    names = write(tmp_path / "classnames.txt", "\ufeff1", "2", "10")  # a mark that Windows' editors leave in front
    classes = read_classes(names, folders=["1", "10", "2"])
    assert [right_classes(classes, label) for label in ("1", "2", "10")] == [["1"], ["2"], ["10"]]
    assert right_classes(read_classes(names, folders=["0", "1", "2"]), "1") == ["2"]


def test_unknown_folders_are_taken_in_sorted_order_only_if_they_are_as_many_as_classes(tmp_path):
    names = write(tmp_path / "classnames.txt", "tench", "shark", "cock")
    classes = read_classes(names, folders=["c", "a", "b"])
    assert [right_classes(classes, label) for label in "abc"] == [["tench"], ["shark"], ["cock"]]
    for folders in (["a", "b"], ["a", "b", "cock"]):
        with pytest.raises(ValueError, match=f"{len(folders)} class folders \\('a' is not in .* 3 class names"):
            read_classes(names, folders=folders)


def test_only_the_classes_of_a_subset_compete(names, tmp_path):
    classes = read_classes(names, write(tmp_path / "subset.txt", "n09", "0"), folders=["n05", "n09", "other"])
    assert classes.names == ["tench", "cock"]
    assert right_classes(classes, "n09") == ["cock"] and "n03" not in classes.rows


def test_a_mapped_label_may_have_several_right_classes(names, tmp_path):
    classes = read_classes(names, write(tmp_path / "map.txt", "Fish or shark\t0,1", "Chicken\t2"))
    assert right_classes(classes, "Fish or shark") == ["tench", "great white shark"]
    assert right_classes(classes, "Chicken") == ["cock"]


@pytest.mark.parametrize(
    ("line", "message"), [("n77", "'n77' is neither"), ("a\t7", "3 class names"), ("a\tb", "neither")]
)
def test_a_wrong_line_of_a_subset_is_named(names, tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_classes(names, write(tmp_path / "subset.txt", line))
    with pytest.raises(ValueError, match="--zeroshot-classnames .*none: No such file"):
        read_classes(tmp_path / "none")


def test_templates_take_both_marks_and_need_one(tmp_path):
    assert read_templates(write(tmp_path / "t", "a {}.", "", "one {c}, {c}!")) == ["a {}.", "one {}, {}!"]
    with pytest.raises(ValueError, match="'a photo' has no {}"):
        read_templates(write(tmp_path / "t", "a photo"))
    with pytest.raises(ValueError, match="the file is empty"):
        read_templates(write(tmp_path / "t", ""))
    (tmp_path / "t").write_bytes("une photo d'un {} ét".encode("latin-1"))
    with pytest.raises(ValueError, match="--zeroshot-templates .*t is not UTF-8: .*byte 0xe9"):
        read_templates(tmp_path / "t")


def test_imagenets_names_and_prompts_are_those_of_open_clip():
    import_open_clip()
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

    classes = read_classes("imagenet", folders=[f"n{i:08d}" for i in range(1000)])
    assert classes.names == list(IMAGENET_CLASSNAMES)
    assert right_classes(classes, "n00000000") == ["tench"]
    assert read_templates("imagenet") == [template("{}") for template in OPENAI_IMAGENET_TEMPLATES]
