"""Keys, statements and signed envelopes: one encoding, bounded, and nothing but a Problem for anything else."""

import dataclasses
import os
import pickle
import stat
from fractions import Fraction

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crowdml.errors import DataError, GuaranteeError
from crowdml.messages import Envelope
from crowdml.price import Price
from crowdml.privacy.losses import ZCDP, Pure, Renyi, Total, Unbounded, parse_loss
from crowdml.protocols import find, settled
from crowdml.task import find_task, shipped
from crowdml.wire.envelopes import LARGEST_ENVELOPE, Signed, open_signed, pack_envelope, sign
from crowdml.wire.keys import Key, device_id, verify
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem
from crowdml.wire.statements import LARGEST_STATEMENT, Statement, is_exact, losses_of, total_of

KEY, OTHER = Key.from_secret(bytes(range(32))), Key.from_secret(bytes(32))
STATEMENT = Statement(("pure 3/10", "zcdp 7/2000"), 60, ("pure 1/10",))
ENVELOPE = Envelope(b"\x07" * 32, KEY.id, frozenset({"server"}), 3, "sgd/gradient/1", b"a body")
DATA = sign(ENVELOPE, STATEMENT, KEY)
PLAIN = msgpack.unpackb(DATA[64:])


def signed(plain: object) -> bytes:
    """Bytes that our own key signed, whatever they are."""
    packed = msgpack.packb(plain) if not isinstance(plain, bytes) else plain
    assert packed is not None
    return KEY.sign(b"crowdml/envelope/1" + packed) + packed


def refused(data: bytes) -> Problem:
    with pytest.raises(Problem) as caught:
        open_signed(data)
    assert 400 <= caught.value.status < 500
    return caught.value


def opened_or_refused(data: bytes) -> Signed | None:
    try:
        return open_signed(data)
    except Problem:
        refused(data)
        return None


# --- keys ---


