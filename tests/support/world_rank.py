"""A rank that finds the others by ``Ranks``: ``world_rank.py torch|env FOLDER``, started by torchrun.

It prints one JSON line: what it found, and what all ranks agreed on.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

from ckstore.ranks.world import Ranks
from support.link_rank import commit


def main(how, folder):
    """Find the others twice, commit, and agree."""
    if how == "torch":
        from torch import distributed

        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        first, second = Ranks.of_torch(), Ranks.of_torch(join_seconds=30)
        # Ranks 1 and 2 are a job of their own.
        group = distributed.new_group([1, 2])
        pair = Ranks.of_torch(group) if distributed.get_rank() else Ranks(0, 1)
        distributed.destroy_process_group()
    else:
        first, second = Ranks.of_env(), Ranks.of_env(join_seconds=30)
        pair = Ranks(0, 1)
    assert first.token != second.token
    assert first.token not in repr(first)
    link = first.link()
    assert link is first.link()
    receipt = commit(link, 5, folder).receipt
    agreed = second.link().agree("host", b"%d" % second.rank, max)
    paired = pair.link().agree("pair", b"%d" % pair.rank, max)
    found = {"rank": first.rank, "world": first.world, "address": first.address, "pair": [pair.rank, pair.world]}
    found |= {"receipt": receipt.decode(), "agreed": agreed.decode(), "paired": paired.decode()}
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    for ranks in (first, second, pair):
        ranks.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
