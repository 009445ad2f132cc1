"""The command line. Each command parses its options, calls one verb of `Store`, and prints the result.

Read in this order::

    main.main(arguments)          # runs a command, turns errors into exit codes; a plain `ls` skips the parser
    parser.parse_and_run          # COMMANDS: name of a command -> its module, imported only when it is called
    files.py, gc.py, ...          # the commands; the function is called like the command
    warnings.py                   # shows what the library logs
    render.py                     # all output: tables and sentences for people, JSON for programs

Commands on one subject share a module: ``files.py`` (restore, export, report, import), ``gc.py`` (gc), ``health.py``
(status, verify, repair, quarantine, doctor, bench), ``history.py`` (tag, untag, delete, undelete, trash, rewind),
``inspect.py`` (show, diff, stats, du), ``rewrite.py`` (repack, demote), ``tiers.py`` (init, push, pull, mirror, adopt).
``ls.py`` must not import typer, so its options are in ``parser.py``.

No command can do what the Python API cannot: what a command does belongs in `Store`, not here. JSON keys, table
headings, option names and exit codes are stable; a test pins them.
"""

from __future__ import annotations
