"""Many ranks commit one checkpoint, and restore it in any world and layout.

What is stored is an ordinary manifest; docs/FORMAT.md, section 13, says what is special about it. Each rank writes its
own packs and sends a *part record* to rank 0, which merges all parts into one manifest and publishes it.
"""

LINK_THREAD_NAME = "ckstore-ranks"
"""Name of the thread that serves the connections between ranks."""
