import json
from pathlib import Path

import pytest

from canvaslm.docs_gate import DocsGateParams
from canvaslm.docs_gate.gate import DocsReport, check_docs

FILES = {
    "Makefile": "export PATH := x\nrepro: .venv ## run\n\tdvc repro\nprofile:\n\ttrue\n",
    "dvc.yaml": "stages:\n  pretrain:\n    matrix:\n      objective: [diffusion]\n    cmd: x\n",
    "configs/base.yaml": "profile: base\npretrain:\n  steps: 3\n",
    "configs/ci.yaml": "profile: ci\n",
    "src/canvaslm/__init__.py": "",
    "src/canvaslm/loss.py": (
        "T = TypeVar('T')\nclass Loss:\n    size: int\n    def sum(self): ...\ndef _hidden(): ...\n"
    ),
    "stages/door.py": 'PARAMS = Annotated[Path, typer.Option("--params", help="x")]\n',
    "stages/pretrain.py": (
        "def pretrain(\n"
        "    objective: Annotated[str, typer.Option(help='--fake')],\n"
        "    n_steps: Annotated[int, typer.Option()] = 1,\n"
        "    quiet: Annotated[bool, typer.Option()] = False,\n"
        "    params: PARAMS = Path('params.yaml'),\n"
        ") -> None: ...\n"
    ),
    "bench/harness.py": "options.add_argument('--rounds')\n",
    "bench/loss.py": "import harness\noptions.add_argument('--all')\n",
    "bench/alone.py": "options.add_argument('--kills')\n",
    "tests/test_loss.py": "def test_it_adds(): ...\n",
    "docs/measured/ci.json": '{"eval": {"loss": 4.5249, "n": 343516160, "gap": null, "v": "pass"}}',
    "docs/measured/bench.json": (
        '{"benches": {}, "bounds": [{"id": "a/b", "aim": "≤ 1", "slack": 0.1, "held": null,'
        ' "ratio": null, "why": null, "judgement": "fail", "reason": "x"}]}'
    ),
    "reports/eval/metrics.json": '{"loss": 4.5}',
    "reports/eval/samples.json": "{}",
    "reports/ablations/x/curve.svg": "<svg/>",
    "docs/other.md": "# A head, of `sorts`\n\n# Same\n\n# Same\n",
    "README.md": "The sum is `src/canvaslm/loss.py:Loss`.\n",
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def gate(house: Path, page: str) -> DocsReport:
    """Check the small repository with one more page, whose first line is line 1."""
    (house / "docs" / "page.md").write_text(page)
    return check_docs(DocsGateParams(roots=["README.md", "docs"]), house)


def told(report: DocsReport) -> list[tuple[str, int, str]]:
    return [(fault.file, fault.line, fault.kind) for fault in report.faults]


def command(text: str) -> str:
    return f"```bash\n{text}\n```\n"


@pytest.mark.parametrize(
    "page",
    [
        "`src/canvaslm/loss.py:Loss.sum` and `src/canvaslm/loss.py:Loss.size`",
        "`tests/test_loss.py::test_it_adds` in `src/canvaslm/loss.py`",
        "[a](other.md#a-head-of-sorts) [b](other.md#same-1) [c](../README.md) [d](https://x.y/z)",
        "# Here\n\n[up](#here)",
        "[4.52](measured/ci.json#eval.loss) [4.525](measured/ci.json#eval.loss)",
        "[343,516,160](measured/ci.json#eval.n) [not measured](measured/ci.json#eval.gap)",
        "| x | measured |\n|---|---|\n| 1 | [5](measured/ci.json#eval.loss) |",
        "| x | expected |\n|---|---|\n| 1 | 5 |",
        "# What was measured\n\n| x | y |\n|---|---|\n| t 1 | [5](measured/ci.json#eval.loss) |",
        "# What was measured\n\n# Else\n\n| x |\n|---|\n| 5 |",
        "[4.5](../reports/eval/metrics.json#loss) ![how](../reports/ablations/x/curve.svg)",
        command("make repro && make profile NAME=ci  # comment with --flag"),
        command("CI=true dvc repro pretrain@diffusion"),
        command("dvc exp run -S pretrain.steps=4 --temp"),
        command("dvc exp show | head"),
        command("python stages/pretrain.py --objective x \\\n  --n-steps 3 --no-quiet --params p"),
        command("python stages/pretrain.py --help"),
        command("python bench/loss.py --all --rounds 3"),
        command("pytest tests/test_loss.py::test_it_adds"),
        "<!-- figures: bounds a -->\n\n| ratio | aim and slack | held | found | judgement |\n"
        "|---|---|---|---|---|\n| a/b | ≤ 1 ± 10% |  | not measured | fail |\n"
        "\n<!-- end of figures -->\n",
        "```text\nmake nothing\n```\n",
    ],
)
def test_what_is_so_passes(house: Path, page: str) -> None:
    report = gate(house, page)
    assert told(report) == []
    assert report.metrics()["verdict"] == "pass"


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("`src/canvaslm/loss.py:Lost`", "citation"),
        ("`src/canvaslm/loss.py:Loss.mean`", "citation"),
        ("`src/canvaslm/gone.py:Loss`", "citation"),
        ("`src/canvaslm/gone.py`", "citation"),
        ("`tests/test_loss.py::test_it_subtracts`", "citation"),
        ("`src/canvaslm/loss.py:12`", "line_citation"),
        ("see src/canvaslm/loss.py:12 for it", "line_citation"),
        ("[a](gone.md)", "link"),
        ("[a](other.md#same-2)", "link"),
        ("[a](#nowhere)", "link"),
        ("[a](../../outside.md)", "link"),
        ("[a](../reports/eval/samples.json)", "link"),
        ("[a](../reports/gone/metrics.json)", "link"),
        ("[4.6](../reports/eval/metrics.json#loss)", "figure"),
        ("# What was Measured\n\n| x |\n|---|\n| 5 |", "figure"),
        ("# Measured\n\n## On\n\n| x |\n|---|\n| ± 1,024.5 % |", "figure"),
        ("![a](gone.png)", "link"),
        ("![a](../reports/ablations/x/gone.svg)", "link"),
        ("[4.53](measured/ci.json#eval.loss)", "figure"),
        ("[4.5240](measured/ci.json#eval.loss)", "figure"),
        ("[4.52](measured/ci.json#eval.lost)", "figure"),
        ("[0](measured/ci.json#eval.gap)", "figure"),
        ("[fail](measured/ci.json#eval.v)", "figure"),
        ("[about 5](measured/ci.json#eval.loss)", "figure"),
        ("| x | measured |\n|---|---|\n| 1 | 5 |", "figure"),
        ("```sh\nmake repro\n```", "command"),
        (command("make rerpo"), "command"),
        (command("make profile NAME=huge"), "command"),
        (command("dvc rerpo"), "command"),
        (command("dvc repro pretrian"), "command"),
        (command("dvc repro --no-such-flag"), "command"),
        (command("dvc exp run -S pretrain.stesp=4"), "command"),
        (command("python stages/pretrain.py --objective x --n-step 3"), "command"),
        (command("python stages/pretrain.py --objective x --fake"), "command"),
        (command("python stages/pretrain.py --n-steps 3"), "command"),
        (command("python stages/pretrian.py"), "command"),
        (command("make repro; launch --all"), "command"),
        (command("cat configs/gone.yaml"), "command"),
        (command("echo 'open"), "command"),
        (command("python bench/loss.py --kills 3"), "command"),
        (command("python bench/alone.py --rounds 3"), "command"),
        ("<!-- figures: bounds a -->\n<!-- end of figures -->\n", "figure"),
        ("<!-- figures: bounds b -->\n<!-- end of figures -->\n", "figure"),
        ("<!-- figures: bounds a -->\n", "figure"),
    ],
)
def test_what_is_not_so_is_told_once_with_its_kind(house: Path, page: str, kind: str) -> None:
    (fault,) = gate(house, page).faults
    assert (fault.file, fault.kind) == ("docs/page.md", kind)


