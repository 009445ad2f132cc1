"""The command line: the same library, one file a command; no command does what the Python API cannot."""
