"""A server that lies gets nothing: each lie of issue and review is played against honest devices (G7, G11; d)."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from masked_crowd import MODEL, TASK, Crowd, coins, refused, terms
from test_masks import chi_square_of, too_far

from crowdml.secagg import device, masks, ring, server
from crowdml.secagg.masks import Binding
from crowdml.secagg.messages import (
    ADVERT_BODY,
    Advert,
    Agreement,
    Agreements,
    Cohort,
    Held,
    Masked,
    Shares,
    Survivors,
    bitmap,
    decode,
    members,
    survivors_bytes,
)
from crowdml.secagg.terms import RingField
from crowdml.wire.keys import Key


def at(phase: str, **more) -> Crowd:
    crowd = Crowd(terms(**more), 8)
    crowd.go_to(phase)
    return crowd


def told(crowd: Crowd, one: str):
    message = server.tell(crowd.terms, crowd.server, one)
    assert message is not None
    return message


def chosen(crowd: Crowd, ids) -> bytes:
    return bitmap([one in set(ids) for one in crowd.ids])


# --- the cohort ---


def test_G11_a_cohort_of_one_is_refused():
    crowd = at("share")
    one = crowd.ids[0]
    whole = told(crowd, one)
    alone = whole.roster[:64]
    assert "this one has 1" in refused(lambda: crowd.answer(one, Cohort(1, alone, b"")))
    assert crowd.devices[one].phase == "advertised"


def test_a_cohort_below_the_minimum_is_refused():
    crowd = at("share")
    whole = told(crowd, crowd.ids[0])
    small = Cohort(1, whole.roster[: 7 * 64], whole.adverts[: 6 * ADVERT_BODY])
    assert "8 to 8 devices; this one has 7" in refused(lambda: crowd.answer(crowd.ids[0], small))


def test_a_cohort_that_repeats_a_device_to_look_larger_is_refused():
    crowd = at("share")
    whole = told(crowd, crowd.ids[0])
    twice = Cohort(1, whole.roster[: 7 * 64] + whole.roster[6 * 64 : 7 * 64], whole.adverts)
    assert "rising order" in refused(lambda: crowd.answer(crowd.ids[0], twice))


def test_a_cohort_without_the_device_itself_is_refused():
    crowd = Crowd(terms(), 9)
    crowd.advertise()
    crowd.deliver(crowd.ids[:8])
    crowd.close()
    message = told(crowd, crowd.ids[0])
    assert "not in the cohort" in refused(lambda: crowd.answer(crowd.ids[8], message))


def test_a_cohort_with_other_keys_for_the_device_itself_is_refused():
    crowd = at("share")
    one = crowd.ids[0]
    other = device.advertise(crowd.terms, 1, crowd.keys[one], after=0, entropy=coins("other"))
    message = told(crowd, one)
    false = crowd.keys[one].public + decode(Advert, other.sent).hash + message.roster[64:]
    assert "not in the cohort" in refused(lambda: crowd.answer(one, replace(message, roster=false)))


def test_G11_a_neighbour_with_keys_that_it_did_not_sign_is_refused():
    crowd = at("share")
    one, victim = crowd.ids[0], crowd.ids[1]
    message = told(crowd, one)
    secret = hashlib.sha256(b"the server's").digest()
    body = masks.public_of(secret) + message.adverts[32:ADVERT_BODY]  # the server's key in the middle
    forged = Advert.from_body(1, crowd.keys[victim].public, body)
    roster = message.roster[:96] + forged.hash + message.roster[128:]
    lie = Cohort(1, roster, body + message.adverts[ADVERT_BODY:])
    assert victim in refused(lambda: crowd.answer(one, lie))


def test_keys_signed_for_another_round_or_task_are_refused():
    crowd = at("share")
    one, victim = crowd.ids[0], crowd.ids[1]
    message = told(crowd, one)
    for task, number in ((crowd.terms.task, 2), (hashlib.sha256(b"another").digest(), 1)):
        there = device.advertise(replace(crowd.terms, task=task), number, crowd.keys[victim], after=0)
        advert = replace(decode(Advert, there.sent), round=1)
        roster = message.roster[:96] + advert.hash + message.roster[128:]
        lie = Cohort(1, roster, advert.body + message.adverts[ADVERT_BODY:])
        assert victim in refused(lambda lie=lie: crowd.answer(one, lie))


def test_a_wrong_neighbour_is_refused():
    crowd = Crowd(terms(48, survivors=44, complete=0), 48)
    crowd.go_to("share")
    one = crowd.ids[0]
    message = told(crowd, one)
    own = set(crowd.roster.neighbours[0].tolist())
    stranger = next(index for index in range(1, 48) if index not in own)
    body = decode(Advert, crowd.server.adverts[crowd.ids[stranger]]).body
    lie = replace(message, adverts=body + message.adverts[ADVERT_BODY:])
    assert "not those that it signed" in refused(lambda: crowd.answer(one, lie))
    assert "keys are not all here" in refused(
        lambda: crowd.answer(one, replace(message, adverts=message.adverts[ADVERT_BODY:]))
    )


def test_a_neighbour_with_a_point_of_low_order_is_refused():
    crowd = at("share")
    one, victim = crowd.ids[0], crowd.ids[1]
    message = told(crowd, one)
    for low in (bytes(32), (1).to_bytes(32, "little")):
        for kind in ("pair", "seal"):
            honest = decode(Advert, crowd.server.adverts[victim])
            points = {"pair": honest.pair, "seal": honest.seal} | {kind: low}
            advert = Advert.make(TASK, 1, crowd.keys[victim], points["pair"], points["seal"], honest.commitment)
            roster = message.roster[:96] + advert.hash + message.roster[128:]
            lie = Cohort(1, roster, advert.body + message.adverts[ADVERT_BODY:])
            assert "low order" in refused(lambda lie=lie: crowd.answer(one, lie))
            empty = replace(crowd.server, phase="advertise", adverts={})
            assert "low order" in refused(
                lambda advert=advert, empty=empty: server.hear(crowd.terms, empty, victim, advert)
            )


def test_a_cohort_after_the_first_is_refused():
    crowd = at("share")
    one = crowd.ids[0]
    message = told(crowd, one)
    crowd.answer(one, message)
    before = crowd.devices[one]
    assert "hears this once" in refused(lambda: crowd.answer(one, message))
    assert crowd.devices[one] == before


def split(first: int):
    """Ten devices; the server shows one half one cohort and the other half another. Both look right to their half."""
    crowd = Crowd(terms(8, 10, survivors=7), 10)
    crowd.advertise()
    crowd.deliver()
    worlds = []
    for left_out in (crowd.ids[-1], crowd.ids[0]):
        state = replace(
            crowd.server, adverts={one: packed for one, packed in crowd.server.adverts.items() if one != left_out}
        )
        worlds.append(server.close(crowd.terms, state))
    return crowd, worlds, (crowd.ids[:first], crowd.ids[first:])


def test_devices_that_were_shown_different_cohorts_cannot_open_one_anothers_shares():
    crowd, worlds, halves = split(5)
    for world, half in zip(worlds, halves, strict=True):
        for one in half:
            crowd.answer(one, told_by(crowd, world, one))
    sealed = {one: open_sent(crowd, one) for one in crowd.ids}
    reader, world = halves[0][0], worlds[0]
    ids = sorted(world.adverts)
    for index, one in enumerate(ids):  # the server mixes the letters of both worlds
        world = replace(world, shares={**world.shares, index: sealed[one].sealed})
    world = server.close(crowd.terms, world, MODEL)
    crowd.devices[reader] = device.hold(crowd.terms, crowd.devices[reader], told_by(crowd, world, reader), MODEL)
    opened = members(crowd.devices[reader].opened, 8)
    same = [one in halves[0] for one in ids if one != reader]
    assert opened.tolist() == same


def told_by(crowd: Crowd, world: server.ServerRound, one: str):
    message = server.tell(crowd.terms, world, one)
    assert message is not None
    return message


def open_sent(crowd: Crowd, one: str):
    return decode(Shares, crowd.devices[one].sent)


def test_masks_of_devices_that_were_shown_different_cohorts_do_not_cancel():
    secret = hashlib.sha256(b"a pair").digest()
    low, high = "a" * 32, "b" * 32
    salts = [Binding(TASK, 1, view).salt for view in (bytes(32), bytes([1]) * 32)]
    total = np.zeros(250_000, "<u4")
    masks.add_stream(total, [(masks.pair_key(secret, salts[0], low, high, "v"), 1)])
    masks.add_stream(total, [(masks.pair_key(secret, salts[1], high, low, "v"), -1)])
    assert chi_square_of(total) < too_far(255)


# --- rounds ---


@pytest.mark.parametrize("after", [1, 2, 7])
def test_the_same_round_twice_or_an_earlier_one_is_refused(after: int):
    assert "each round once" in refused(lambda: device.advertise(terms(), 1, Key.generate(), after=after))


def test_a_message_of_another_round_is_refused():
    crowd = at("share")
    one = crowd.ids[0]
    message = told(crowd, one)
    assert "round 2" in refused(lambda: crowd.answer(one, replace(message, round=2)))


def test_a_replayed_phase_is_refused_at_every_step():
    crowd = Crowd(terms(), 8)
    one = crowd.ids[0]
    heard = []
    for phase in ("share", "mask", "agree", "reveal"):
        crowd.go_to(phase)
        heard.append(told(crowd, one))
    crowd.go_to("summed")
    state = crowd.devices[one]
    assert state.phase == "revealed"
    for message in heard:
        assert "hears this once" in refused(lambda message=message: crowd.answer(one, message))
    assert crowd.devices[one] == state


def test_a_phase_that_comes_too_early_is_refused():
    crowd = at("share")
    one = crowd.ids[0]
    for message in (Held(1, b"\xff", b""), Survivors(1, b"\xff"), Agreements(1, b"\xff", bytes(512))):
        assert "has advertised" in refused(lambda message=message: crowd.answer(one, message))
    assert "masks once" in refused(lambda: device.mask(crowd.terms, crowd.devices[one], crowd.vectors[one]))


# --- shares ---


def test_a_device_that_is_said_to_have_delivered_no_shares_masks_nothing():
    crowd = at("mask")
    one = crowd.ids[0]
    message = told(crowd, one)
    lie = replace(message, sharers=chosen(crowd, crowd.ids[1:]))
    assert "said not to have" in refused(lambda: crowd.answer(one, lie))


@pytest.mark.parametrize(("survivors", "shown"), [(8, 7), (6, 5)])
def test_too_few_deliverers_of_shares_are_refused(survivors: int, shown: int):
    """Too few for the cohort, though there are neighbours enough; and too few neighbours."""
    crowd = at("mask", survivors=survivors)
    message = told(crowd, crowd.ids[0])
    lie = replace(message, sharers=chosen(crowd, crowd.ids[:shown]), sealed=message.sealed[: (shown - 1) * 88])
    assert f"{shown} devices delivered shares" in refused(lambda: crowd.answer(crowd.ids[0], lie))


SPARSE = terms(80, survivors=60, colluders=0, complete=0, security=1, correctness=1)
"""Each device has 20 of 79 others as neighbours and needs 11 of them, so 20 can be left out without missing 60."""


@pytest.mark.parametrize("kept", [0, 10])
def test_a_device_whose_own_neighbours_are_said_to_be_missing_masks_nothing(kept: int):
    """Enough devices delivered shares, but not this device's neighbours: without pair masks, the seed of its own mask
    would be all that hides its vector, and its neighbours reveal that seed (review 2, privacy finding 6)."""
    crowd = Crowd(SPARSE, 80)
    crowd.go_to("mask")
    around = [crowd.ids[peer] for peer in crowd.roster.neighbours[0]]
    left_out = set(around[kept:])
    shown = [one for one in crowd.ids if one not in left_out]
    assert len(shown) >= SPARSE.survivors
    assert len(around) - len(left_out) == kept < SPARSE.plan(80).threshold
    honest = told(crowd, crowd.ids[0])
    lie = replace(honest, sharers=chosen(crowd, shown), sealed=honest.sealed[: kept * 88])
    assert f"{kept} of them neighbours" in refused(lambda: crowd.answer(crowd.ids[0], lie))
    assert crowd.devices[crowd.ids[0]].phase == "shared"


def test_a_device_without_enough_surviving_neighbours_signs_nothing():
    """The round cannot end without them: the device's own seed could not be rebuilt. It says so instead of signing."""
    crowd = Crowd(SPARSE, 80)
    crowd.go_to("agree")
    around = {crowd.ids[peer] for peer in crowd.roster.neighbours[0][10:]}
    lie = Survivors(1, chosen(crowd, [one for one in crowd.ids if one not in around]))
    assert "10 of them neighbours" in refused(lambda: crowd.answer(crowd.ids[0], lie))


