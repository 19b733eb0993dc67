"""Rounds with dropouts, duplicates and late messages: the sum is exact in the ring, or there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from masked_crowd import KIND, Crowd, refused, terms

from crowdml.errors import ProtocolError
from crowdml.secagg import device, ring, server, shamir
from crowdml.secagg.device import DeviceRound
from crowdml.secagg.messages import (
    Advert,
    Held,
    Masked,
    Reveal,
    Shares,
    decode,
    encode,
    members,
    open_message,
    seed_commitment,
)
from crowdml.secagg.sealed import SEALED_SIZE
from crowdml.secagg.terms import RingField


def test_a_round_without_dropouts_ends_in_the_exact_sum():
    crowd = Crowd(terms(), 8)
    crowd.go_to("summed")
    assert crowd.agrees_with(crowd.ids)


def test_the_sum_leaves_out_the_missing_and_is_exact():
    crowd = Crowd(terms(), 8)
    crowd.go_to("summed", missing=crowd.ids[2:4])
    assert crowd.agrees_with(set(crowd.ids) - set(crowd.ids[2:4]))


def test_a_sparse_round_with_dropouts_is_exact():
    small = terms(48, survivors=44, colluders=1, complete=0)
    crowd = Crowd(small, 48)
    assert small.plan(48).neighbours < 47
    crowd.go_to("summed", missing=crowd.ids[5:8])
    assert crowd.agrees_with(set(crowd.ids) - set(crowd.ids[5:8]))


PHASES = list(KIND)


@st.composite
def stories(draw: st.DrawFn):
    """A cohort, and for each phase who vanishes, in which order the rest arrives, and who says it twice."""
    count = draw(st.integers(5, 9))
    colluders = draw(st.integers(0, 1))
    survivors = draw(st.integers((count + colluders) // 2 + 2, count))
    vanish = draw(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, count - 1)), max_size=4))
    twice = draw(st.frozensets(st.integers(0, count - 1), max_size=4))
    return terms(count, survivors=survivors, colluders=colluders), count, vanish, twice, draw(st.integers(0, 2**32))


def play(crowd: Crowd, vanish: list[tuple[str, int]], twice: frozenset[int], seed: int) -> None:
    """Play the story to its end: then the sum is exact and over enough devices, or there is none at all."""
    rng = np.random.default_rng(seed)
    gone: set[str] = set()
    delivered: list[str] = []
    while crowd.server.phase in KIND:
        phase = crowd.server.phase
        if phase == "advertise":
            crowd.advertise()
        else:
            crowd.tell([one for one in crowd.ids if one not in gone])
        gone |= {crowd.ids[index] for at, index in vanish if at == phase}
        here = [one for one in crowd.ids if one not in gone]
        for one in [*rng.permutation(here).tolist(), *(crowd.ids[index] for index in twice)]:
            if one in here:
                crowd.deliver([one])
        if phase == "mask":
            delivered = here
        crowd.close()
    if crowd.server.phase == "summed":
        assert crowd.agrees_with(delivered)
        assert len(delivered) >= crowd.terms.survivors
        return
    assert crowd.server.phase == "abandoned"
    assert crowd.server.why
    assert not crowd.server.body
    assert not crowd.server.reveals
    with pytest.raises(ProtocolError):
        server.sums(crowd.terms, crowd.server)
    if len(delivered) < crowd.terms.survivors:
        assert all(state.phase not in ("agreed", "revealed") for state in crowd.devices.values())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(stories())
def test_with_any_dropouts_duplicates_and_order_the_sum_is_exact_or_nothing_is_revealed(story):
    task_terms, count, vanish, twice, seed = story
    play(Crowd(task_terms, count, seed=seed), vanish, twice, seed)


@pytest.mark.parametrize("seed", range(4))
def test_on_a_sparse_graph_the_sum_is_exact_or_nothing_is_revealed(seed: int):
    rng = np.random.default_rng(seed)
    sparse = terms(30, survivors=26, colluders=0, correctness=4, complete=0)
    assert not sparse.plan(30).complete
    gone = rng.choice(30, 2 + seed, replace=False).tolist()
    phases = rng.choice(PHASES[1:], len(gone)).tolist()
    play(Crowd(sparse, 30, seed=seed), list(zip(phases, gone, strict=True)), frozenset({3, 5, 8}), seed)


def test_a_device_that_is_killed_after_any_step_says_the_same_bytes_again():
    crowd = Crowd(terms(), 8)
    one = crowd.ids[0]
    crowd.advertise()
    again = device.advertise(crowd.terms, 1, crowd.keys[one], after=0, entropy=lambda _: crowd.devices[one].root)
    assert again == crowd.devices[one]
    for _ in range(4):
        crowd.deliver()
        crowd.close()
        before = crowd.devices[one].encode()
        crowd.tell()
        message = server.tell(crowd.terms, crowd.server, one)
        assert message is not None
        assert crowd.step(one, DeviceRound.decode(before), message) == crowd.devices[one]
        assert DeviceRound.decode(crowd.devices[one].encode()) == crowd.devices[one]


def test_a_device_that_has_revealed_keeps_no_secret():
    crowd = Crowd(terms(), 8)
    crowd.go_to("summed")
    state = crowd.devices[crowd.ids[0]]
    assert (state.root, state.shares) == (b"", b"")
    assert "masks once" in refused(lambda: device.mask(crowd.terms, state, crowd.vectors[crowd.ids[0]]))


def test_the_server_keeps_the_sum_and_hashes_and_nothing_else():
    crowd = Crowd(terms(), 8)
    crowd.go_to("agree")
    assert {len(kept) for kept in crowd.server.masked.values()} == {32}
    assert len(crowd.server.body) == crowd.terms.size
    crowd.go_to("summed")
    state = crowd.server
    assert not state.adverts
    assert not state.shares
    assert not state.agreements
    assert not state.reveals


def test_a_late_masked_vector_is_refused_and_changes_nothing():
    crowd = Crowd(terms(), 8)
    crowd.go_to("mask")
    crowd.tell()
    crowd.deliver(crowd.ids[1:])
    crowd.close()
    late = open_message("secagg/masked/1", crowd.devices[crowd.ids[0]].sent)
    before = crowd.server
    assert "belongs to 'mask'" in refused(lambda: server.hear(crowd.terms, crowd.server, crowd.ids[0], late))
    assert crowd.server == before


def test_a_second_different_message_of_a_device_is_refused():
    crowd = Crowd(terms(), 8)
    crowd.go_to("mask")
    crowd.tell()
    crowd.deliver()
    first = decode(Masked, crowd.devices[crowd.ids[0]].sent)
    other = replace(first, body=bytes(len(first.body)))
    assert "something else" in refused(lambda: server.hear(crowd.terms, crowd.server, crowd.ids[0], other))
    assert server.hear(crowd.terms, crowd.server, crowd.ids[0], first) == crowd.server


def test_bodies_of_another_length_or_cohort_are_refused():
    crowd = Crowd(terms(), 8)
    crowd.go_to("mask")
    crowd.tell()
    good = decode(Masked, crowd.devices[crowd.ids[0]].sent)
    for bad in (replace(good, body=good.body[:-4]), replace(good, view=bytes(32)), replace(good, round=2)):
        refused(lambda bad=bad: server.hear(crowd.terms, crowd.server, crowd.ids[0], bad))
    assert "neighbours get a share" in refused(
        lambda: server.hear(crowd.terms, replace(crowd.server, phase="share", shares={}), crowd.ids[0], Shares(1, b"x"))
    )
    assert "not in the cohort" in refused(lambda: server.hear(crowd.terms, crowd.server, "0" * 32, good))


def test_a_cohort_that_never_fills_is_abandoned():
    crowd = Crowd(terms(), 5)
    crowd.advertise()
    crowd.deliver()
    crowd.close()
    assert crowd.server.phase == "abandoned"
    assert "5 devices came; 8 are needed" in crowd.server.why


def test_a_full_cohort_sends_others_to_the_next_round():
    crowd = Crowd(terms(), 9)
    crowd.advertise()
    crowd.deliver(crowd.ids[:8])
    assert server.is_complete(crowd.terms, crowd.server)
    assert "full" in refused(lambda: crowd.deliver(crowd.ids[8:]))


def test_one_device_that_sends_random_elements_makes_the_round_abandoned():
    crowd = Crowd(terms(fields=(RingField("gradient", 100, 32, 1000, 10),)), 8)
    crowd.go_to("mask")
    crowd.tell()
    liar = crowd.ids[3]
    noise = np.random.default_rng(0).integers(0, 2**32, 100).astype("<u4")
    sent = decode(Masked, crowd.devices[liar].sent)
    crowd.devices[liar] = replace(crowd.devices[liar], sent=encode(replace(sent, body=noise.tobytes())))
    crowd.deliver()
    crowd.close()
    crowd.go_to("abandoned")
    assert "somebody sent what the task does not allow" in crowd.server.why
    assert not crowd.server.body


# --- wrong shares ---


def spoil_reveal(crowd: Crowd, one: str) -> None:
    sent = decode(Reveal, crowd.devices[one].sent)
    spoilt = bytes(byte ^ 1 for byte in sent.shares)
    crowd.devices[one] = replace(crowd.devices[one], sent=encode(replace(sent, shares=spoilt)))


def test_a_holder_that_reveals_wrong_shares_is_found_out_and_the_sum_is_exact():
    crowd = Crowd(terms(), 8)
    crowd.go_to("reveal", missing=crowd.ids[:1])
    crowd.tell(crowd.ids[1:])
    spoil_reveal(crowd, crowd.ids[1])
    crowd.deliver(crowd.ids[1:])
    crowd.close()
    assert crowd.server.phase == "summed"
    assert crowd.agrees_with(crowd.ids[1:])
    assert f"device {crowd.ids[1]} revealed wrong shares of" in crowd.server.blamed
    assert not any(one in crowd.server.blamed for one in crowd.ids[2:])


@pytest.mark.parametrize(
    ("where", "devices", "survivors", "colluders"),
    [("first", 30, 24, 3), ("last", 30, 24, 3), ("first", 60, 46, 4), ("anywhere", 100, 80, 10)],
)
def test_as_many_liars_as_colluders_do_not_stop_the_sum(where: str, devices: int, survivors: int, colluders: int):
    crowd = Crowd(terms(devices, survivors=survivors, colluders=colluders), devices)
    liars = {"first": crowd.ids[:colluders], "last": crowd.ids[-colluders:], "anywhere": crowd.ids[3::9][:colluders]}
    missing = crowd.ids[20 : 20 + (devices - survivors) // 2]
    crowd.go_to("reveal", missing=missing)
    there = [one for one in crowd.ids if one not in missing]
    crowd.tell(there)
    for one in set(liars[where]) & set(there):
        spoil_reveal(crowd, one)
    crowd.deliver(there)
    crowd.close()
    assert crowd.server.phase == "summed", crowd.server.why
    assert crowd.agrees_with(there)
    assert all(one in liars[where] for one in crowd.ids if one in crowd.server.blamed)


def test_liars_that_lie_of_different_owners_do_not_stop_the_sum():
    crowd = Crowd(terms(60, survivors=46, colluders=6), 60)
    crowd.go_to("reveal")
    crowd.tell()
    for place, one in enumerate(crowd.ids[:6]):
        sent = decode(Reveal, crowd.devices[one].sent)
        shares = bytearray(sent.shares)
        for at in range(place * 36, len(shares), 3 * 36):
            shares[at] ^= 1
        crowd.devices[one] = replace(crowd.devices[one], sent=encode(replace(sent, shares=bytes(shares))))
    crowd.deliver()
    crowd.close()
    assert crowd.server.phase == "summed"
    assert crowd.agrees_with(crowd.ids)


def test_an_owner_that_deals_wrong_shares_takes_no_honest_holder_from_the_others(monkeypatch):
    """Those who hold its wrong shares look like liars, more of them than the sum could do without."""
    crowd = Crowd(terms(30, survivors=24, colluders=3), 30)
    crowd.go_to("share")
    dealer, honest = crowd.ids[29], shamir.split

    def deal(*args: Any) -> Any:
        shares = honest(*args)
        shares[17:] ^= 1  # the threshold is 17: its own secret comes back
        return shares

    for one in crowd.ids:
        with monkeypatch.context() as patch:
            if one == dealer:
                patch.setattr(shamir, "split", deal)
            crowd.tell([one])
    crowd.deliver()
    crowd.close()
    crowd.tell()
    crowd.deliver()
    crowd.close()
    crowd.tell()
    crowd.deliver()
    crowd.close()
    crowd.tell()
    liar = crowd.ids[0]
    sent = decode(Reveal, crowd.devices[liar].sent)
    lies = bytes(byte ^ 1 for byte in sent.shares[:-36]) + sent.shares[-36:]  # the truth of the dealer alone
    crowd.devices[liar] = replace(crowd.devices[liar], sent=encode(replace(sent, shares=lies)))
    crowd.deliver()
    crowd.close()
    assert crowd.server.phase == "summed", crowd.server.why
    assert crowd.agrees_with(crowd.ids)
    assert liar in crowd.server.blamed
    assert not any(one in crowd.server.blamed for one in crowd.ids[1:])  # one dealer does not make liars of them


def test_a_holder_that_says_it_could_open_nothing_makes_nobody_else_suspect():
    crowd = Crowd(terms(colluders=0), 8)
    crowd.go_to("reveal")
    crowd.tell()
    liar = crowd.ids[3]
    sent = decode(Reveal, crowd.devices[liar].sent)
    empty = encode(replace(sent, held=bytes(len(sent.held)), shares=b""))
    crowd.devices[liar] = replace(crowd.devices[liar], sent=empty)
    crowd.deliver()
    crowd.close()
    assert crowd.server.phase == "summed"
    assert crowd.server.blamed == ""


def test_too_many_wrong_shares_abandon_the_round():
    crowd = Crowd(terms(), 8)
    crowd.go_to("reveal")
    crowd.tell()
    for one in crowd.ids[:4]:
        spoil_reveal(crowd, one)
    crowd.deliver()
    crowd.close()
    assert crowd.server.phase == "abandoned"
    assert "did not come back" in crowd.server.why
    assert "gave no secret" in crowd.server.blamed


def test_shares_that_were_dealt_wrong_are_left_out_by_their_holders():
    crowd = Crowd(terms(), 8)
    crowd.go_to("share")
    crowd.tell()
    dealer = crowd.ids[2]
    sent = decode(Shares, crowd.devices[dealer].sent)
    wrong = bytes(SEALED_SIZE) + sent.sealed[SEALED_SIZE:]  # the first neighbour's letter
    crowd.devices[dealer] = replace(crowd.devices[dealer], sent=encode(replace(sent, sealed=wrong)))
    crowd.deliver()
    crowd.close()
    crowd.go_to("summed", missing=[dealer])
    assert crowd.agrees_with(set(crowd.ids) - {dealer})


def test_a_dealer_of_garbage_that_goes_missing_costs_the_round_and_reveals_nothing():
    crowd = Crowd(terms(), 8)
    crowd.go_to("share")
    crowd.tell()
    dealer = crowd.ids[2]
    sent = decode(Shares, crowd.devices[dealer].sent)
    crowd.devices[dealer] = replace(crowd.devices[dealer], sent=encode(replace(sent, sealed=bytes(len(sent.sealed)))))
    crowd.deliver()
    crowd.close()
    crowd.go_to("abandoned", missing=[dealer])
    assert not crowd.server.body
    assert crowd.server.blamed == f"device {dealer} dealt shares that 7 neighbours could not open"


def test_a_seed_that_is_not_the_one_signed_for_is_not_used():
    """The dealer's shares fit together, and give another seed than its advert committed to."""
    crowd = Crowd(terms(), 8)
    crowd.advertise()
    dealer = crowd.ids[2]
    honest = decode(Advert, crowd.devices[dealer].sent)
    other = Advert.make(crowd.terms.task, 1, crowd.keys[dealer], honest.pair, honest.seal, seed_commitment(bytes(32)))
    crowd.devices[dealer] = replace(crowd.devices[dealer], sent=encode(other))
    crowd.deliver()
    crowd.close()
    crowd.go_to("abandoned")
    assert "secrets of 1 devices did not come back" in crowd.server.why
    assert f"the shares of device {dealer} gave no secret" in crowd.server.blamed


