"""The names of on_numpy from the compiled extension, ckstore._native (C++17, nanobind).

Same arguments, same results, bit for bit; see on_numpy for what each loop does. Importing this module
fails with ImportError where the extension was not built.
"""

from __future__ import annotations

from ckstore._native import *
