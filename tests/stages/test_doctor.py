"""Does the doctor's command print its table, name the first failure, and exit by it?"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from canvaslm.docs_gate.gate import DocsReport
from canvaslm.params import read_yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def doctor(
    decodable: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in a project that has shards and has trained nothing; pages are not read."""
    (tmp_path / "data/tokenizer").mkdir(parents=True)
    (tmp_path / "data/shards").symlink_to(decodable["shards"])
    (tmp_path / "data/tokenizer/tokenizer.json").symlink_to(decodable["tokenizer"])
    (tmp_path / "params.yaml").write_bytes(decodable["params"].read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    unread = DocsReport(n_checked={"pages": 0}, faults=[])
    monkeypatch.setattr("canvaslm.doctor.documents.check_docs", lambda params, root: unread)

    def run(*options: str) -> tuple[int, str, str]:
        script = str(ROOT / "stages" / "doctor.py")
        monkeypatch.setattr(sys, "argv", [script, *options])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            runpy.run_path(script, run_name="__main__")
        out, err = capfd.readouterr()
        return int(left.value.code or 0), out, err

    return run


def test_before_any_training_nothing_fails_and_the_commands_that_make_things_are_named(
    doctor: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    status, out, err = doctor()
    assert (status, err) == (0, "")
    heading, *rows, last = out.splitlines()
    assert heading.split() == ["verdict", "symptom", "run", "looked", "at", "measured"]
    assert not any(row.startswith("pass ") for row in rows)
    assert rows[0].startswith("not_measured")
    assert "dvc repro pretrain@autoregressive" in out
    assert last.startswith("nothing fails: ")
    assert last.endswith(" not measured")
    assert not (tmp_path / ".work").exists()
    assert not (tmp_path / "reports").exists()
    _, out, _ = doctor("--all", "--objective", "diffusion")
    assert out.splitlines()[1].startswith("pass          The params file is refused")


def test_one_objective_may_be_asked_for(doctor: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = doctor("--objective", "autoregressive")
    assert status == 0
    assert "diffusion" not in out.replace("The diffusion loss is", "")


def test_the_first_failure_is_the_last_line_and_the_status_is_1(
    doctor: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    content = read_yaml(tmp_path / "params.yaml")
    content["pretrain"]["steps"] = "many"
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(content, file)
    status, out, err = doctor()
    assert status == 1
    assert out.splitlines()[1].startswith("fail          The params file is refused")
    (told,) = err.splitlines()
    assert told.startswith("gate closed: doctor: The params file is refused: params_are_valid: ")
    assert "params.yaml:pretrain.steps: expected a valid integer" in told
    assert told.endswith("read docs/guides/debugging.md#the-params-file-is-refused")


def test_without_a_params_file_or_with_a_wrong_option_the_status_is_2(
    doctor: Callable[..., tuple[int, str, str]],
) -> None:
    status, _, err = doctor("--params", "other.yaml")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "other.yaml: expected a params file, got none" in err
    status, _, err = doctor("--objective", "neither")
    assert (status, len(err.splitlines())) == (2, 1)


def test_where_everything_passes_a_count_is_all_that_is_printed(
    doctor: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from canvaslm.doctor import examination

    shared = [probe for probe in examination.PROBES if probe.name == "params_are_valid"]
    monkeypatch.setattr(examination, "PROBES", shared)
    assert doctor() == (0, "nothing fails: 1 pass, 0 not measured\n", "")
