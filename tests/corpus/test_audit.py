import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from canvaslm.corpus.audit import AuditParams, WindowAudit, audit_windows, window_coverage
from canvaslm.corpus.fetch import hash_file
from canvaslm.corpus.manifest import Manifest
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.errors import InputError
from canvaslm.layout import Layout
from canvaslm.reporting.progress import untracked

Pack = Callable[..., tuple[Path, Manifest]]
Scripted = Callable[[int], Any]


def audit(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    window_tokens: int = 4,
    ngram_tokens: int = 4,
    max_share: float = 1.0,
    vocab_size: int | None = None,
) -> WindowAudit:
    params = AuditParams(ngram_tokens=ngram_tokens, max_shared_ngram_share=max_share, n_samples=2)
    layout = Layout(
        canvas_tokens=window_tokens,
        canvases_per_window=1,
        vocab_size=vocab_size or tokenizer.vocab_size,
    )
    return audit_windows(folder, tokenizer, params, layout, track=untracked)


def numbers(first: int, count: int) -> str:
    return " ".join(str(n) for n in range(first, first + count))


def rewrite(folder: Path, shard: str, change: Callable[[np.ndarray], None]) -> None:
    """Change ids on disk and make the manifest's hash agree, as a faulty writer would."""
    ids = np.fromfile(folder / shard, "<u2")
    change(ids)
    ids.tofile(folder / shard)
    record = json.loads((folder / "manifest.json").read_text())
    for entry in record["splits"][shard.split("/")[0]]:
        if entry["file"] == shard:
            entry["sha256"] = hash_file(folder / shard)
    (folder / "manifest.json").write_text(json.dumps(record))


TEXTS = {"train": [numbers(1, 9), numbers(20, 6)], "val": [numbers(40, 8)]}
SHARD = "train/shard_00000.bin"


def test_good_shards_pass_and_their_figures_are_counted_again(
    pack: Pack, scripted: Scripted
) -> None:
    tokenizer = scripted(99)
    folder, manifest = pack(
        {"train": ["1 1 2", "1 2 3"], "val": ["4 4 4 4 4"]}, tokenizer, shard_tokens=4
    )
    # The scripted texts have more bytes than their tokens: let the table say what the tokens do.
    _say_bytes_of_tokens(folder)
    found = audit(folder, tokenizer, window_tokens=4)
    assert found.faults == []
    assert found.metrics["verdict"] == "pass"
    assert found.metrics["train"] == {
        "documents": 2,
        "shards": 2,
        "tail_tokens": 0,
        "text_bytes": 6,
        "tokens": 8,
        "tokens_per_byte": 8 / 6,
        "unigram_entropy_nats": pytest.approx(
            -(3 / 8 * math.log(3 / 8) + 2 * 2 / 8 * math.log(2 / 8) + 1 / 8 * math.log(1 / 8))
        ),
        "vocab_used": 4,
        "windows": 2,
    }
    assert found.metrics["val"]["tail_tokens"] == 2
    assert found.metrics["ln_vocab_nats"] == pytest.approx(math.log(99))
    assert found.samples["train"] == [
        {"window": 0, "text": "1 1 2 0"},
        {"window": 1, "text": "1 2 3 0"},
    ]
    assert len(manifest.splits["train"]) == 2


def _say_bytes_of_tokens(folder: Path) -> None:
    table = pq.read_table(folder / "documents.parquet").to_pylist()
    for row in table:
        row["n_bytes"] = row["n_tokens"] - 1
    schema = pq.read_schema(folder / "documents.parquet")
    pq.write_table(pa.Table.from_pylist(table, schema), folder / "documents.parquet")
    record = json.loads((folder / "manifest.json").read_text())
    record["documents_sha256"] = hash_file(folder / "documents.parquet")
    for shards in record["splits"].values():
        for shard in shards:
            shard["text_bytes"] = shard["tokens"] - shard["documents"]
    (folder / "manifest.json").write_text(json.dumps(record))


@pytest.fixture
def scripted_shards(pack: Pack, scripted: Scripted) -> tuple[Path, Any]:
    tokenizer = scripted(99)
    folder, _ = pack(TEXTS, tokenizer)
    _say_bytes_of_tokens(folder)
    return folder, tokenizer


def test_shards_of_real_text_pass(pack: Pack, tokenizer: Tokenizer, prose: list[str]) -> None:
    folder, _ = pack({"train": prose, "val": ["Held out: quite other words."]}, tokenizer)
    found = audit(folder, tokenizer, window_tokens=8, ngram_tokens=8)
    assert found.faults == []
    assert found.metrics["val"]["text_bytes"] == len("Held out: quite other words.")
    assert found.samples["train"][0]["text"] == tokenizer.decode(tokenizer.encode(prose[0])[:8])


