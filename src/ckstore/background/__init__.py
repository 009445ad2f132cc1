"""Background commits: copy a state into shared memory and let another process, the saver, commit it.

One commit, step by step::

    trainer: Store.commit_async                       trainer.py: what a Store keeps between its commits
        BackgroundCommits.submit(request)             commits.py
        layout = StagingArea.plan_layout(state)       staging.py, arena_layout.py: where each byte goes in a slot
        slot = wait for a free slot of the arena      arena.py, as policy.on_busy says
        Saver.begin(ticket, slot)                     client.py, protocol.py: head in the slot, Begin on the socket
        Staging.copy_now()                            copying.py (host), device_copy.py and cuda.py (devices)
        return Pending                                pending.py; guarded memory is still being copied
    saver: Server receives Begin                      saver/server.py
        Committer.commit(ticket)                      saver/committer.py: take the lease, run a normal commit
            reads wait for staged units               saver/staged_state.py
            publishing waits for Staged               GatedLease.check
        sends Done(receipt), then SlotFree
    trainer: Pending.result() returns the receipt

While guarded memory is being copied, ``optimizer_guard.py`` makes the optimizer's next step wait. The saver outlives
its trainer: a state that is fully staged is published even if the trainer is killed.

Not here: how a state is captured (``state``), coded and published (``commit``), and who may write a run (``store``).
"""

from __future__ import annotations