def test_devices_that_were_shown_different_deliverers_share_no_mask_and_no_signature():
    crowd = at("mask")
    message = told(crowd, crowd.ids[0])
    crowd.answer(crowd.ids[0], replace(message, sharers=chosen(crowd, crowd.ids[:7]), sealed=message.sealed[: 6 * 88]))
    assert "hash of this cohort" in refused(lambda: crowd.deliver(crowd.ids[:1]))
    for one in crowd.ids[1:]:
        crowd.tell([one])
    everyone = Survivors(1, chosen(crowd, crowd.ids[:7]))
    signatures = b""
    for one in crowd.ids[:7]:
        crowd.answer(one, everyone)
        signatures += decode(Agreement, crowd.devices[one].sent).signature
    agreements = Agreements(1, chosen(crowd, crowd.ids[:7]), signatures)
    assert "0 other devices signed" in refused(lambda: crowd.answer(crowd.ids[0], agreements))


# --- the publication ---


OTHER = hashlib.sha256(b"a model for one device alone").digest()


def shown_another(*victims: int, **more) -> Crowd:
    """The server shows these devices another model than the rest, and takes what all of them send."""
    crowd = Crowd(terms(**more), 8)
    crowd.shown = {crowd.ids[at]: OTHER for at in victims}
    crowd.go_to("mask")
    crowd.tell()
    for at, one in enumerate(crowd.ids):
        crowd.log[one, "secagg/masked/1"] = crowd.devices[one].sent
        body = decode(Masked, crowd.devices[one].sent).body
        hashed = hashlib.sha256(body).digest()
        total = server.add(crowd.terms, crowd.server.body, body)
        crowd.server = replace(crowd.server, masked={**crowd.server.masked, at: hashed}, body=total)
    crowd.close()
    crowd.tell()
    signatures = {at: decode(Agreement, crowd.devices[one].sent).signature for at, one in enumerate(crowd.ids)}
    crowd.server = replace(crowd.server, agreements=signatures)
    return crowd


