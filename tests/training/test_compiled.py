"""Is a compiled model the plain one, by the names and values of its checkpoints?"""

import numpy as np
import pytest
import torch

from canvaslm.checkpoint import load_model
from canvaslm.training.job import make_job
from canvaslm.training.learner import Learner
from canvaslm.training.lineage import open_origin
from canvaslm.training.run import pretrain
from runs import StoppedError, finish, job_of, loss_rows, stop_after


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler itself warns about parts of torch
def test_checkpoints_pass_between_compiled_and_plain(tiny_recipe, shards, tmp_path):
    """BR-43: each way by name, with the same first loss; and a compiled run resumes twice."""

    def recipe(compile):
        return tiny_recipe(
            "autoregressive", model={"n_layers": 1}, steps=4, save_every=1, log_every=1,
            compile=compile,
        )  # fmt: skip

    def fork(compile, parent, place):
        origin = open_origin(resume=None, fork=parent)
        job = make_job(recipe(compile), shards=shards, code_digest="c", parent=origin.parent)
        places = {"work": place / "work", "out": place / "out", "reports": place / "reports"}
        pretrain(job, **places, track=stop_after(2), origin=origin)

    jobs = {compile: job_of(recipe(compile), shards) for compile in (False, True)}
    finish(jobs[False], tmp_path / "plain")
    straight = finish(jobs[True], tmp_path / "compiled")
    for _ in range(2):
        with pytest.raises(StoppedError):
            finish(jobs[True], tmp_path / "torn", stop_after(1))
    assert finish(jobs[True], tmp_path / "torn") == straight
    outs = {
        compile: tmp_path / name / "out" for compile, name in ((False, "plain"), (True, "compiled"))
    }
    keys = [load_model(out).state_dict().keys() for out in outs.values()]
    assert keys[0] == keys[1]
    assert not any("_orig_mod" in key for key in keys[0])
    for parent in outs.values():
        losses = []
        for compile in (False, True):
            place = tmp_path / f"{parent.parent.name} to {compile}"
            with pytest.raises(StoppedError):
                fork(compile, parent, place)
            (run,) = (place / "work").iterdir()
            row = (run / "steps.csv").read_text().splitlines()[1].split(",")
            losses.append(float(row[1]) / int(row[2]))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        fresh = float(loss_rows(tmp_path / "plain")[0]["loss_nats"])
        assert abs(losses[0] - fresh) > 1e-3, "weights of the seed have another first loss"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_in_bfloat16_are_the_plain_ones(tiny_recipe, shards, windows):
    """Fusing may skip a rounding, and changes nothing else."""
    records = {}
    for compile in (False, True):
        recipe = tiny_recipe(
            "autoregressive", model={"n_layers": 1}, compile=compile, precision="bfloat16"
        )
        learner = Learner(recipe, job_of(recipe, shards).objective, torch.device("cpu"))
        records[compile] = [learner.take_step(s, windows[:4], np.arange(4)) for s in range(2)]
    for plain, compiled in zip(*records.values(), strict=True):
        assert compiled.nats == pytest.approx(plain.nats, rel=1e-5)
        assert compiled.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-3)
