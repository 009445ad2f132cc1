"""Measure ckstore against other tools and against the machine, all inside one run; see docs/BENCH.md."""
