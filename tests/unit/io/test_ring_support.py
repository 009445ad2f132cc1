"""Protects the process: liburing is never loaded on a processor that lacks its instructions."""

import os

import pytest

from ckstore.io.direct_io import NEEDED_FLAGS, require_supported_processor

ALL = " ".join(("fpu", "sse2", *NEEDED_FLAGS, "rdpid"))


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """Return a function that fakes /proc/cpuinfo with these flags, on an x86-64 machine."""
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6.1", "#1", "x86_64")))

    def write(flags):
        path = tmp_path / "cpuinfo"
        text = f"processor\t: 0\nmodel name\t: flags for sale\nflags\t\t: {flags}\nbugs\t\t:\n\nprocessor\t: 1\n"
        path.write_text(text)
        return path

    return write


def test_processor_with_all_flags_may_load_it(facts):
    require_supported_processor(facts(ALL))


@pytest.mark.parametrize("flag", NEEDED_FLAGS)
def test_processor_without_a_flag_may_not_load_it(facts, flag):
    with pytest.raises(ImportError, match="AVX-512" if flag.startswith("avx512") else f"lacks {flag},"):
        require_supported_processor(facts(" ".join(each for each in ALL.split() if each != flag)))


def test_unreadable_cpuinfo_is_a_refusal(facts, tmp_path):
    silent = tmp_path / "silent"
    silent.write_text("processor\t: 0\n")
    for path in (tmp_path / "missing", silent):
        with pytest.raises(ImportError, match="does not list the flags"):
            require_supported_processor(path)


def test_other_architectures_may_load_it(facts, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "host", "6.1", "#1", "aarch64")))
    require_supported_processor(tmp_path / "missing")