def test_a_fault_has_the_line_on_which_it_stands(house: Path) -> None:
    page = (
        "# Head\n\nfirst line\nsecond `src/canvaslm/gone.py:A`\n\n"
        "| a | b |\n|---|---|\n| 1 | [x](gone.md) |\n\n"
        "```bash\nmake repro\npython stages/pretrain.py --objective x \\\n  --bad 1\n```\n"
    )
    assert told(gate(house, page)) == [
        ("docs/page.md", 4, "citation"),
        ("docs/page.md", 8, "link"),
        ("docs/page.md", 12, "command"),
    ]


def test_a_public_symbol_that_no_page_cites_is_a_fault(house: Path) -> None:
    (house / "README.md").write_text("Nothing is cited.\n")
    (fault,) = gate(house, "```\n`src/canvaslm/loss.py:Loss`\n```\n").faults
    assert (fault.file, fault.line, fault.kind) == ("src/canvaslm/loss.py", 2, "uncited_symbol")


def test_a_page_that_is_missing_is_a_fault(house: Path) -> None:
    (house / "README.md").unlink()
    kinds = {fault.kind for fault in gate(house, "").faults}
    assert "page" in kinds


def test_the_counts_and_the_list_agree(house: Path) -> None:
    report = gate(house, "[a](gone.md) `src/canvaslm/gone.py:A`\n" + command("make no"))
    metrics = report.metrics()
    assert metrics["n_faults"] == len(report.listed()["faults"]) == 3
    assert metrics["n_faults_by_kind"] == {"citation": 1, "link": 1, "command": 1}
    assert metrics["verdict"] == "fail"
    assert json.loads(json.dumps(report.listed()))["faults"][0]["line"] == 1
