"""The catalogues: every sentence in every language, and none outside of them."""

from __future__ import annotations

import re
from html import unescape
from importlib.resources import files
from pathlib import Path

import pytest

import crowdml.server.portal as portal
from crowdml.protocols import find
from crowdml.server.portal.words import LANGUAGES, choose, words
from crowdml.task import load

HOME = Path(portal.__file__).parent
PLACES = re.compile(r"\{(\w+)\}")
OURS = sorted(path for path in (HOME / "templates").glob("*.html") if not path.name.startswith("operator"))
SOURCES = [*OURS, *HOME.glob("*.py"), *(HOME / "words").glob("*.py")]
BARE = {"SVG", "PNG"}
"""Names that are the same in every language."""


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_catalogue_has_the_same_sentences_with_the_same_places(language: str):
    first, other = words(LANGUAGES[0]).sentences, words(language).sentences
    assert set(first) == set(other)
    for name, sentence in first.items():
        assert sorted(PLACES.findall(sentence)) == sorted(PLACES.findall(other[name])), name


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_sentence_is_empty_and_none_holds_markup(language: str):
    for name, sentence in words(language).sentences.items():
        assert sentence.strip(), name
        assert not re.search(r"[<>&]", sentence), name


@pytest.mark.parametrize("template", OURS, ids=lambda path: path.name)
def test_no_page_for_participants_has_a_sentence_of_its_own(template: Path):
    text = template.read_text(encoding="utf-8")
    text = re.sub(r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}", " ", text, flags=re.DOTALL)
    for attribute in re.findall(r'\b(?:alt|title|aria-label|placeholder|value)="([^"]*)"', text):
        assert not re.search(r"[A-Za-z]", attribute), f"{template.name}: {attribute!r} belongs in the catalogue"
    text = re.sub(r"<(?:!--.*?--|[^>]*)>", " ", text, flags=re.DOTALL)
    found = set(re.findall(r"[A-Za-zÄÖÜäöüß]{2,}", text)) - BARE
    assert not found, f"{template.name} says {sorted(found)}: put it into the catalogue"


def test_every_sentence_is_said_somewhere():
    said = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    known = {"language", "month"}
    for name in words("en").sentences:
        parent = name.rpartition(".")[0]
        direct = f'"{name}"' in said or (name.endswith((".one", ".other")) and f'"{parent}"' in said)
        parts = name.split(".")
        prefixes = [".".join(parts[:place]) + "." for place in range(1, len(parts))]
        joined = any(f'"{prefix}" ~' in said or f'f"{prefix}{{' in said or f'"{prefix}"' in said for prefix in prefixes)
        assert direct or joined or name in known or name.startswith("number."), f"nobody says {name}"


@pytest.mark.parametrize(
    "task", ["activity", "digits", "mnist", "digits-masked", "digits-mlp", "admm-adult", "gram-mnist", "traffic"]
)
def test_the_promises_of_the_catalogue_are_those_of_the_mechanisms(task: str):
    loaded = load(str(files("crowdml") / "tasks" / f"{task}.toml"))
    for row, mechanism in find(loaded).mechanisms(loaded).items():
        kind = loaded.protocol["kind"] + ("-masked" if loaded.masking else "")
        assert unescape(words("en")(f"promise.{kind}.{row}")) == mechanism.promise


@pytest.mark.parametrize(
    ("asked", "kept", "accepted", "answer"),
    [
        (None, None, "", "en"),
        (None, None, "de-DE,de;q=0.9,en;q=0.8", "de"),
        (None, None, "en;q=0.5, de;q=0.9", "de"),
        (None, None, "fr, *;q=0.1", "en"),
        (None, None, "de;q=0", "en"),
        (None, None, "de;q=much", "en"),
        (None, "de", "en", "de"),
        ("en", "de", "de", "en"),
        ("xx", "yy", "de", "de"),
    ],
)
def test_the_language_is_what_the_address_says_then_the_cookie_then_the_browser(asked, kept, accepted, answer):
    assert choose(asked, kept, accepted) == answer


@pytest.mark.parametrize(
    ("value", "english", "german"),
    [
        (1234567, "1,234,567", "1.234.567"),
        (0.9, "0.9", "0,9"),
        (3007.123, "3,007", "3.007"),
        (47.812, "47.8", "47,8"),
        (1e-6, "10⁻⁶", "10⁻⁶"),
        (4.8828125e-4, "4.88 × 10⁻⁴", "4,88 × 10⁻⁴"),
        (0.0, "0", "0"),
        (float("inf"), "∞", "∞"),
    ],
)
def test_numbers_are_written_as_the_language_writes_them(value, english, german):
    assert (words("en").number(value), words("de").number(value)) == (english, german)


def test_values_are_escaped_and_sentences_may_hold_them():
    shown = words("en")("study.senses.labels", classes="<script>")
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown


def test_a_moment_is_written_in_words_and_for_machines():
    shown = words("de").moment("2026-03-05T14:03:00+00:00")
    assert shown == '<time datetime="2026-03-05T14:03:00+00:00">5. März 2026, 14:03 UTC</time>'


@pytest.mark.parametrize("name", ["home.price", "study.price.all", "join.price_text", "study.learns.stop_steps"])
def test_one_check_in_is_not_said_as_many(name: str):
    values = {"sample": "1", "device": "2", "delta": "3"}
    for language, many in (("en", "check-ins"), ("de", "Beiträge")):
        assert many not in words(language)(name, n=1, **values)
        assert many in words(language)(name, n=2, **values)
