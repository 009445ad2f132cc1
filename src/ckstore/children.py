"""What the processes that this one starts for itself are given to go by."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def environment() -> dict[str, str]:
    """Return an environment in which the same modules are found as here, wherever the process is started."""
    here, package = Path.cwd(), str(Path(__file__).parents[1])
    found = [str(here / entry) for entry in sys.path]
    # numpy's threads would cost memory, and do nothing there.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(found if package in found else [package, *found])
    return {**os.environ, "PYTHONPATH": path, **single}
