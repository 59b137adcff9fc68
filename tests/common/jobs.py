"""The main job on a tiny model."""

from zero_nb.apps.loop import train_rank
from zero_nb.apps.resume import configured
from zero_nb.comm.launch import run

TINY = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "block": 32,
    "vocabulary": 256,
    "batch": 2,
    "steps": 6,
    "eval_every": 3,
    "save_every": 4,
    "sample": 8,
    "warmup": 0.2,
    "rounds": 0,  # of measuring
}
SHARDED = {**TINY, "checkpoint": "sharded", "horizon": 6, "rounds": 0, "save_every": 2}


def lives(out, *steps_of_ranks, **chosen):
    """Train in lives of some ranks up to some step; gives the reports of the last."""
    given = {**SHARDED, "auto_resume": True, "global_batch": 6, **chosen, "out": str(out)}
    del given["batch"]
    for ranks, steps in steps_of_ranks:
        reports = run(ranks, train_rank, configured({**given, "steps": steps}))
    return reports
