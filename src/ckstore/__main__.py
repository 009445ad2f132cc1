"""Run the command line as ``python -m ckstore``."""

from __future__ import annotations

from ckstore.cli.main import main

if __name__ == "__main__":
    main()