def test_cut_shard_closes_the_gate_with_both_sizes(scripted_shards: tuple[Path, Any]) -> None:
    # BR-09
    folder, tokenizer = scripted_shards
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-2])
    found = audit(folder, tokenizer)
    assert [str(fault) for fault in found.faults] == [
        f"{SHARD} at token 16: expected 34 bytes, got 32"
    ]
    assert found.metrics["verdict"] == "fail"
    assert found.metrics["shared_windows"] is None
    assert found.samples == {"train": [], "val": []}


def test_flipped_byte_closes_the_gate_with_both_hashes(scripted_shards: tuple[Path, Any]) -> None:
    # BR-09
    folder, tokenizer = scripted_shards
    before = hash_file(folder / SHARD)
    content = bytearray((folder / SHARD).read_bytes())
    content[4] ^= 1
    (folder / SHARD).write_bytes(bytes(content))
    fault = audit(folder, tokenizer).faults[0]
    assert fault.shard == SHARD
    assert fault.reason == f"expected sha256 {before}, got {hash_file(folder / SHARD)}"


def test_missing_shard_closes_the_gate(scripted_shards: tuple[Path, Any]) -> None:
    folder, tokenizer = scripted_shards
    (folder / "val/shard_00000.bin").unlink()
    assert str(audit(folder, tokenizer).faults[0]) == "val/shard_00000.bin: no such file"


def put(place: int, value: int) -> Callable[[np.ndarray], None]:
    def change(ids: np.ndarray) -> None:
        ids[place] = value

    return change


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (5, 99, f"{SHARD} at token 5: id 99 is not below 99"),  # BR-26
        (3, 0, f"{SHARD} at token 3: 3 ends of text for 2 documents"),  # BR-03
        (9, 7, f"{SHARD} at token 9: 1 ends of text for 2 documents"),  # BR-13
    ],
)
def test_wrong_id_closes_the_gate_with_its_offset(
    scripted_shards: tuple[Path, Any], place: int, value: int, message: str
) -> None:
    folder, tokenizer = scripted_shards
    rewrite(folder, SHARD, put(place, value))
    assert [str(fault) for fault in audit(folder, tokenizer).faults] == [message]


def test_end_of_text_in_another_place_closes_the_gate(scripted_shards: tuple[Path, Any]) -> None:
    folder, tokenizer = scripted_shards

    def move(ids: np.ndarray) -> None:
        ids[[8, 9]] = ids[[9, 8]]

    rewrite(folder, SHARD, move)
    assert [str(fault) for fault in audit(folder, tokenizer).faults] == [
        f"{SHARD} at token 8: an end of text where the table has none, or none where it has one"
    ]


def test_document_whose_tokens_are_not_its_bytes_closes_the_gate(
    pack: Pack, tokenizer: Tokenizer
) -> None:
    folder, _ = pack({"train": ["abcdefgh", "The canvas"], "val": ["12345678"]}, tokenizer)
    long_token = max(range(399), key=lambda i: len(tokenizer.token_bytes[i]))
    first = len(tokenizer.encode("abcdefgh")) + 1
    rewrite(folder, SHARD, put(first, long_token))
    fault = audit(folder, tokenizer).faults[0]
    assert (fault.shard, fault.offset) == (SHARD, first)
    assert fault.reason.startswith("document of 10 bytes has tokens of")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tokenizer_sha256", "other", "tokenizer sha256: other there, but scripted here"),
        ("eot_id", 7, "end-of-text id: 7 there, but 0 here"),
        ("vocab_size", 50, "vocabulary size of the tokenizer: 50 there, but 99 here"),
        ("documents_sha256", "x", "documents.parquet: x there"),
        ("token_bytes_sha256", "x", "token_bytes.bin: x there"),
    ],
)
def test_manifest_that_speaks_of_something_else_closes_the_gate(
    scripted_shards: tuple[Path, Any], key: str, value: object, reason: str
) -> None:
    # BR-04
    folder, tokenizer = scripted_shards
    record = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(record | {key: value}))
    assert any(reason in str(fault) for fault in audit(folder, tokenizer).faults)


def test_layout_of_another_vocabulary_closes_the_gate(scripted_shards: tuple[Path, Any]) -> None:
    folder, tokenizer = scripted_shards
    faults = audit(folder, tokenizer, vocab_size=2048).faults
    assert [fault.reason for fault in faults] == ["layout.vocab_size: 99 there, but 2048 here"]


def test_window_in_both_splits_closes_the_gate(pack: Pack, scripted: Scripted) -> None:
    # BR-07
    tokenizer = scripted(99)
    texts = {"train": ["1 2 3", "4 5 6", "7 8 9"], "val": ["30 31 32", "4 5 6"]}
    folder, _ = pack(texts, tokenizer)
    _say_bytes_of_tokens(folder)
    found = audit(folder, tokenizer)
    assert [str(fault) for fault in found.faults] == [
        "val/shard_00000.bin at token 4: window 1 is also a window of train"
    ]
    assert found.metrics["shared_windows"] == 1


