import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from canvaslm.corpus.tokenizer import Tokenizer, TokenizerParams, train_tokenizer
from canvaslm.errors import InputError

EOT = "<|endoftext|>"
HOSTILE = [
    "",
    " ",
    "\n\n\n",
    "a  b   c    ",
    "   leading",
    "\t \t\r\n \u00a0\u2003\u3000x",
    "it's they'll WE'RE 'sword 'll' 's",
    "naïve café — 北京市 русский ไทย हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301 vs \u00e9; \u2028 \u2029 \u0085 \u200b \ufeff",
    "\x01\x02\x1c\x1d\x1e\x1f\x7f\x80\x9f",
    f"{EOT}",
    f"before {EOT} after{EOT}{EOT}",
    "<|mask|> <pad> [MASK] <s></s> <unk>",
    "123456789 ٣٤٥ ⅷ ½ 1,000.50",
    "!!!???...---___+++",
    "\U0010ffff\ue000\U000e0001",
    "x" * 5000,
    "def f(x):\n\treturn x  # tabs\n\n\n",
]


def learned(texts: list[str], vocab_size: int, **changes: Any) -> bytes:
    values = {"source": "train", "end_of_text": EOT, "min_frequency": 2} | changes
    return train_tokenizer(texts, TokenizerParams(**values), vocab_size)


def adopted(path: Path, vocab_size: int, **changes: Any) -> bytes:
    pinned = f"{path}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}"
    return learned([], vocab_size, source=pinned, **changes)


@pytest.mark.parametrize("text", HOSTILE)
def test_ids_are_those_of_the_library_that_learned_them(
    tokenizer: Tokenizer, tokenizer_json: bytes, text: str
) -> None:
    reference = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    reference.encode_special_tokens = True  # spellings of specials are text
    assert tokenizer.encode(text).tolist() == reference.encode(text).ids


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_text_comes_back_and_has_the_ids_of_the_reference(
    tokenizer: Tokenizer, tokenizer_json: bytes, text: str
) -> None:
    reference = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    reference.encode_special_tokens = True
    ids = tokenizer.encode(text)
    assert ids.tolist() == reference.encode(text).ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", HOSTILE)
def test_spelling_of_the_end_of_text_is_text(tokenizer: Tokenizer, text: str) -> None:
    # BR-03
    ids = tokenizer.encode(text)
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int64


def test_vocabulary_is_all_bytes_the_merges_and_last_the_end_of_text(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.vocab_size == 400
    assert tokenizer.eot_id == 399
    assert {bytes([byte]) for byte in range(256)} <= set(tokenizer.token_bytes)
    assert len(set(tokenizer.token_bytes)) == 400
    assert tokenizer.decode([399]) == EOT


def test_learning_twice_and_in_other_processes_gives_the_same_bytes(
    tokenizer_json: bytes, prose: list[str]
) -> None:
    assert learned(prose, 400) == tokenizer_json
    script = (
        "import sys, json\n"
        "from canvaslm.corpus.tokenizer import TokenizerParams, train_tokenizer\n"
        "p = TokenizerParams(source='train', end_of_text='<|endoftext|>', min_frequency=2)\n"
        "sys.stdout.buffer.write(train_tokenizer(json.load(sys.stdin), p, 400))\n"
    )
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "RAYON_NUM_THREADS": "1",
        "PYTHONHASHSEED": "7",
    }
    result = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(prose).encode(),
        capture_output=True,
        env=environment,
        check=True,
    )
    assert result.stdout == tokenizer_json


def test_threads_change_nothing_and_complain_about_nothing(
    tokenizer: Tokenizer, tokenizer_json: bytes, tmp_path: Path
) -> None:
    # BR-08
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from canvaslm.corpus.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(Path('tokenizer.json'))\n"
        "ids = t.encode_many([str(n) * 50 for n in range(200)], n_threads=4)\n"
        "print([i.tolist() for i in ids])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        check=True,
    )
    expected = tokenizer.encode_many([str(n) * 50 for n in range(200)], n_threads=1)
    assert result.stderr == ""
    assert json.loads(result.stdout) == [ids.tolist() for ids in expected]


