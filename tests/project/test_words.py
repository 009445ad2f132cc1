"""Protects plain wording: documents, code and tests use no word that the style guide bans.

``python tests/support/words.py`` prints the counts of each folder; with ``src/ckstore/io`` as argument, each finding
there.
"""

from __future__ import annotations

import pytest

from support import words


def test_no_banned_word():
    found = []
    for path in words.files():
        name = path.relative_to(words.ROOT).as_posix()
        found += [f"{name}:{line}: {banned}" for line, banned in words.findings(path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "sentence",
    [
        "Whoever opens the run waits.",
        "The pack is put aside.",
        "All are removed at\nonce.",
        "It lets go of the lease.",
        "The manifest is NO MORE.",
        "A link that is none is refused.",
        "What it has told is kept.",
        "It lies in the trash.",
        "It ends soon.",
    ],
)
def test_banned_word_is_found(sentence):
    assert list(words.in_text(sentence))
    assert list(words.in_source(f'"""{sentence}"""\n'))
    assert list(words.in_source("# " + sentence.replace("\n", "\n# ") + "\n"))
    assert list(words.in_source(f"raise ValueError({sentence!r})\n".replace("\\n", " ")))


def test_banned_phrase_across_joined_strings_is_found():
    assert list(words.in_source('x = 1\nsay(\n    "all at "\n    "once"\n)\n')) == [(3, "at once")]
    assert list(words.in_text("one\ntwo at once")) == [(2, "at once")]


@pytest.mark.parametrize(
    "sentence",
    [
        "It returns as soon as everything was copied.",
        "The value is None; return it if there is none.",
        "It takes no more than 16 requests.",
        "Besides, the tools are fated to be bold.",
        "The file `doomed` and ``told`` are names.",
        "See offset 4.",
    ],
)
def test_plain_sentence_is_not_found(sentence):
    assert not list(words.in_text(sentence))
    assert not list(words.in_source(f'"""{sentence}"""\n'))


def test_banned_identifier_is_found():
    source = "doomed_packs = Fates(told=toldAll, tolerance=betold)\n"
    assert [found for _, found in words.in_source(source)] == [
        "name doomed_packs",
        "name Fates",
        "name told",
        "name toldAll",
    ]


def test_name_in_a_store_may_be_a_string():
    assert not list(words.in_source('NAME = "doomed"\n'))
