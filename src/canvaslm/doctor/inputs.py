"""Is what a run would be made of there, whole, and of one kind?"""

import json
from pathlib import Path

from canvaslm.code_fingerprint import fingerprint
from canvaslm.corpus.documents import SPLITS
from canvaslm.corpus.fetch import hash_file
from canvaslm.corpus.integrity import read_ids
from canvaslm.corpus.manifest import Shard, read_manifest, read_places, read_token_bytes
from canvaslm.corpus.tokenizer import Tokenizer
from canvaslm.doctor.patient import Patient
from canvaslm.doctor.probe import NotThereError, Probe, Seen
from canvaslm.errors import InputError
from canvaslm.params import read_yaml
from canvaslm.reporting.differences import in_one_line
from canvaslm.training.memory import refuse_what_does_not_fit

_SHAPES = ("layout.", "model.", "diffusion.")
_SHOWN = 3


def _look_at_params(patient: Patient) -> Seen:
    """Every section is read with its model."""
    path = patient.places.params
    patient.places.validate(path)
    content = read_yaml(path)
    return Seen(
        looked_at=str(path),
        measured=f"profile {content['profile']}, {len(content) - 1} sections",
        holds=True,
        next_step="",
    )


def _look_at_shards(patient: Patient) -> Seen:
    """Manifest, sizes, and the hash of every file that it speaks of."""
    patient.refuse_absent_shards()
    place = patient.places.shards
    manifest = read_manifest(place)
    shards = [shard for split in SPLITS for shard in manifest.splits[split]]
    wrong = [
        shard.file
        for shard in patient.track(shards, total=len(shards), label="shards hashed")
        if hash_file(place / shard.file) != shard.sha256
    ]
    read_token_bytes(place)
    read_places(place, "train")
    tokens = sum(shard.tokens for shard in shards)
    return Seen(
        looked_at=f"{place}: manifest, sizes, hashes",
        measured=f"{len(shards)} shards, {tokens:,} tokens; "
        + (f"another hash: {', '.join(wrong[:_SHOWN])}" if wrong else "all hashes agree"),
        holds=not wrong,
        next_step="the files were changed after packing: run `dvc repro audit_windows`",
    )


def _look_at_ids(patient: Patient) -> Seen:
    """Every id is one of the vocabulary that the manifest states."""
    place = patient.places.shards
    manifest = read_manifest(place)
    shards = [shard for split in SPLITS for shard in manifest.splits[split]]
    wrong: list[Shard] = []
    highest = 0
    for shard in patient.track(shards, total=len(shards), label="shards read"):
        largest = int(read_ids(place, shard, manifest).max())
        highest = max(highest, largest)
        if largest >= manifest.vocab_size:
            wrong.append(shard)
    told = f"; in {', '.join(shard.file for shard in wrong[:_SHOWN])}" if wrong else ""
    return Seen(
        looked_at=f"{place}: every id",
        measured=f"ids up to {highest}, vocabulary {manifest.vocab_size}{told}",
        holds=not wrong and manifest.eot_id < manifest.vocab_size,
        next_step="the shards were packed with another tokenizer: run `dvc repro audit_windows`",
    )


def _look_at_windows(patient: Patient) -> Seen:
    """Each split has a window."""
    train, held_out = patient.job.windows, patient.held_out
    return Seen(
        looked_at=f"{patient.places.shards}: both splits",
        measured=f"{len(train):,} training and {len(held_out):,} held-out windows of "
        f"{train.window_tokens} tokens",
        holds=True,
        next_step="",
    )


def _look_at_fingerprints(patient: Patient) -> Seen:
    """The code that runs now is the code that DVC believes in."""
    root, place = patient.places.root, patient.places.reports / "code"
    recorded = sorted(place.glob("*.json"))
    if not recorded:
        raise NotThereError(f"no fingerprints in {place}", command="dvc repro fingerprint_code")
    stale = [file.stem for file in recorded if not _is_fresh(file, root)]
    return Seen(
        looked_at=f"{place} against the sources",
        measured=f"{len(stale)} of {len(recorded)} are of other code"
        + (f": {', '.join(stale[:_SHOWN])}" if stale else ""),
        holds=not stale,
        next_step="run `dvc repro`, which finds out what the edit concerns",
    )


