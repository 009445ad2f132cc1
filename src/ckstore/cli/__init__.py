"""The command line of the library: no command does what the Python API cannot.

Start at ``main.py``, which runs a command and turns errors into exit codes. ``parser.py`` has the list of commands and
the options they share, ``render.py`` all output. Each command has a file; two that belong together share one.
What a command does belongs to the library: a file here parses options, calls one verb of ``Store``, prints the result.
"""

from __future__ import annotations
