"""The benchmark between two network namespaces of this machine: `make link`, for root."""

import argparse
import sys
from pathlib import Path

from common.two_machines import benchmark_on_two_machines, missing


def main() -> None:
    """Measure with one rank on each side, and with two."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=f"{__doc__} Further flags are the benchmark's."
    )
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--per-side", type=int, nargs="+", default=[1, 2], metavar="RANKS")
    parser.add_argument("--out", default="nbs/benchmark/two_machines", metavar="FOLDER")
    given, flags = parser.parse_known_args()
    if why := missing():
        sys.exit(why)
    words = f"two network namespaces of one machine, {given.rate.replace('gbit', ' Gbit/s')}"
    flags += ["--network", words, "--out", str(Path(given.out).resolve()), "--add"]
    for ranks in given.per_side:
        print(benchmark_on_two_machines(ranks, flags, 3600.0, given.rate))


if __name__ == "__main__":
    main()
