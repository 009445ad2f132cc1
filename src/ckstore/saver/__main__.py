"""``python -m ckstore.saver SOCKET BELL ARENA``: a saver on three inherited descriptors, as ``client`` starts it."""

import sys

from ckstore.saver.start import main

sys.exit(main([int(argument) for argument in sys.argv[1:]]))
