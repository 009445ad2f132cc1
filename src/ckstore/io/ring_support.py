"""Keep liburing from being loaded where it would kill the process: on every processor without AVX-512.

Its one wheel was compiled for its author's processor, and 512-bit vectors lie even in what makes a ``Ring``. Elsewhere
that is SIGILL, which no probe survives, so the processor is asked before the import.
"""

from __future__ import annotations

import os
from pathlib import Path

_CPU_FACTS = Path("/proc/cpuinfo")

NEEDED_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "bmi1", "bmi2", "movbe")
"""As Linux names them. Read off the disassembly of the wheel of 2026.3.30: zmm registers, kortestw, bextr, mulx, movbe;
of AVX-512 all that compilers take for granted where they use some of it (x86-64-v4 of the psABI)."""


def refuse_where_it_kills(cpu_facts: Path = _CPU_FACTS) -> None:
    """Return where liburing may be loaded; for processors of other kinds there is no wheel, so it was made there.

    Args:
        cpu_facts: Where Linux says what the processor can do.

    Raises:
        ImportError: It may not, or nobody can tell; the message says why.
    """
    if os.uname().machine != "x86_64":
        return
    flags = _flags_of(cpu_facts)
    if flags is None:
        raise ImportError(f"liburing needs AVX-512, and {cpu_facts} does not say whether the processor has it")
    missing = [flag for flag in NEEDED_FLAGS if flag not in flags]
    if missing:
        what = "AVX-512" if all(flag.startswith("avx512") for flag in missing) else ", ".join(missing)
        raise ImportError(f"the processor lacks {what}, which liburing was compiled for")


def _flags_of(cpu_facts: Path) -> frozenset[str] | None:
    """Return the flags of the first processor; None where they are not told."""
    try:
        # Hundreds of processors make it long, and Linux writes it as it is read.
        with cpu_facts.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(value.split())
    except OSError:
        return None
    return None
