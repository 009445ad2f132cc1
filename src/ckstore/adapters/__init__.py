"""The hosts of ckstore: torch, and what is built on it. Nothing outside this package imports torch."""
