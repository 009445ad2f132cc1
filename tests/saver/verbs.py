"""A store with the verbs of background.py, until api.py has them."""

from __future__ import annotations

from ckstore import api
from ckstore.background import Background


class Store(Background, api.Store):
    """What users get."""

    def commit(self, *args, **options):
        with self._lock:
            self._come_home()
            receipt = super().commit(*args, **options)
            self._went_on()
            return receipt

    def restore(self, *args, **options):
        with self._lock:
            self._settle()
            state = super().restore(*args, **options)
            self._went_on()
            return state

    def rewind(self, *args):
        with self._lock:
            self._come_home()
            info = super().rewind(*args)
            self._went_on()
            return info

    def tag(self, *args):
        with self._lock:
            self._settle()
            super().tag(*args)

    def delete(self, *args):
        with self._lock:
            self._settle()
            return super().delete(*args)


def install():
    """Let ``ckstore.open`` make such stores."""
    if not issubclass(api.Store, Background):
        api.Store = Store
