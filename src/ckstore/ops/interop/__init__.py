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

Export, from ``export.py``: `write_state` (.pt, .npz) and `export_safetensors`; from ``stored_tensors.py``: the same of
a checkpoint that need not fit into memory; from ``model_folder.py``, for transformers and PEFT::

    export_model_folder(manifest, request)
        select_weights(manifest)     # weights.py: which tensors, and their names, from the manifest alone
        find_hub_model(config)       # hub_model.py: what the model class expects, if transformers is installed
        adapters_of(weights)         # adapters.py: weights of adapters as PEFT names them
        TensorReader.read(part)      # stored_tensors.py: groups of tensors, written as they are read
        TargetFolder.publish(draft)  # target_folder.py: loadable only when complete

Foreign files are untrusted: they are never executed, and everything they claim is checked against their length. An
import uses torch only in `torch_files`, and only in the child. How a state is stored does not belong here.
"""

from __future__ import annotations
