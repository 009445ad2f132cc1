"""What several test folders share: fixtures, fakes, simulators' scenarios, and the programs of child processes.

Start with ``sampling.py`` (which part of a long programme a run takes). Tests do not belong here.
"""
