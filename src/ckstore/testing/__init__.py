"""What others need to test their backends and codecs, and what proves the promises of this one."""
