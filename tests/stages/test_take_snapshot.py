import json
from pathlib import Path

import pytest

from canvaslm.errors import InputError
from canvaslm.reporting.files import write_json
from take_snapshot import take_snapshot


def test_the_snapshot_is_named_by_the_profile_and_holds_what_the_docs_cite(tmp_path: Path) -> None:
    write_json(tmp_path / "reports" / "eval_loss_parity" / "metrics.json", {"gap_percent": 3.5})
    write_json(tmp_path / "reports" / "pretrain" / "diffusion" / "metrics.json", {"steps": 20})
    write_json(tmp_path / "reports" / "docs_gate" / "metrics.json", {"n_faults": 0})
    (tmp_path / "params.yaml").write_text("profile: small\n")
    take_snapshot(
        reports=tmp_path / "reports", out=tmp_path / "out", params=tmp_path / "params.yaml"
    )
    assert json.loads((tmp_path / "out" / "small.json").read_text()) == {
        "profile": "small",
        "eval_loss_parity": {"gap_percent": 3.5},
        "pretrain": {"diffusion": {"steps": 20}},
    }


def test_without_reports_no_snapshot_is_written(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("profile: small\n")
    with pytest.raises(InputError, match="make repro"):
        take_snapshot(reports=tmp_path, out=tmp_path / "out", params=tmp_path / "params.yaml")
    assert not (tmp_path / "out").exists()