def hears_all_signatures(crowd: Crowd, one: str) -> bool:
    """Whether this device reveals when it is shown what everybody signed."""
    signed = b"".join(crowd.server.agreements[at] for at in range(8))
    try:
        crowd.answer(one, Agreements(1, chosen(crowd, crowd.ids), signed))
    except device.Refused:
        return False
    return True


def test_a_different_publication_to_one_device_leaves_its_vector_and_the_sum_masked():
    """The others reveal every seed, the victim's too. Between the victim and each of them the masks do not cancel."""
    crowd = shown_another(0, fields=(RingField("v", 250_000, 32, 100, 0),))
    victim = crowd.ids[0]
    roots = {one: crowd.devices[one].root for one in crowd.ids}
    vector = decode(Masked, crowd.log[victim, "secagg/masked/1"])
    honest = replace(crowd.server, phase="mask", masked={})
    assert "hash of this cohort" in refused(lambda: server.hear(crowd.terms, honest, victim, vector))
    assert [hears_all_signatures(crowd, one) for one in crowd.ids] == [False] + [True] * 7
    views = {one: crowd.roster.view(crowd.server.sharers, crowd.shown.get(one, MODEL)) for one in crowd.ids}
    seeds = {one: device._secrets(roots[one], TASK, 1)[2] for one in crowd.ids}
    keys = {one: masks.self_key(seeds[one], Binding(TASK, 1, views[one]).salt, one, "v") for one in crowd.ids}
    total = ring.from_bytes(crowd.server.body, 32, 250_000).copy()
    masks.add_stream(total, [(key, -1) for key in keys.values()])
    alone = ring.from_bytes(vector.body, 32, 250_000).copy()
    masks.add_stream(alone, [(keys[victim], -1)])
    assert chi_square_of(total) < too_far(255)
    assert chi_square_of(alone) < too_far(255)


