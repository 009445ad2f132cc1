"""What the processes that this one starts for itself are given to go by."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def environment() -> dict[str, str]:
    """Return an environment in which the same modules are found as here, wherever the process is started."""
    package = str(Path(__file__).parents[1])
    found = module_places()
    # numpy's threads would cost memory, and do nothing there.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(found if package in found else [package, *found])
    return {**os.environ, "PYTHONPATH": path, **single}


def module_places() -> list[str]:
    """Return where modules are looked for here, as absolute paths."""
    try:
        here = Path.cwd()
    except OSError:
        # The working folder was removed: what was to be found in it is gone, too.
        return [entry for entry in sys.path if Path(entry).is_absolute()]
    return [str(here / entry) for entry in sys.path]
