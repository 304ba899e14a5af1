"""File laws: saved equals loaded; faults are all listed with paths; nothing half-written, nothing replaced."""

import json
from dataclasses import dataclass
from typing import Literal

import pytest

from dpart.partitioner.plan import Plan, Stage, StageMemory
from dpart.runtime.errors import UserError
from dpart.runtime.files import from_json, new_folder, read_file, to_json, write_file, write_text


@dataclass(frozen=True)
class Inner:
    name: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Outer:
    format: Literal["dpart.test"]
    version: Literal[1]
    seconds: float
    limit: int | None
    inner: tuple[Inner, ...]


OUTER = Outer("dpart.test", 1, 0.5, None, (Inner("a", (1, 2)), Inner("b", ())))


def test_saved_is_loaded_and_written_the_same_every_time(tmp_path) -> None:
    write_file(OUTER, tmp_path / "x.json")
    assert read_file(Outer, tmp_path / "x.json") == OUTER
    assert to_json(OUTER) == (tmp_path / "x.json").read_text()


def test_all_faults_are_listed_with_their_paths() -> None:
    data = json.loads(to_json(OUTER))
    data["inner"][1]["counts"] = [1, "gpu0"]
    data["inner"][0]["nme"] = data["inner"][0].pop("name")
    data["seconds"] = "fast"
    with pytest.raises(UserError) as caught:
        from_json(Outer, json.dumps(data), "plan.json")
    message = str(caught.value)
    assert 'plan.json: inner[1].counts[1]: expected an integer, got "gpu0".' in message
    assert "plan.json: inner[0].name: this field is missing." in message
    assert "plan.json: inner[0].nme: no such field." in message
    assert 'plan.json: seconds: expected a number, got "fast".' in message


@pytest.mark.parametrize("value", ["1.5", "true", '"3"'])
def test_a_number_of_another_type_is_refused(value: str) -> None:
    text = to_json(OUTER).replace('"limit": null', f'"limit": {value}')
    with pytest.raises(UserError, match="limit"):
        from_json(Outer, text, "f")


def test_another_format_or_version_says_what_was_expected() -> None:
    with pytest.raises(UserError, match=r"expected a dpart\.test file, got format 'dpart\.plan'"):
        from_json(Outer, to_json(OUTER).replace("dpart.test", "dpart.plan"), "f")
    with pytest.raises(UserError, match=r"reads version 1 of dpart\.test, got 2"):
        from_json(Outer, to_json(OUTER).replace('"version": 1', '"version": 2'), "f")


def test_missing_and_broken_files_are_the_users_errors(tmp_path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_file(Outer, tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match="not a JSON file"):
        read_file(Outer, tmp_path / "x.json")


def test_existing_files_are_kept_without_force(tmp_path) -> None:
    write_text("one", tmp_path / "x")
    with pytest.raises(UserError, match="exists already"):
        write_text("two", tmp_path / "x")
    assert (tmp_path / "x").read_text() == "one"
    write_text("two", tmp_path / "x", force=True)
    assert (tmp_path / "x").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "build") as folder:
            (folder / "half").write_text("x")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "build") as folder:
        (folder / "program.json").write_text("{}")
    assert (tmp_path / "build" / "program.json").is_file()
    with pytest.raises(UserError, match="exists already"), new_folder(tmp_path / "build"):
        pass
    with new_folder(tmp_path / "build", force=True) as folder:
        (folder / "other").write_text("x")
    assert [p.name for p in (tmp_path / "build").iterdir()] == ["other"]


def test_force_does_not_replace_a_folder_that_dpart_did_not_make(tmp_path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with pytest.raises(UserError, match="this is not one"), new_folder(tmp_path / "thesis", force=True):
        pass
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "years of work"


def test_memory_is_the_sum_of_its_parts() -> None:
    memory = StageMemory(1, 2, 4, 8, 16, 32)
    assert memory.total_bytes == 63
    assert Stage.__dataclass_fields__["memory"].type is StageMemory
    assert Plan.__dataclass_fields__["stages"].type == tuple[Stage, ...]