def test_vocabulary_that_cannot_be_reached_says_how_far_it_came() -> None:
    with pytest.raises(InputError, match=r"layout\.vocab_size: expected 5000") as refused:
        learned(["aa bb aa bb"], 5000)
    reached = int(refused.value.got)
    assert len(Tokenizer(learned(["aa bb aa bb"], reached), "x").token_bytes) == reached


@pytest.mark.parametrize("vocab_size", [2, 256])
def test_vocabulary_smaller_than_the_bytes_is_refused(vocab_size: int) -> None:
    with pytest.raises(InputError, match="at least 257"):
        learned(["abc"], vocab_size)


def test_end_of_text_that_is_also_a_piece_of_text_is_refused() -> None:
    with pytest.raises(InputError, match="a spelling that no piece of text has"):
        learned(["canvas canvas"] * 5, 262, end_of_text="canvas")


def test_own_tokenizer_gives_the_ids_it_always_gave(tokenizer_json: bytes, tmp_path: Path) -> None:
    foreign = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    foreign.add_special_tokens(["<pad>"])
    foreign.save(str(tmp_path / "own.json"))
    own = Tokenizer(adopted(tmp_path / "own.json", 401), "own")
    assert (own.vocab_size, own.eot_id) == (401, 399)
    assert own.encode(HOSTILE[5]).tolist() == foreign.encode(HOSTILE[5]).ids
    assert own.eot_id not in own.encode(f"<pad>{EOT}")


def test_own_tokenizer_in_the_older_spelling_is_read_too(
    tokenizer: Tokenizer, tokenizer_json: bytes, tmp_path: Path
) -> None:
    parsed = json.loads(tokenizer_json)
    parsed["model"]["merges"] = [" ".join(pair) for pair in parsed["model"]["merges"]]
    parsed["model"]["vocab"][EOT] = 399  # GPT-2's file has its special token in both places
    del parsed["pre_tokenizer"]["use_regex"]
    (tmp_path / "own.json").write_text(json.dumps(parsed))
    own = Tokenizer(adopted(tmp_path / "own.json", 400), "own")
    assert own.token_bytes == tokenizer.token_bytes
    assert own.encode(HOSTILE[12]).tolist() == tokenizer.encode(HOSTILE[12]).tolist()


def test_own_tokenizer_without_the_end_of_text_is_refused(
    tokenizer_json: bytes, tmp_path: Path
) -> None:
    # BR-04
    (tmp_path / "own.json").write_bytes(tokenizer_json)
    with pytest.raises(InputError, match="special token '</s>'") as refused:
        adopted(tmp_path / "own.json", 400, end_of_text="</s>")
    assert "own.json" in str(refused.value)


def test_own_tokenizer_of_another_size_says_which_number_to_set(
    tokenizer_json: bytes, tmp_path: Path
) -> None:
    (tmp_path / "own.json").write_bytes(tokenizer_json)
    with pytest.raises(InputError, match=r"set layout\.vocab_size to 400"):
        adopted(tmp_path / "own.json", 2048)


