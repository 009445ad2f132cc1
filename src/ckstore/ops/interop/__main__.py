"""Start the child that loads foreign files: ``python -m ckstore.ops.interop FD``."""

from __future__ import annotations

import sys

from ckstore.ops.interop.child import serve

if __name__ == "__main__":
    serve(int(sys.argv[1]))