def test_a_key_comes_back_from_its_file_which_its_owner_alone_may_read(tmp_path):
    key = Key.generate()
    key.save(tmp_path / "key")
    assert Key.load(tmp_path / "key").public == key.public
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_key_is_never_overwritten(tmp_path):
    Key.generate().save(tmp_path / "key")
    before = (tmp_path / "key").read_bytes()
    with pytest.raises(DataError, match="never overwritten"):
        Key.generate().save(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == before


def test_a_missing_or_broken_key_file_is_told_from_a_key(tmp_path):
    with pytest.raises(DataError, match="There is no key"):
        Key.load(tmp_path / "key")
    (tmp_path / "key").write_text("not a key")
    with pytest.raises(DataError, match="cannot be read"):
        Key.load(tmp_path / "key")


def test_a_key_shows_its_id_and_nothing_else():
    assert repr(KEY) == f"Key({KEY.id})"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(KEY)


def test_a_device_is_known_by_the_hash_of_its_public_key():
    assert KEY.id == device_id(KEY.public)
    assert len(KEY.id) == 32
    assert KEY.id != OTHER.id


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_no_bytes_make_verification_raise(public, signature, data):
    assert verify(public, signature, data) in (True, False)


def test_a_signature_holds_for_its_key_and_its_data_alone():
    signature = KEY.sign(b"data")
    assert verify(KEY.public, signature, b"data")
    assert not verify(OTHER.public, signature, b"data")
    assert not verify(KEY.public, signature, b"date")


# --- statements ---

fractions = st.fractions(min_value=0, max_value=100, max_denominator=10**6)
losses = st.one_of(
    fractions.map(Pure),
    fractions.map(ZCDP),
    st.lists(fractions, min_size=1, max_size=4).map(lambda v: Renyi(tuple(range(2, 2 + len(v))), tuple(sorted(v)))),
    st.just(Unbounded()),
)


@given(st.lists(losses, max_size=6), st.sampled_from([0.0, 1e-9, 1e-6]))
def test_a_total_read_back_from_a_statement_is_never_cheaper(many, delta):
    total = Total.of(many)
    again = total_of(losses_of(total))
    assert again.epsilon(delta) >= total.epsilon(delta)
    assert (again.pure, again.zcdp, again.unbounded) == (total.pure, total.zcdp, total.unbounded)
    assert again.squares >= total.squares


loss_texts = st.from_regex(
    r"(pure|zcdp) [0-9]{1,3}(/[0-9]{1,3})?|renyi [0-9]{1,2}:[0-9]{1,2}(/[0-9])?(,[0-9]{1,2}:[0-9]{1,2}(/[0-9])?){0,2}",
    fullmatch=True,
)


@given(loss_texts | st.text(max_size=12))
@settings(max_examples=300)
def test_the_cheap_look_at_a_loss_agrees_with_the_exact_one(text):
    try:
        exact = str(parse_loss(text)) == text
    except GuaranteeError:
        exact = False
    assert is_exact(text) == exact


@given(st.lists(losses, max_size=6), st.lists(losses, max_size=6), st.integers(0, 2**63 - 1))
def test_every_statement_travels_unchanged(device, dearest, samples):
    statement = Statement.of(Total.of(device), samples, Total.of(dearest))
    assert open_signed(sign(ENVELOPE, statement, KEY)).statement == statement


@pytest.mark.parametrize(
    "texts",
    [
        ["pure 2/4"], ["pure 0.1"], ["pure -1"], ["zcdp 1", "pure 1"], ["pure 1", "pure 2"], ["free"], [""], [1], [0.5],
        ["pure " + "9" * 4100], ["pure " + "9" * 600 + "/1" + "0" * 600],
        ["pure 1/0"], ["unbounded", "unbounded"], "pure 1", None, ["pure 1"] * 5, ["renyi 1:1"],
        ["pure " + "9" * 4000 + "/" + "7" * 4000], [["pure 1"]], ["pure ١"],
    ],
)  # fmt: skip
def test_a_loss_that_is_not_written_as_ours_is_refused(texts):
    assert refused(signed({**PLAIN, "statement": {**PLAIN["statement"], "device": texts}})).slug == "malformed"


# --- envelopes ---


def test_what_was_signed_is_what_is_opened():
    opened = open_signed(DATA)
    assert opened == Signed(ENVELOPE, STATEMENT, DATA)
    assert opened.verify(KEY.public)
    assert len(opened.hash) == 32


def test_the_bytes_are_msgpack_with_sorted_keys():
    assert list(PLAIN) == sorted(PLAIN) == ["body", "kind", "sender", "seq", "statement", "task", "to"]
    assert list(PLAIN["statement"]) == ["dearest", "device", "samples"]
    assert pack(PLAIN) == DATA[64:] == pack_envelope(ENVELOPE, STATEMENT)


def test_an_envelope_verifies_with_its_senders_key_alone():
    opened = open_signed(DATA)
    assert not opened.verify(OTHER.public)
    assert not opened.verify(b"")
    claimed = dataclasses.replace(ENVELOPE, sender=OTHER.id)
    packed = pack_envelope(claimed, STATEMENT)
    forged = open_signed(KEY.sign(b"crowdml/envelope/1" + packed) + packed)
    assert not forged.verify(OTHER.public)
    assert not forged.verify(KEY.public)


def test_a_signature_made_for_something_else_is_no_signature_of_an_envelope():
    for prefix in (b"", b"crowdml/receipts/1", b"crowdml/enrol/1"):
        assert not open_signed(KEY.sign(prefix + DATA[64:]) + DATA[64:]).verify(KEY.public)


def test_a_device_signs_only_as_itself():
    with pytest.raises(ValueError, match="the key is that of"):
        sign(ENVELOPE, STATEMENT, OTHER)


def test_a_device_does_not_sign_what_nobody_would_read():
    with pytest.raises(Problem, match="names nobody"):
        sign(dataclasses.replace(ENVELOPE, to=frozenset()), STATEMENT, KEY)


@given(
    st.builds(
        Envelope,
        st.binary(min_size=32, max_size=32),
        st.just(KEY.id),
        st.frozensets(st.sampled_from(["server", KEY.id, OTHER.id]), min_size=1),
        st.integers(1, 2**63 - 1),
        st.sampled_from(["sgd/gradient/1", "local_updates/weights/12"]),
        st.binary(max_size=70_000),
    )
)
@settings(max_examples=50)
def test_every_envelope_is_opened_as_it_was_signed(envelope):
    data = sign(envelope, STATEMENT, KEY)
    opened = open_signed(data)
    assert opened.envelope == envelope
    assert opened.verify(KEY.public)
    assert pack_envelope(opened.envelope, opened.statement) == data[64:]


@given(st.binary(max_size=400))
@example(b"")
@example(b"\x00" * 64)
def test_no_bytes_are_opened_but_those_of_an_envelope(data):
    refused(data)


@given(st.binary(max_size=300))
def test_no_bytes_behind_a_good_signature_are_opened_but_those_of_an_envelope(packed):
    refused(signed(packed))


@given(st.integers(0, len(DATA) - 1))
def test_a_truncated_envelope_is_refused(length):
    refused(DATA[:length])


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
@settings(max_examples=300)
def test_a_mutated_envelope_is_refused_or_does_not_verify(at, change):
    mutated = bytearray(DATA)
    mutated[at] ^= change
    opened = opened_or_refused(bytes(mutated))
    if opened is not None:
        assert not opened.verify(KEY.public)
        assert pack_envelope(opened.envelope, opened.statement) == bytes(mutated)[64:]


@given(st.binary(min_size=1, max_size=20), st.integers(0, len(DATA)))
def test_an_envelope_with_bytes_put_in_is_refused_or_does_not_verify(more, at):
    opened = opened_or_refused(DATA[:at] + more + DATA[at:])
    assert opened is None or not opened.verify(KEY.public)


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(st.sampled_from(sorted(PLAIN)), plain_values)
@settings(max_examples=300)
def test_any_other_value_in_any_field_is_opened_as_it_is_or_refused(name, value):
    """Signed by the right key, so that only the structure can refuse it."""
    data = signed({**PLAIN, name: value})
    opened = opened_or_refused(data)
    if opened is not None:
        assert pack_envelope(opened.envelope, opened.statement) == data[64:]
        assert type(opened.envelope.seq) is int


CASES = {
    "keys in another order": dict(reversed(PLAIN.items())),
    "a key too many": {**PLAIN, "zzz": 1},
    "a key too few": {key: value for key, value in PLAIN.items() if key != "to"},
    "a seq that is a float": {**PLAIN, "seq": 3.0},
    "a seq that is a truth": {**PLAIN, "seq": True},
    "a seq of 0": {**PLAIN, "seq": 0},
    "a seq below 0": {**PLAIN, "seq": -1},
    "a seq beyond 63 bits": {**PLAIN, "seq": 2**63},
    "a seq that is a text": {**PLAIN, "seq": "3"},
    "a task of 31 bytes": {**PLAIN, "task": b"\x07" * 31},
    "a task in hex": {**PLAIN, "task": "07" * 32},
    "a body that is a text": {**PLAIN, "body": "a body"},
    "a body that is a map": {**PLAIN, "body": {}},
    "a sender in capitals": {**PLAIN, "sender": KEY.id.upper()},
    "the server as sender": {**PLAIN, "sender": "server"},
    "a kind without a version": {**PLAIN, "kind": "sgd/gradient"},
    "a kind with a line break": {**PLAIN, "kind": "sgd/gradient/1\n"},
    "a kind that is too long": {**PLAIN, "kind": "a" * 70 + "/1"},
    "recipients that are not sorted": {**PLAIN, "to": ["server", KEY.id]},
    "a recipient twice": {**PLAIN, "to": ["server", "server"]},
    "a recipient that is no address": {**PLAIN, "to": ["everyone"]},
    "no recipient": {**PLAIN, "to": []},
    "a recipient that is not in a list": {**PLAIN, "to": "server"},
    "no statement": {**PLAIN, "statement": {}},
    "samples below 0": {**PLAIN, "statement": {**PLAIN["statement"], "samples": -1}},
    "samples that are a float": {**PLAIN, "statement": {**PLAIN["statement"], "samples": 1.5}},
    "a list": [1, 2, 3],
    "an integer": 5,
    "an extension": msgpack.ExtType(5, b"x"),
    "a body in an extension": {**PLAIN, "body": msgpack.ExtType(5, b"x")},
}


@pytest.mark.parametrize("case", CASES)
def test_an_envelope_has_one_form(case):
    assert refused(signed(CASES[case])).slug == "malformed"


def test_a_value_in_a_longer_form_than_needed_is_refused():
    packed = DATA[64:]
    longer = {
        b"\xa3seq\x03": [b"\xa3seq" + form + b"\x03" for form in (b"\xcc", b"\xcd\x00", b"\xcf" + bytes(7), b"\xd0")],
        b"\xa4body\xc4\x06": [b"\xa4body\xc5\x00\x06", b"\xa4body\xc6\x00\x00\x00\x06", b"\xd9\x04body\xc4\x06"],
        b"\xa2to\x91": [b"\xa2to\xdc\x00\x01", b"\xa2to\xdd\x00\x00\x00\x01"],
        b"\xa6server": [b"\xd9\x06server", b"\xda\x00\x06server"],
    }  # fmt: skip
    for short, others in longer.items():
        assert packed.count(short) == 1
        for other in others:
            refused(signed(packed.replace(short, other)))


def test_a_duplicate_key_is_refused():
    packed = DATA[64:]
    twice = b"\x88" + packed[1:].replace(b"\xa3seq\x03", b"\xa3seq\x03\xa3seq\x04")
    assert "expected a map of 7 keys" in refused(signed(twice)).detail
    assert refused(signed(b"\x87" + twice[1:])).slug == "malformed"


def test_bytes_after_the_end_are_refused():
    assert "follow after its end" in refused(signed(DATA[64:] + b"\xc0")).detail


def test_what_is_too_large_is_refused_before_it_is_read():
    problem = refused(bytes(LARGEST_ENVELOPE + 1))
    assert (problem.slug, problem.status, problem.extra) == ("too-large", 413, {"limit": LARGEST_ENVELOPE})
    with pytest.raises(Problem, match="at most 100 are read"):
        open_signed(DATA, limit=100)


def test_a_length_that_the_bytes_do_not_have_allocates_nothing():
    refused(signed(b"\x87\xa4body\xc6\xff\xff\xff\xff"))
    refused(signed(b"\x87\xa4body\xc4\x00\xa4kind\xdb\xff\xff\xff\xff"))
    refused(signed(DATA[64:].replace(b"\xa2to\x91", b"\xa2to\xdd\xff\xff\xff\xff")))


def test_ten_thousand_nested_lists_are_refused_at_the_first():
    refused(signed(b"\x91" * 10_000))
    refused(signed(DATA[64:].replace(b"\xa2to\x91", b"\xa2to" + b"\x91" * 10_000)))


def test_a_device_that_gave_to_every_shipped_task_a_million_times_has_a_statement_that_is_read():
    """Review 2, network finding L1: a statement was bounded by 32 kB, and an honest one has 5."""
    device, dearest = Total(), Total()
    for name in shipped():
        task = settled(find_task(name))
        priced = Price.of(find(task), task)
        device, dearest = device + priced.device(1_000_000), dearest + priced.sample()
    statement = Statement.of(device, 10**9, dearest)
    assert 2 * len(pack(statement.plain())) < LARGEST_STATEMENT < 16_384
    assert open_signed(sign(ENVELOPE, statement, KEY)).statement == statement


def test_fractions_of_a_statement_are_exact():
    statement = Statement.of(Total.of([Pure(Fraction(1, 3)), Pure(Fraction(1, 6))]), 1, Total())
    assert statement.device == ("pure 1/2",)
    assert statement.device_total.pure == Fraction(1, 2)
    assert statement.dearest_total == Total()
