"""Measure ckstore against other tools and against the machine; see docs/BENCH.md."""

import sys
from pathlib import Path

# The S3 server and the fault proxy are the ones that the tests use.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