def test_own_tokenizer_must_be_pinned_by_its_hash(tokenizer_json: bytes, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_bytes(tokenizer_json)
    found = hashlib.sha256(tokenizer_json).hexdigest()
    with pytest.raises(InputError, match=f"source: {path}#sha256={found}$"):
        learned([], 400, source=str(path))
    with pytest.raises(InputError, match=f"got sha256 {found}"):
        learned([], 400, source=f"{path}#sha256={'0' * 64}")
    with pytest.raises(InputError, match="No such file"):
        learned([], 400, source="nowhere.json")


def broken(parsed: dict[str, Any], fault: str) -> dict[str, Any]:
    """A tokenizer.json with one thing changed that would change ids."""
    model = parsed["model"]
    if fault == "normalizer":
        parsed["normalizer"] = {"type": "NFC"}
    elif fault == "pre-tokenizer":
        parsed["pre_tokenizer"] = {"type": "Whitespace"}
    elif fault == "add_prefix_space":
        parsed["pre_tokenizer"]["add_prefix_space"] = True
    elif fault == "model.type":
        model["type"] = "WordPiece"
    elif fault == "dropout":
        model["dropout"] = 0.1
    elif fault == "merges in another order":
        model["merges"] = model["merges"][::-1]
    elif fault == "which its merges never make":
        model["merges"] = model["merges"][:-1]
    elif fault == "not spelled in bytes":
        model["vocab"]["北"] = 400
    elif fault == "each once":
        model["vocab"]["zzzz"] = 900
        model["merges"] += [["z", "z"], ["zz", "zz"]]
        model["vocab"]["zz"] = 800
    elif fault == "of the 256 bytes":
        del model["vocab"]["ÿ"]
    elif fault == "added_tokens: Field required":
        del parsed["added_tokens"]
    elif fault == "merges of what is no token":
        model["vocab"]["zz"] = 400
        model["merges"].append(["zz", ""])
    return parsed


@pytest.mark.parametrize(
    "fault",
    [
        "normalizer",
        "pre-tokenizer",
        "add_prefix_space",
        "model.type",
        "dropout",
        "merges in another order",
        "which its merges never make",
        "not spelled in bytes",
        "each once",
        "of the 256 bytes",
        "added_tokens: Field required",
        "merges of what is no token",
    ],
)
def test_own_tokenizer_that_would_be_followed_wrongly_is_refused(
    tokenizer_json: bytes, tmp_path: Path, fault: str
) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(broken(json.loads(tokenizer_json), fault)))
    with pytest.raises(InputError, match=fault):
        adopted(path, 400)


def test_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(InputError, match="byte-level BPE"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="run stages/train_tokenizer"):
        Tokenizer.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), 3),
        (("model",), None),
        (("model", "vocab"), ["a"]),
        (("model", "vocab", "a"), "64"),
        (("model", "vocab", "a"), -1),
        (("model", "vocab", "a"), 1 << 40),
        (("model", "merges"), {"a": "b"}),
        (("model", "merges", 0), ["a"]),
        (("model", "merges", 0), "a b c"),
        (("model", "merges", 0), 3),
        (("added_tokens",), {}),
        (("added_tokens",), []),
        (("added_tokens", 0), "x"),
        (("added_tokens", 0), {"content": "x", "id": 399}),
        (("added_tokens", 0, "id"), None),
        (("added_tokens", 0, "content"), 3),
        (("added_tokens", 0, "special"), "yes"),
        (("pre_tokenizer",), "ByteLevel"),
    ],
)
def test_value_that_does_not_fit_in_a_tokenizer_is_refused(
    tokenizer_json: bytes, tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    parsed = {"whole": json.loads(tokenizer_json)}
    inner: Any = parsed
    *way, last = ("whole", *place)
    for key in way:
        inner = inner[key]
    inner[last] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed["whole"]))
    with pytest.raises(InputError) as told:
        Tokenizer.load(tmp_path / "tokenizer.json")
    assert "\n" not in str(told.value)
    with pytest.raises(InputError):
        adopted(tmp_path / "tokenizer.json", 400)


def test_token_that_is_added_twice_is_refused(tokenizer_json: bytes) -> None:
    parsed = json.loads(tokenizer_json)
    parsed["added_tokens"].insert(0, parsed["added_tokens"][0] | {"id": 3, "special": False})
    with pytest.raises(InputError, match="each once"):
        Tokenizer(json.dumps(parsed).encode(), "tokenizer.json")


def test_folder_in_the_place_of_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Is a directory"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("token", [-1, 400])
def test_id_outside_the_vocabulary_is_refused_in_decoding(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(InputError, match=r"0\.\.399"):
        tokenizer.decode([5, token])
