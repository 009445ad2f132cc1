"""A framework whose methods differ is refused by name."""

from __future__ import annotations

import pytest

from ckstore.errors import UnsupportedError
from ckstore.integrations.signatures import check_signatures


class Trainer:
    def save(self, folder, trial=None): ...


def check(**expected):
    check_signatures(Trainer, expected, library="trainers", version="9.0", tested=("5.23", "5.24"))


def test_known_signature_passes():
    check(save=("self", "folder", "trial"))


def test_other_parameters_are_refused():
    words = (
        r"trainers 9\.0 .*Trainer\.save has the parameters \(self, folder, trial\), not \(self\)\. Install trainers 5"
    )
    with pytest.raises(UnsupportedError, match=words):
        check(save=("self",))


def test_missing_method_is_refused():
    with pytest.raises(UnsupportedError, match=r"Trainer\.load is missing"):
        check(load=("self",))