def _look_at_shapes(patient: Patient) -> Seen:
    """Params, tokenizer, shards and checkpoint speak of one model; a key that differs is named."""
    patient.job  # noqa: B018 - what contradicts itself is refused in one line
    wrong, told = _unlike_tokenizer(patient), ""
    try:
        checkpoint = patient.checkpoint
        state, told = patient.stored_in(checkpoint), f"the same shape as {checkpoint}"
        unlike = [] if state is None else patient.unlike(state)
        wrong += [f"{checkpoint}: {in_one_line([x])}" for x in unlike if x.key.startswith(_SHAPES)]
        if state is None:  # which is for another probe to tell
            told = f"{checkpoint} does not say which"
    except NotThereError as absent:
        told = absent.what
    layout = patient.recipe.layout
    return Seen(
        looked_at="params, shards, tokenizer, checkpoint",
        measured="; ".join(wrong)
        or f"windows of {layout.window_tokens} over {layout.vocab_size} ids; {told}",
        holds=not wrong,
        next_step="restore that key, or train that shape: `make repro`",
    )


def _look_at_memory(patient: Patient) -> Seen:
    """The estimate of the run's peak against what this machine has left."""
    estimate = refuse_what_does_not_fit(patient.recipe, patient.device)
    return Seen(
        looked_at=f"the estimate for {patient.device.type}",
        measured=f"{estimate.total / 2**30:.2f} GiB, which fits",
        holds=True,
        next_step="",
    )


def _is_fresh(recorded: Path, root: Path) -> bool:
    stage = root / "stages" / recorded.name.replace(".json", ".py")
    try:
        return json.loads(recorded.read_text(encoding="utf-8")) == fingerprint(stage, root)
    except (OSError, ValueError, InputError):
        return False


def _unlike_tokenizer(patient: Patient) -> list[str]:
    """What the tokenizer, where there is one, and the shards say differently."""
    path, manifest = patient.places.tokenizer, patient.job.windows.manifest
    if not path.exists():
        return []
    tokenizer = Tokenizer.load(path)
    pairs = {
        "sha256": (manifest.tokenizer_sha256, tokenizer.sha256),
        "vocabulary": (manifest.vocab_size, tokenizer.vocab_size),
        "end-of-text id": (manifest.eot_id, tokenizer.eot_id),
    }
    return [
        f"{path}: {what} {found}, the shards say {said}"
        for what, (said, found) in pairs.items()
        if said != found
    ]


INPUTS = (
    Probe(
        name="params_are_valid",
        section="The params file is refused",
        look=_look_at_params,
        is_shared=True,
    ),
    Probe(
        name="shards_are_whole",
        section="No shards, or an incomplete dataset",
        look=_look_at_shards,
        is_shared=True,
    ),
    Probe(
        name="ids_are_in_range",
        section="A token lies outside the vocabulary",
        look=_look_at_ids,
        rests_on=("shards_are_whole",),
        is_shared=True,
    ),
    Probe(
        name="windows_fit",
        section="No window fits",
        look=_look_at_windows,
        rests_on=("params_are_valid", "shards_are_whole"),
    ),
    Probe(
        name="fingerprints_are_fresh",
        section="An edit of code reruns nothing, or too much",
        look=_look_at_fingerprints,
        is_shared=True,
    ),
    Probe(
        name="shapes_agree",
        section="Shapes do not fit",
        look=_look_at_shapes,
        rests_on=("windows_fit",),
    ),
    Probe(
        name="run_fits_into_memory",
        section="It does not fit into memory",
        look=_look_at_memory,
        rests_on=("params_are_valid",),
    ),
)
