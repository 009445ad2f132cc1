"""The saver process: commits staged states in the background, and finishes them even if its trainer dies.

``__main__`` starts ``Server``, which receives messages; ``Committer`` commits one ticket after the other, and reads its
state through ``staged_state``. This process never imports torch.
"""

from __future__ import annotations
