"""Shared test code: fixtures, fakes, simulator scenarios, and the programs of child processes.

Start with ``sampling.py``, which selects the part of a long test that a run executes. Tests do not belong here.
"""
