"""Kill a job 21 times, and compare its losses with those of a run that nothing happens to: `make surviving`."""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from common.elastic import Blow, ElasticJob

from zero_nb.apps.checkpoints import read_checkpoint
from zero_nb.apps.loop import train_rank
from zero_nb.apps.resume import configured
from zero_nb.comm.launch import run

SECONDS = 1800.0  # for a run without kills, on a machine that is busy with others
TRAINING = {
    "steps": 1000,
    "horizon": 1000,
    "global_batch": 12,
    "block": 64,
    "vocabulary": 256,
    "layers": 3,
    "width": 64,
    "heads": 2,
    "eval_every": 5,
    "save_every": 20,
    "mode": "zero1",  # "auto" takes another one where each rank is a node of its own
    "keep": 2,
    "sample": 0,
    "compare": False,
}

# for a run that is only compared with: held-out files change no step, and their losses take a quarter of the time
SILENT = {"eval_every": 10**6}


def flags_of(training: dict[str, Any]) -> list[str]:
    """Write options as the command line has them."""
    flag = lambda name: "--" + name.replace("_", "-")
    texts = [f"{flag(k)}={v}" for k, v in training.items() if not isinstance(v, bool)]
    switches = {k: v for k, v in training.items() if isinstance(v, bool)}
    return texts + [flag(name if on else f"no_{name}") for name, on in switches.items()]


def saved(out: Path) -> int:
    """Give the step of the newest checkpoint; 0 if there is none."""
    path = out / "checkpoint.pt"
    return torch.load(path, mmap=True, weights_only=True)["step"] if path.exists() else 0


def blows(chance: Random) -> list[Blow]:
    """Choose 21 kills, at four ranks, then three, then four again."""
    kinds = ["rank", "save", "agent", "rank", "save", "grow", "start"]  # the last kills twice
    kinds = [*kinds * 2, *kinds[:-1], "rank", "rank"]
    return [Blow(kind, chance.randint(0, 40), chance.uniform(0, 0.5)) for kind in kinds]


def unbroken(ranks: int, training: dict[str, Any], folder: Path) -> dict[int, float]:
    """Train without any break, and give the losses."""
    config = configured({**training, **SILENT, "out": str(folder)})
    return run(ranks, train_rank, config, timeout=SECONDS)[0].losses["zero_nb"]


def replayed(
    history: list[tuple[int, int, int]], training: dict[str, Any], folder: Path
) -> dict[int, float]:
    """Train on the same numbers of ranks at the same steps, stopping and resuming in peace."""
    losses: dict[int, float] = {}
    for _, end, ranks in history:
        more = {"steps": end, "out": str(folder), "auto_resume": True}
        config = configured({**training, **SILENT, **more})
        losses = run(ranks, train_rank, config, timeout=SECONDS)[0].losses["zero_nb"]
    return losses


def largest_gap(one: dict[int, float], other: dict[int, float]) -> float:
    """Give the largest difference of two curves; both have the same steps."""
    assert one.keys() == other.keys()
    return max(abs(one[step] - other[step]) for step in one)


def code_of() -> str:
    """Name the commit that runs; `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Run the job, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("nbs/benchmark/surviving.json"))
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    given = parser.parse_args()
    chance = Random(given.seed)
    made = {"date": time.strftime("%Y-%m-%d"), "commit": code_of(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with ElasticJob(folder, flags_of(TRAINING)) as job:
            job.start(4)
            job.wait(lambda life: life and life.ranks == 4)
            for blow in blows(chance):
                job.strike(blow, lambda: saved(job.out), chance)
                print(job.struck[-1], "->", job.lives[-1], flush=True)
            job.finish()
        losses = read_checkpoint(str(job.out))["losses"]["zero_nb"]
        alone = {n: unbroken(n, TRAINING, folder / f"of {n}") for n in (3, 4)}
        again = replayed(job.history(), TRAINING, folder / "again")
        steps = [begin for begin, _, ranks in job.history() if ranks != 4]
        equal = (step - 1 for step in losses if losses[step] != alone[4][step])
        kills = [{"grow": 0, "start": 2}.get(struck.kind, 1) for struck in job.struck]
        report = {
            **made,
            "training": TRAINING,
            **job.report(),
            "history": job.history(),
            "kills": sum(kills),
            "in the middle of a save": sum(struck.in_save for struck in job.struck),
            "steps on 4 ranks before the first on 3": min(steps),
            "largest gap to the same ranks without kills": largest_gap(losses, again),
            "largest gap to 4 ranks, unbroken": largest_gap(losses, alone[4]),
            "largest gap of 3 and 4 ranks, both unbroken": largest_gap(alone[3], alone[4]),
            "equal bits up to step": next(equal, max(losses)),
            "losses": {"killed": [*losses.values()], "unbroken": [*alone[4].values()]},
        }
    given.out.write_text(json.dumps(report, indent=None) + "\n")
    print({key: value for key, value in report.items() if "gap" in key or "equal" in key})


if __name__ == "__main__":
    main()
