"""Lossy values: changes and moments as codes of few bits, with the error that was made."""
