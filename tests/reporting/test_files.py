import json
import math
from pathlib import Path
from typing import Any

import pytest

from canvaslm.reporting import files
from canvaslm.reporting.files import to_json, write_bytes, write_csv, write_json


def strictly(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, math.exp(700) * 1e10])
def test_a_number_that_is_not_finite_is_null_with_a_reason(value: float) -> None:
    read = strictly(to_json({"row": {"loss": value}, "rows": [value, 1.5]}))
    if math.isfinite(value):
        assert read["row"] == {"loss": value}
    else:
        assert read["row"] == {"loss": None, "loss_reason": f"not finite: {value}"}
        assert read["rows"] == [None, 1.5]


def test_keys_are_sorted_and_the_bytes_depend_on_nothing_else() -> None:
    assert to_json({"b": 1, "a": {"d": 2, "c": 3}}) == to_json({"a": {"c": 3, "d": 2}, "b": 1})
    assert to_json({"b": 1, "a": 2}) == '{\n  "a": 2,\n  "b": 1\n}\n'


def test_floats_come_back_to_the_bit(tmp_path: Path) -> None:
    value = 0.1 + 0.2
    write_json(tmp_path / "x.json", {"value": value})
    assert strictly((tmp_path / "x.json").read_text())["value"] == value


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "deep" / "metrics.json"
    write_bytes(target, b"old")

    def no_room(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", no_room)
    with pytest.raises(OSError, match="No space"):
        write_bytes(target, b"new")
    assert target.read_bytes() == b"old"
    assert [file.name for file in target.parent.iterdir()] == ["metrics.json"]


def test_csv_has_a_header_and_unix_line_ends(tmp_path: Path) -> None:
    write_csv(tmp_path / "loss.csv", ("step", "loss"), [(1, 0.5), (2, "")])
    assert (tmp_path / "loss.csv").read_bytes() == b"step,loss\n1,0.5\n2,\n"
