"""Run a training script with the doors open: ``python -m ckstore.run [--store S] script.py ...``."""

from __future__ import annotations

import sys

from ckstore.integrations.launch import main

if __name__ == "__main__":
    main(sys.argv[1:])
