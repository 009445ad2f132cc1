"""Measure ckstore against other tools and against the machine, all inside one run; see docs/BENCH.md."""

import sys
from pathlib import Path

# The S3 server and the proxy that breaks its answers are those of the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
