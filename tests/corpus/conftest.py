"""Small corpora, vocabularies and shards."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from canvaslm.corpus.manifest import Manifest
from canvaslm.corpus.shards import PackParams, pack_shards
from canvaslm.corpus.tokenizer import Tokenizer, TokenizerParams, train_tokenizer
from canvaslm.reporting.progress import untracked

EOT = "<|endoftext|>"
_PROSE = [
    "The canvas is noisy at first, and every step makes some of its words plain.",
    "A window holds eight canvases; the canvases before the last one are finished.",
    "It's a long way from 1790 to 2025, isn't it? They've counted 249 addresses.",
    "  Indented lines\n\tand tabs\r\nand   runs of blanks   \n\n",
    "naïve café — 北京 🙂 e\u0301 \u2028 \u0085 x\u00a0y",
] * 3


@pytest.fixture(scope="session")
def prose() -> list[str]:
    return list(_PROSE)


@pytest.fixture(scope="session")
def tokenizer_json(prose: list[str]) -> bytes:
    params = TokenizerParams(source="train", end_of_text=EOT, min_frequency=2)
    return train_tokenizer(prose, params, 400)


@pytest.fixture(scope="session")
def tokenizer(tokenizer_json: bytes) -> Tokenizer:
    return Tokenizer(tokenizer_json, "tokenizer.json")


class ScriptedTokenizer:
    """Texts are numbers with blanks between them, and they are their own ids."""

    sha256 = "scripted"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eot_id = 0
        self.token_bytes = [b"x"] * vocab_size

    def encode_many(self, texts: Sequence[str], *, n_threads: int) -> list[np.ndarray]:
        del n_threads
        return [np.array(text.split(), dtype=np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


@pytest.fixture
def scripted() -> Callable[[int], ScriptedTokenizer]:
    return ScriptedTokenizer


WriteDocuments = Callable[[Path, dict[str, list[str]]], Path]


@pytest.fixture
def write_documents() -> WriteDocuments:
    """Write the documents of both splits as collect_documents would."""

    def write(folder: Path, texts: dict[str, list[str]]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        doc_id = 0
        for split, documents in texts.items():
            rows = []
            for text in documents:
                content = text.encode()
                rows.append(
                    {
                        "doc_id": doc_id,
                        "source": f"{split}.jsonl:{doc_id + 1}",
                        "text": text,
                        "n_bytes": len(content),
                        "sha256": hashlib.sha256(content).hexdigest(),
                    }
                )
                doc_id += 1
            schema = pa.schema(
                [
                    ("doc_id", pa.int64()),
                    ("source", pa.string()),
                    ("text", pa.string()),
                    ("n_bytes", pa.int64()),
                    ("sha256", pa.string()),
                ]
            )
            pq.write_table(pa.Table.from_pylist(rows, schema), folder / f"{split}.parquet")
        return folder

    return write


Pack = Callable[..., tuple[Path, Manifest]]


@pytest.fixture
def pack(tmp_path: Path, write_documents: WriteDocuments) -> Pack:
    """Pack texts with a tokenizer and give the folder and its manifest."""

    def packed(
        texts: dict[str, list[str]],
        tokenizer: Tokenizer,
        *,
        shard_tokens: int = 1000,
        n_threads: int = 1,
        name: str = "shards",
    ) -> tuple[Path, Manifest]:
        documents = write_documents(tmp_path / f"documents-{name}", texts)
        params = PackParams(shard_tokens=shard_tokens, n_threads=n_threads)
        out = tmp_path / name
        return out, pack_shards(documents, tokenizer, params, out, track=untracked)

    return packed