def test_no_holder_reveals_both_kinds_of_share_of_one_device():
    crowd = Crowd(terms(), 8)
    crowd.go_to("reveal", missing=crowd.ids[:2])
    before = dict(crowd.devices)
    crowd.tell(crowd.ids[2:])
    survivors = members(crowd.server.survivors, 8)
    for holder in crowd.ids[2:]:
        shown = shamir.from_bytes(decode(Reveal, crowd.devices[holder].sent).shares)
        kept = shamir.from_bytes(before[holder].shares).reshape(7, 2, 9)
        others = [at for at in range(8) if crowd.ids[at] != holder]
        for share, both, owner in zip(shown, kept, others, strict=True):
            assert (share == both[1 if survivors[owner] else 0]).all()
            assert not (share == both[0 if survivors[owner] else 1]).all()


def test_a_revealed_seed_is_the_one_that_was_committed_to():
    crowd = Crowd(terms(), 8)
    crowd.advertise()
    state = crowd.devices[crowd.ids[0]]
    advert = open_message("secagg/advert/1", state.sent)
    assert advert.commitment == seed_commitment(device._secrets(state.root, crowd.terms.task, 1)[2])
    assert advert.commitment != seed_commitment(bytes(32))


def test_the_server_waits_for_those_who_have_not_answered():
    crowd = Crowd(terms(), 8)
    crowd.go_to("mask")
    crowd.tell()
    crowd.deliver(crowd.ids[:6])
    assert server.expected(crowd.terms, crowd.server) == set(crowd.ids[6:])
    assert not server.is_complete(crowd.terms, crowd.server)
    assert isinstance(server.tell(crowd.terms, crowd.server, crowd.ids[7]), Held)
    assert server.tell(crowd.terms, crowd.server, "0" * 32) is None


def test_the_sum_of_signed_contributions_survives_the_ring():
    values = np.array([-3, 2**31 - 1, -(2**31), 0])
    assert (ring.decode(ring.encode(values, 32), 32) == values).all()
