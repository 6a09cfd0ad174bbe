import hashlib
import json
from pathlib import Path

import pytest

from canvaslm.errors import InputError
from canvaslm.reporting.files import to_json, write_json
from take_snapshot import take_snapshot

PARAMS = "profile: small\npretrain:\n  steps: 20\n"


def snapshot(place: Path, params: str = PARAMS, **report: object) -> None:
    """Take one where DVC recorded a run of PARAMS that wrote what lies there, or `report`."""
    metrics = place / "reports/pretrain/diffusion/metrics.json"
    written = to_json(report).encode() if report else b""
    if metrics.exists() and not report:
        written = metrics.read_bytes()
    digest = hashlib.md5(written, usedforsecurity=False).hexdigest()
    (place / "params.yaml").write_text(params)
    (place / "dvc.lock").write_text(
        "schema: '2.0'\nstages:\n  report:\n    cmd: x\n    params:\n      params.yaml:\n"
        "        profile: small\n  pretrain@diffusion:\n    cmd: x\n    params:\n"
        "      params.yaml:\n        pretrain:\n          steps: 20\n    outs:\n"
        "    - path: reports/pretrain/diffusion/metrics.json\n      hash: md5\n"
        f"      md5: {digest}\n"
    )
    take_snapshot(
        reports=place / "reports",
        out=place / "out",
        lock=place / "dvc.lock",
        params=place / "params.yaml",
    )


@pytest.mark.parametrize(
    "params", [PARAMS.replace("small", "large"), PARAMS.replace("20", "30"), "profile: small\n"]
)
def test_reports_of_other_values_get_no_snapshot(tmp_path: Path, params: str) -> None:
    write_json(tmp_path / "reports" / "pretrain" / "diffusion" / "metrics.json", {"steps": 20})
    with pytest.raises(InputError, match=r"dvc\.lock.*got one with others"):
        snapshot(tmp_path, params)
    assert not (tmp_path / "out").exists()


def test_a_report_that_dvc_did_not_see_written_gets_no_snapshot(tmp_path: Path) -> None:
    write_json(tmp_path / "reports" / "pretrain" / "diffusion" / "metrics.json", {"steps": 20})
    with pytest.raises(InputError, match=r"metrics\.json: expected the report that pretrain"):
        snapshot(tmp_path, steps=21)
    assert not (tmp_path / "out").exists()


def test_the_snapshot_is_named_by_the_profile_and_holds_what_the_docs_cite(tmp_path: Path) -> None:
    write_json(tmp_path / "reports" / "eval_loss_parity" / "metrics.json", {"gap_percent": 3.5})
    write_json(tmp_path / "reports" / "pretrain" / "diffusion" / "metrics.json", {"steps": 20})
    write_json(tmp_path / "reports" / "docs_gate" / "metrics.json", {"n_faults": 0})
    snapshot(tmp_path)
    assert json.loads((tmp_path / "out" / "small.json").read_text()) == {
        "profile": "small",
        "eval_loss_parity": {"gap_percent": 3.5},
        "pretrain": {"diffusion": {"steps": 20}},
    }


def test_without_reports_no_snapshot_is_written(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("profile: small\n")
    with pytest.raises(InputError, match="make repro"):
        snapshot(tmp_path)
    assert not (tmp_path / "out").exists()
