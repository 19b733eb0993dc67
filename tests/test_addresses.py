"""Addresses as people write them: what is one, and what happens with what is none."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crowdml.addresses import BadAddress, read_address
from crowdml.datasets.downloads import download
from crowdml.device.client import Client
from crowdml.errors import DataError, TaskError
from crowdml.task import from_canonical

sys.path.insert(0, str(Path(__file__).parent / "cli"))
from cli_runner import refused

NONE = [
    "http://[",
    "http://]",
    "http://[::1",
    "http://[::1]x",
    "http://[:::1]",
    "http://a b;rm -rf ~",
    "http://`id`",
    "http://a$(b)",
    "http://a'b",
    "http://a/b c",
    "http://a/;x",
    "http://a&b",
    "http://user@a",
    "http://user:word@a",
    "http://a?b",
    "http://a#b",
    "http://a:",
    "http://a:x",
    "http://a:0",
    "http://a:65536",
    "http://..",
    "http://-a",
    "http://a-",
    "http://" + "a" * 64,
    "http://" + "a." * 200,
    "http://\u00e9.example",
    "http://a\n",
    "http://a\0",
    "ftp://a",
    "//a",
    "",
    "http://" + "a" * 100_000,
]


@pytest.mark.parametrize("text", NONE, ids=range(len(NONE)))
def test_what_is_no_address_is_refused_in_a_sentence(text: str):
    """Review 2, network findings L7 and L11."""
    if text == "http://a\n":  # what surrounds an address is no part of it
        assert str(read_address(text)) == "http://a"
        return
    with pytest.raises(BadAddress) as refusal:
        read_address(text)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("https://study.example", "study.example", 443, ""),
        ("http://127.0.0.1:8080/", "127.0.0.1", 8080, ""),
        ("http://[::1]:8790", "::1", 8790, ""),
        ("http://[fe80::1%eth0]:80", "fe80::1%eth0", 80, ""),
        ("https://a_b.c-d.e.:1/some/~path/%20/", "a_b.c-d.e.", 1, "/some/~path/%20"),
        ("HTTPS://Study.Example", "Study.Example", 443, ""),
    ],
)
def test_an_address_has_these_parts(text: str, host: str, port: int, path: str):
    found = read_address(text)
    assert (found.host, found.port, found.path) == (host, port, path)
    assert str(read_address(str(found))) == str(found)
    assert Client(text).url == str(found)


@given(st.text("ab.:/[]%?#@;&|$`'\"(){}<>*~! \\\n\0-_09\u00e9", max_size=20))
def test_whatever_passes_is_one_word_of_a_shell(rest: str):
    """Review 2, network finding L11: an address stands unquoted in the join command that participants copy."""
    try:
        found = str(read_address(f"http://{rest}"))
    except BadAddress:
        return
    assert shlex.split(found) == [found]
    assert not set(found) & set(";&|$`'\"(){}<>*! \\\n\0?#")


@pytest.mark.parametrize("url", ["http://[", "http://a b", "http://x:99999"])
def test_commands_that_take_an_address_say_one_sentence(url: str, tmp_path: Path):
    """Review 2, network finding L7: `join http://[` and `invite --address http://[` ended with a traceback."""
    device = ("--source", "csv:none.csv", "--folder", str(tmp_path / "device"))
    for said in (
        refused("join", url, "abcd-efgh-jkmn-pqrs-tvwx", *device),
        refused("fleet", url, "abcd-efgh-jkmn-pqrs-tvwx", *device),
    ):
        assert "is no address" in said or "no usable port" in said
    with pytest.raises(DataError):
        download(f"{url}/digits.npz", tmp_path / "digits.npz", lambda *_: None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (".".join("a" for _ in range(3000)) + " = 1", "parts with dots between"),
        ("x = 0x" + "f" * 300_000, "bits: at most"),
        ("x = 1e99999999", "not between"),
        ("[a" + ".a" * 200_000 + "]", "parts with dots between"),
        ('"a"' + '."\\"b"' * 100 + " = 1", "parts with dots between"),
        ("a" * 2_000_000, "characters"),
    ],
    ids=["dotted", "hex", "exponent", "header", "quoted", "long"],
)
def test_a_task_file_that_would_exhaust_a_parser_is_one_sentence(text: str, said: str, tmp_path: Path):
    """Review 2, network finding L7: `task check` ended with RecursionError and ValueError."""
    file = tmp_path / "task.toml"
    file.write_text(text)
    assert said in refused("task", "check", str(file))


def test_a_published_task_of_endless_depth_is_refused_in_a_sentence():
    """A sibling of finding L7: a device reads such bytes from its server."""
    for data in (b'{"a":' * 900 + b"1" + b"}" * 900, b"[" * 900 + b"]" * 900, b"[" * 100_000):
        with pytest.raises(TaskError):
            from_canonical(data)
