import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from averages import save_other_weights
from canvaslm.checkpoint_state import read_state
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.errors import InputError
from canvaslm.evaluation.continuation import Pieces, continue_text, unshown
from canvaslm.evaluation.speedup_params import GenerateParams
from canvaslm.params import load_section, read_yaml
from canvaslm.sampling.evidence import Cavity, Posterior
from canvaslm.sampling.request import Generated
from shapes import PLAIN

ROOT = Path(__file__).parents[2]
PROMPT = "canvas window"


def _run(decodable: dict[str, Path], *options: str) -> subprocess.CompletedProcess[str]:
    places = [f"--{name}={decodable[name]}" for name in ("tokenizer", "params")]
    return subprocess.run(
        [sys.executable, str(ROOT / "stages" / "generate.py"), *places, *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _continue(decodable: dict[str, Path], objective: str, **changes: object) -> list[int]:
    params = load_section(decodable["params"], "generate", GenerateParams)
    return continue_text(
        PROMPT,
        checkpoint=decodable[objective],
        tokenizer=decodable["tokenizer"],
        new_tokens=6,
        params=params.model_copy(update=changes),
        show=unshown,
    ).made.ids


def test_text_goes_to_stdout_and_nothing_else_does(decodable: dict[str, Path]) -> None:
    checkpoint = f"--checkpoint={decodable['diffusion']}"
    options = (f"--prompt={PROMPT}", "--new-tokens=6", checkpoint)
    done = _run(decodable, *options)
    assert done.returncode == 0, done.stderr
    text = Tokenizer.load(decodable["tokenizer"]).decode(_continue(decodable, "diffusion"))
    assert done.stdout == text + "\n"
    # Watching draws on stderr and changes no result.
    watched = _run(decodable, *options, "--watch")
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == done.stdout
    assert PROMPT in watched.stderr
    assert done.stderr == ""


def test_objective_of_the_checkpoint_chooses_the_decoder(decodable: dict[str, Path]) -> None:
    params = load_section(decodable["params"], "generate", GenerateParams)
    for objective, canvases in (("diffusion", 2), ("autoregressive", 0)):
        made = continue_text(
            PROMPT,
            checkpoint=decodable[objective],
            tokenizer=decodable["tokenizer"],
            new_tokens=6,
            params=params,
        ).made
        assert (len(made.ids), made.canvases) == (6, canvases)


def test_drafts_are_verified_where_the_params_say_so(
    decodable: dict[str, Path], companion: Path
) -> None:
    params = load_section(decodable["params"], "generate", GenerateParams)

    places = decodable | {"companion": companion}

    def make(objective: str, **changes: object) -> Generated:
        return continue_text(
            PROMPT,
            checkpoint=places[objective],
            tokenizer=decodable["tokenizer"],
            new_tokens=6,
            params=params.model_copy(update={"mode": "verified", **changes}),
        ).made

    made = make("companion")
    assert (len(made.ids), made.verifications) == (6, made.canvases)
    assert made.verifications > 0
    # The companion's own argmax, whatever is drafted and however.
    greedy = [
        make("companion", start_temperature=0.0, draft_steps=steps, draft_temperature=temperature)
        for steps in (1, 2)
        for temperature in (0.0, 1.0)
    ]
    assert len({tuple(row.ids) for row in greedy}) == 1
    assert make("autoregressive").verifications == 0  # the twin has no canvases


def test_drafts_that_nothing_can_verify_are_refused_in_one_line(
    decodable: dict[str, Path], tmp_path: Path
) -> None:
    content = read_yaml(decodable["params"])
    content["generate"] |= {"mode": "verified"}
    with (tmp_path / "params.yaml").open("w") as file:
        YAML().dump(content, file)
    places = {**decodable, "params": tmp_path / "params.yaml"}
    done = _run(places, f"--prompt={PROMPT}", f"--checkpoint={decodable['diffusion']}")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.strip().splitlines()
    assert "generate.mode: expected canvas: nothing verifies drafts of this checkpoint" in line


@pytest.mark.parametrize("objective", ["diffusion", "autoregressive"])
def test_an_average_of_the_weights_writes_the_text(
    decodable: dict[str, Path], tmp_path: Path, objective: str
) -> None:
    """As a checkpoint does that was trained to those weights."""
    texts = []
    for as_average in (True, False):
        place = tmp_path / str(as_average)
        saved = save_other_weights(decodable[objective], place, as_average=as_average)
        texts.append(_continue(decodable | {objective: saved}, objective))
    assert texts[0] == texts[1] != _continue(decodable, objective)


def test_seed_decides_the_text(decodable: dict[str, Path]) -> None:
    for objective in ("diffusion", "autoregressive"):
        first, again, other = (_continue(decodable, objective, seed=seed) for seed in (1, 1, 2))
        assert first == again != other


@pytest.mark.parametrize("acceptance", ["unchanged_or_stronger", "entropy_bound", "quota"])
@pytest.mark.parametrize("stopping", ["never", "mean_entropy", "stable_and_confident"])
def test_every_rule_that_can_be_named_runs(
    decodable: dict[str, Path], acceptance: str, stopping: str
) -> None:
    ids = _continue(
        decodable, "diffusion", acceptance=acceptance, stopping=stopping, stop_entropy=9.0
    )
    assert len(ids) == 6


def test_evidence_is_what_the_params_say(
    decodable: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for rule in (Posterior, Cavity):
        excess = rule.excess

        def watched(*args: Any, excess: Any = excess, **kwargs: Any) -> Any:
            asked.append(type(args[0]).__name__.lower())
            return excess(*args, **kwargs)

        monkeypatch.setattr(rule, "excess", watched)
    for evidence in ("posterior", "cavity"):
        asked.clear()
        _continue(decodable, "diffusion", evidence=evidence)
        assert asked == [evidence] * 2 * 4  # two canvases of four steps


def test_watching_shows_the_text_grow_and_ends_with_what_is_printed(
    decodable: dict[str, Path],
) -> None:
    shown: list[Pieces] = []
    params = load_section(decodable["params"], "generate", GenerateParams)
    told = continue_text(
        PROMPT,
        checkpoint=decodable["diffusion"],
        tokenizer=decodable["tokenizer"],
        new_tokens=8,
        params=params.model_copy(update={"acceptance": "quota"}),  # decides all by the last step
        show=shown.append,
    )
    assert len(shown) == 2 * 4
    assert all(pieces[0][0].startswith(PROMPT) and pieces[0][1] for pieces in shown)
    assert any(not decided for _, decided in shown[0][1:])
    assert all(decided for _, decided in shown[-1])
    assert shown[-1][0][0] != shown[0][0][0]  # the first canvas joined what is finished
    assert "".join(text for text, _ in shown[-1]) == PROMPT + told.text


def test_prompt_is_cut_to_whole_canvases_and_told_so_under_block_mask(
    decodable: dict[str, Path],
    save_decodable: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = read_state(decodable["diffusion"]).identity.data.model_dump()
    ids = Tokenizer.load(decodable["tokenizer"]).encode(PROMPT)
    assert len(ids) % 4
    told = continue_text(
        PROMPT,
        checkpoint=save_decodable("diffusion", data, **PLAIN["model"], clean_mask="block"),
        tokenizer=decodable["tokenizer"],
        new_tokens=4,
        params=load_section(decodable["params"], "generate", GenerateParams),
    )
    assert PROMPT.endswith(told.prompt)
    assert f"its first {len(ids) % 4} of {len(ids)} tokens are not read" in caplog.text


def test_prompt_beyond_the_window_is_told_in_one_line(decodable: dict[str, Path]) -> None:
    done = _run(decodable, f"--prompt={'canvas ' * 40}", f"--checkpoint={decodable['diffusion']}")
    assert done.returncode == 2
    assert "within the trained window of 32 tokens" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_tokenizer_of_other_data_is_refused(decodable: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(decodable["tokenizer"].read_bytes() + b"\n")
    with pytest.raises(InputError, match="the tokenizer of the data"):
        _continue({**decodable, "tokenizer": other}, "diffusion")


@pytest.mark.parametrize("key", ["identity", "progress", "files"])
@pytest.mark.parametrize("value", [None, {}])
def test_checkpoint_that_does_not_say_what_it_is_is_refused(
    decodable: dict[str, Path], tmp_path: Path, key: str, value: object
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(decodable["diffusion"], broken)
    state = json.loads((broken / "state.json").read_text())
    (broken / "state.json").write_text(json.dumps(state | {key: value}))
    with pytest.raises(InputError, match=rf"state\.json: expected the state .* \({key}"):
        _continue({**decodable, "diffusion": broken}, "diffusion")
    if key == "identity" and value is None:
        done = _run(decodable, f"--prompt={PROMPT}", f"--checkpoint={broken}")
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.strip().splitlines()) == 1


def test_mean_entropy_without_patience_is_refused(decodable: dict[str, Path]) -> None:
    values = load_section(decodable["params"], "generate", GenerateParams).model_dump()
    with pytest.raises(ValueError, match="stop_patience of at least 1"):
        GenerateParams.model_validate(values | {"stopping": "mean_entropy", "stop_patience": 0})
