"""Run named cases, print their tables, and keep their records in ``bench/results``.

    python -m bench.run --case commit_durable
    python -m bench.run --case commit_durable,restore_cold --size 2e9 --rounds 5 --dir /mnt/disk/bench
    python -m bench.run --case 'codec_*' --rounds 9
    python -m bench.run --small                        # every case, in a minute, to check that the bench works

What each case measures, and the limits of the numbers, are in docs/BENCH.md; ``--list`` prints the names.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench import measure
from bench.cases import CASES
from bench.workbench import Bench

HERE = Path(__file__).resolve().parent
SMALL_NBYTES = 64_000_000


def names_of_cases(wanted: str | None) -> list[str]:
    """Return the cases that comma-separated names or patterns select; all of them for None.

    Raises:
        LookupError: A name or pattern selects no case.
    """
    found: list[str] = []
    for pattern in ["*"] if wanted is None else wanted.split(","):
        matching = fnmatch.filter(CASES, pattern)
        if not matching:
            raise LookupError(f"no such case: {pattern} (there are {', '.join(CASES)})")
        found += [name for name in matching if name not in found]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the selected cases; the exit status says whether all of them ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default=None, help="names or patterns, separated by commas; by default all")
    parser.add_argument("--size", type=lambda text: int(float(text)), default=2_000_000_000, help="bytes of state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, default=None, help="a folder on the disk to be measured; it is created if it does not exist"
    )
    parser.add_argument("--cache", type=Path, default=Path(".bench-cache"), help="where the trained state is stored")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument(
        "--tools",
        default=None,
        help="only these tools, coders, stages and other participants, as A,B without spaces; by default all",
    )
    parser.add_argument("--count", type=int, default=1000, help="checkpoints of ls_1000 and history_growth")
    parser.add_argument("--list", action="store_true", help="name the cases, and do nothing else")
    parser.add_argument("--small", action="store_true", help="a state of 64 MB of drawn values; keeps no record")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(f"{name:28} {(case.__doc__ or '').strip()}" for name, case in CASES.items()))
        return 0
    try:
        names = names_of_cases(given.case)
    except LookupError as error:
        parser.error(str(error))
    if given.small:
        given.size, given.rounds, given.count = SMALL_NBYTES, min(given.rounds, 2), min(given.count, 20)
    given.cache.mkdir(parents=True, exist_ok=True)
    (given.cache / ".gitignore").write_text("*\n")
    place = given.dir or given.cache
    place.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ckstore-bench-", dir=place))
    # Some participant names contain a comma followed by a space.
    tools = None if given.tools is None else [name for name in re.split(r",(?! )", given.tools) if name]
    bench = Bench(folder, given.cache, given.size, given.rounds, given.small, given.count, tools)
    has_failed = False
    try:
        for name in names:
            began = time.perf_counter()
            measure.log(f"{name}: {(CASES[name].__doc__ or '').strip()}")
            result = CASES[name](bench)
            result.setting["case_seconds"] = round(time.perf_counter() - began, 1)
            measure.show(result)
            has_failed |= any(who.startswith("ckstore") for who in result.unusable)
            if result.samples and not given.small:
                measure.log(f"kept in {measure.save(result, given.results, folder)}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
