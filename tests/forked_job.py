"""Kill an elastic job four times whose agents and ranks are copies of this process, and leave in FOLDER what
happened: `python tests/forked_job.py FOLDER`, for tests/test_surviving.py.

The process that is copied must have one thread. One of pytest's workers has more, and of the agents
that it forked some waited forever for a lock that another thread had held."""

import json
import sys
from pathlib import Path
from random import Random

from common.elastic import Blow, ElasticJob, die_with_parent
from surviving import TRAINING, flags_of, saved

SHORT = {**TRAINING, "steps": 160, "horizon": 160, "layers": 2, "width": 32, "save_every": 10}
BLOWS = [Blow("save", 3), Blow("agent", 4, 0.05), Blow("grow", 6), Blow("start", 4, 0.1)]


def main() -> None:
    """Run the job, and write what was found."""
    die_with_parent()
    threads = [*Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, "a process with threads must not be copied"
    folder = Path(sys.argv[1])
    chance = Random(3)
    # where cores are short, an agent comes late; two would train to the end alone
    job = ElasticJob(folder, flags_of(SHORT), nnodes="2:3", fork=True, last_call=15)
    with job:
        job.start(3)
        job.wait(lambda life: life and life.ranks == 3)
        for blow in BLOWS:
            job.strike(blow, lambda: saved(job.out), chance)
        job.finish()
    report = {**job.report(), "history": job.history()}
    (folder / "job.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