@pytest.mark.parametrize("others", range(1, 8))
def test_of_two_publications_in_one_cohort_one_at_most_finds_devices_that_reveal(others: int):
    crowd = shown_another(*range(others))
    revealed = [hears_all_signatures(crowd, one) for one in crowd.ids]
    quorum = crowd.terms.plan(8).quorum
    assert sum(revealed[:others]) == (others if others > quorum else 0)
    assert sum(revealed[others:]) == (8 - others if 8 - others > quorum else 0)


# --- survivors ---


def test_a_device_that_is_called_missing_signs_nothing_and_reveals_nothing():
    crowd = at("agree")
    one = crowd.ids[0]
    lie = Survivors(1, chosen(crowd, crowd.ids[1:]))
    assert "called missing" in refused(lambda: crowd.answer(one, lie))


@pytest.mark.parametrize(("survivors", "shown"), [(8, 7), (6, 5)])
def test_G7_too_few_survivors_are_refused(survivors: int, shown: int):
    """Too few for the noise, though there are neighbours enough; and too few neighbours."""
    crowd = at("agree", survivors=survivors)
    lie = Survivors(1, chosen(crowd, crowd.ids[:shown]))
    assert f"{shown} survivors" in refused(lambda: crowd.answer(crowd.ids[0], lie))


