"""Interoperability with other tools: import their checkpoints into a run, export a state to files they can read.

Import, from `run.run_import`::

    discover(source)                 # names only: which files form which checkpoint, what is left out
        scan(folder)
    _step_of(checkpoint)             # from its name, trainer_state.json, or its plain values
    Reader.read(checkpoint)
        open_safetensors(file)       # in this process: the format contains no code
        Loader.load(file)            # in a child process (child.py): torch_files.py, unpickle.py
            PlainFields.convert      # objects become their plain fields; nothing of the file is executed
            capture_storable         # foreign_state.py: the state as Captured data, or an error that names leaves
    commit(captured, step)           # given by the caller

Export, from ``export.py``: `write_state` (.pt, .npz) and `export_safetensors`.

Foreign files are untrusted: they are never executed, and everything they claim is checked against their length. Only
`torch_files` imports torch, and only in the child. How a state is stored does not belong here.
"""

from __future__ import annotations
