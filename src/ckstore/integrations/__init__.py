"""Doors into training frameworks: transformers, Lightning and accelerate save into a store and resume from it.

A framework saves folders or files, and asks for them again by path. A door puts a *pointer* where the framework expects
a checkpoint, and commits the state. Start with `pointer_store.PointerStore`, which all doors use::

    save(state, step, pointer)   # commit in the background, then write the pointer
    poll()                       # after each step: settle the pointers of commits that have ended, delete what is due
    load(pointer, into=...)      # restore strictly
    remove(pointer)              # delete the checkpoint, once everything saved later is durable

`pointers.py` reads and writes pointers, `random_states.py` captures random states on every rank, `signatures.py`
refuses framework versions whose methods differ from those that a door overrides, and `launch.py` opens doors for a
script. Each framework has a module of its name; `checkpoint_folders.py`, `model_parts.py` and `hub_uploads.py` belong
to transformers, `exact_resume.py`, `leaves.py` and `lightning_copies.py` to Lightning.

The store is the truth. A pointer without a checkpoint is refused with the name of the newest one; a checkpoint without
a pointer stays. No framework is imported unless its door is used. How a state is stored does not belong here.
"""