def test_a_survivor_that_never_delivered_shares_is_refused():
    crowd = Crowd(terms(), 8)
    crowd.go_to("share")
    crowd.tell()
    crowd.deliver(crowd.ids[:7])
    crowd.close()
    crowd.tell(crowd.ids[:7])
    lie = Survivors(1, chosen(crowd, crowd.ids))
    assert "never delivered shares" in refused(lambda: crowd.answer(crowd.ids[0], lie))


def test_a_device_signs_one_list_of_survivors():
    crowd = at("agree")
    one = crowd.ids[0]
    crowd.answer(one, Survivors(1, chosen(crowd, crowd.ids)))
    assert "hears this once" in refused(lambda: crowd.answer(one, Survivors(1, chosen(crowd, crowd.ids[:7]))))


@pytest.mark.parametrize("first", range(2, 7))
def test_different_survivors_for_different_devices_find_no_second_quorum_even_with_a_colluder(first: int):
    """Everyone gets a list that looks right. The colluder signs both; an even split reveals nothing at all."""
    crowd = at("agree")
    lists = (chosen(crowd, crowd.ids[:7]), chosen(crowd, crowd.ids))
    colluder, honest = crowd.ids[0], crowd.ids[1:7]
    signed: tuple[dict[str, bytes], dict[str, bytes]] = ({}, {})
    for at_, survivors in enumerate(lists):
        text = survivors_bytes(TASK, 1, crowd.roster.view(crowd.server.sharers, MODEL), survivors)
        signed[at_][colluder] = crowd.keys[colluder].sign(text)
    for index, one in enumerate(honest):
        which = int(index >= first - 1)
        crowd.answer(one, Survivors(1, lists[which]))
        signed[which][one] = decode(Agreement, crowd.devices[one].sent).signature
    revealed = [0, 0]
    for index, one in enumerate(honest):
        which = int(index >= first - 1)
        signers = sorted(signed[which])
        message = Agreements(1, chosen(crowd, signers), b"".join(signed[which][signer] for signer in signers))
        try:
            crowd.answer(one, message)
            revealed[which] += 1
        except device.Refused:
            pass
    assert min(revealed) == 0
    assert first in (2, 6) or max(revealed) == 0


def test_signatures_that_are_missing_forged_repeated_or_the_devices_own_do_not_count():
    crowd = at("reveal")
    one = crowd.ids[0]
    message = told(crowd, one)
    quorum = crowd.terms.plan(8).quorum
    own = Agreements(
        1, chosen(crowd, crowd.ids[:quorum]), crowd.server.agreements[0] + message.signatures[: 64 * (quorum - 1)]
    )
    forged = replace(message, signatures=message.signatures[:64] * quorum)
    fewer = Agreements(1, chosen(crowd, crowd.ids[1:quorum]), message.signatures[: 64 * (quorum - 1)])
    for lie, found in ((own, quorum - 1), (forged, 1), (fewer, quorum - 1)):
        assert f"{found} other devices signed" in refused(lambda lie=lie: crowd.answer(one, lie))
    assert "not as many" in refused(lambda: crowd.answer(one, replace(message, signatures=b"")))
    crowd.answer(one, message)
    assert crowd.devices[one].phase == "revealed"


def test_a_missing_device_called_survivor_leaves_the_sum_masked_until_its_own_message_is_in_it():
    """The server gets the seed of a device whose vector it has not: pair masks stay on both."""
    crowd = Crowd(terms(fields=(RingField("v", 250_000, 32, 100, 0),)), 8)
    crowd.go_to("mask")
    crowd.tell()
    crowd.deliver(crowd.ids[1:])
    short = crowd.server.body  # without device 0
    survivors = chosen(crowd, crowd.ids)  # the lie
    crowd.server = replace(crowd.server, phase="agree", survivors=survivors)
    crowd.tell(crowd.ids[1:])
    crowd.deliver(crowd.ids[1:])
    crowd.close()
    crowd.tell(crowd.ids[1:])
    crowd.deliver(crowd.ids[1:])
    crowd.close()
    assert crowd.server.phase == "abandoned"  # the honest check: no sum of the survivors looks like this
    seeds = {one: device._secrets(crowd.devices[crowd.ids[0]].root, TASK, 1)[2] for one in crowd.ids[:1]}
    salt = Binding(TASK, 1, crowd.roster.view(crowd.server.sharers, MODEL)).salt
    late = ring.from_bytes(decode(Masked, crowd.devices[crowd.ids[0]].sent).body, 32, 250_000).copy()
    masks.add_stream(late, [(masks.self_key(seeds[crowd.ids[0]], salt, crowd.ids[0], "v"), -1)])
    assert chi_square_of(late) < too_far(255)
    assert chi_square_of(ring.from_bytes(short, 32, 250_000)) < too_far(255)