def test_hundred_documents_of_one_window_are_a_partition_that_passes(
    pack: Pack, scripted: Scripted
) -> None:
    # BR-07
    texts = [numbers(n * 3 + 1, 3) for n in range(100)]
    folder, _ = pack({"train": texts[:90], "val": texts[90:]}, scripted(400))
    _say_bytes_of_tokens(folder)
    found = audit(folder, scripted(400), max_share=0.0)
    assert found.faults == []
    assert (found.metrics["train"]["windows"], found.metrics["val"]["windows"]) == (90, 10)


def test_copied_passage_at_another_offset_is_found_by_its_runs(
    pack: Pack, scripted: Scripted
) -> None:
    tokenizer = scripted(999)
    copied = numbers(100, 40)
    texts = {
        "train": [f"1 {copied} 2 3", numbers(300, 80)],
        "val": [f"{numbers(500, 50)} {copied} 4 5"],
    }
    folder, _ = pack(texts, tokenizer, shard_tokens=60)
    _say_bytes_of_tokens(folder)
    found = audit(folder, tokenizer, window_tokens=16, ngram_tokens=8, max_share=0.3)
    tokens = 50 + 40 + 2 + 1
    share = (40 - 8 + 1) / (tokens - 8 + 1)
    assert found.metrics["shared_ngram_share"] == pytest.approx(share)
    assert found.metrics["shared_windows"] == 0
    assert found.faults[0].reason.startswith(f"{share:.4f} of its runs of 8 tokens")
    assert audit(folder, tokenizer, window_tokens=16, ngram_tokens=8, max_share=0.4).faults == []


def test_runs_are_found_over_the_pieces_in_which_train_is_read(
    pack: Pack, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("canvaslm.corpus.audit._NGRAM_PIECE", 3)
    tokenizer = scripted(999)
    folder, _ = pack({"train": [numbers(1, 60)], "val": [numbers(5, 30)]}, tokenizer)
    _say_bytes_of_tokens(folder)
    found = audit(folder, tokenizer, ngram_tokens=8)
    assert found.metrics["shared_ngram_share"] == pytest.approx(23 / 24)


def test_share_that_cannot_be_measured_is_null(scripted_shards: tuple[Path, Any]) -> None:
    folder, tokenizer = scripted_shards
    found = audit(folder, tokenizer, ngram_tokens=1000, max_share=0.0)
    assert found.metrics["shared_ngram_share"] is None
    assert found.faults == []


def test_split_shorter_than_a_window_is_refused_with_both_numbers(
    scripted_shards: tuple[Path, Any],
) -> None:
    # BR-11
    folder, tokenizer = scripted_shards
    with pytest.raises(InputError, match="window of 10 tokens in a shard, got 9 tokens"):
        audit(folder, tokenizer, window_tokens=10)
    assert audit(folder, tokenizer, window_tokens=9).metrics["val"]["windows"] == 1


def test_folder_without_a_manifest_is_incomplete(tmp_path: Path, scripted: Scripted) -> None:
    # BR-10
    with pytest.raises(InputError, match="incomplete dataset"):
        audit(tmp_path, scripted(9))


@pytest.mark.parametrize(
    ("stride", "n_windows", "skipped", "overlap", "tail"),
    [(5, 4, [], 0, 1), (6, 3, [5, 11, 17], 0, 3), (4, 5, [], 4, 0)],
)
def test_stride_that_is_not_the_window_shows_what_it_skips_or_repeats(
    stride: int, n_windows: int, skipped: list[int], overlap: int, tail: int
) -> None:
    # BR-12
    coverage = window_coverage(21, window_tokens=5, stride=stride)
    assert coverage.n_windows == n_windows
    assert coverage.skipped.tolist() == skipped
    assert (coverage.overlap_tokens, coverage.tail_tokens) == (overlap, tail)


def test_every_token_is_accounted_for_under_any_stride() -> None:
    # BR-12
    for n_tokens in range(30):
        for window in range(1, 8):
            for stride in range(1, 12):
                coverage = window_coverage(n_tokens, window_tokens=window, stride=stride)
                starts = range(0, n_tokens - window + 1, stride)
                read = [token for start in starts for token in range(start, start + window)]
                assert coverage.n_windows == len(starts)
                assert coverage.overlap_tokens == len(read) - len(set(read))
                assert len(set(read)) + len(coverage.skipped) + coverage.tail_tokens == n_tokens
                assert set(coverage.skipped.tolist()).isdisjoint(read)
