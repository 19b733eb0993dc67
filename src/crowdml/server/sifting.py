"""What a robust rule made of the uploads of the last closed rounds. For a task's operator alone: nobody else is told.

All of it follows from uploads that were released, so it costs no sample anything. Nothing of it is stored: the journal
has the uploads, and the rule is a pure function of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from crowdml.arrays import Array, Integers
from crowdml.channels import combining, root_table
from crowdml.robust import Combine, block_width, bucket_ranks, combine_blocks, distances_from, shares_of
from crowdml.rooted import REASONS
from crowdml.server.gathering import CLOSED, OWN, Journalled, Own, read_own
from crowdml.server.runner import TaskRunner
from crowdml.storage.server import StoreError
from crowdml.wire.envelopes import open_signed

__all__ = ["BECAUSE", "FARTHEST", "WHY", "Sifted", "left_out_most", "sift_rounds"]

ROUNDS = 8
"""Closed rounds that are shown."""
MOST_WORK = 2 * 10**10
"""Products for comparing all uploads of a round two by two, above which a page does without: about two seconds."""
FARTHEST = 4
"""Times the median distance: farther ones are counted together."""
LESS = 0.5
"""An upload counts less if it has less than this part of what it would have in a mean."""

WHY = {
    "mean": "The mean leaves nothing out.",
    "clipped-mean": "An upload longer than the median length is shortened to it, and so counts less.",
    "median": "The median drops single numbers, coordinate by coordinate, and no upload as a whole.",
    "trimmed-mean": "The trimmed mean drops single numbers, coordinate by coordinate, and no upload as a whole.",
    "krum": "Krum takes the one upload with the least distances to its nearest others.",
    "multi-krum": "Multi-Krum leaves out those with the largest distances to their nearest others.",
    "bulyan": "Bulyan leaves out those with the largest distances to their nearest others, and then single numbers.",
    "geometric-median": "The geometric median counts an upload the less the farther it is from the others.",
    "top": "It takes the uploads that score best on the operator's public rows, and leaves out the others.",
    "grouping": "It takes one group of uploads that agree, and leaves out the others and those that fail its tests.",
    "fltrust": "It leaves out uploads that go against an update made of the operator's public rows; as cosines say.",
    "exponential": "It draws uploads by how they score on private rows. The scores themselves are shown to nobody.",
    "centred-clipping": "An upload farther off than the median distance is pulled in to it, and so counts less.",
}
"""By rule: why it leaves an upload out, or counts it less."""


BECAUSE = {
    "not finite": "held a number that is not finite",
    "size": "did not add up to the number of samples that it stands for",
    "labels": "had sums of labels that do not go with its sums of features",
    "counts": "claimed fewer samples of a class than none, or more samples than it stands for",
    "noise": "had more or less noise than it must have, or samples unlike your rows",
    "copy": "had noise in common with another upload, so it is a copy",
    "another group": "belonged to another group than the one that was taken",
    "root rows": "repeated your rows instead of samples of its own",
    "score": "did worse on your rows than those that were taken",
}
"""By reason of the rule "grouping": why an upload was left out, as the end of a sentence."""


@dataclass(frozen=True)
class Sifted:
    """A closed round: what its rule left out, and how far its uploads are from what came of it."""

    number: int
    closed_at: str
    uploads: int
    left_out: int | None = None
    """Uploads that count nothing; None where the rule leaves out no upload as a whole, or nobody compared them."""
    less: int | None = None
    """Uploads that count less than half of what they would in a mean."""
    scores: tuple[float, ...] = ()
    """What each upload scored on public rows of the operator's; private rows show none."""
    distances: tuple[float, ...] = ()
    """Of each upload from the result, over the median one; not finite ones are left out."""
    reasons: tuple[tuple[str, int], ...] = ()
    """Why uploads were left out, in words, and how many for each reason; only of a rule that says so."""
    outside: tuple[str, ...] = ()
    """The devices whose upload counts nothing; under masks none is known."""

    @property
    def score_counts(self) -> tuple[int, ...]:
        """How many scores there are in each of sixteen steps from the least to the best."""
        return tuple(np.histogram(self.scores, 16)[0].tolist())

    @property
    def spread(self) -> tuple[int, ...]:
        """How many distances there are from 0 to `FARTHEST`, in steps of a quarter; the last has all beyond."""
        places = np.minimum((np.asarray(self.distances) * 4).astype(int), 4 * FARTHEST - 1)
        return tuple(np.bincount(places, minlength=4 * FARTHEST).tolist())


def sift_rounds(runner: TaskRunner, known: dict[int, Sifted] | None = None) -> list[Sifted]:
    """The last closed rounds of a gathered task, the newest first. In a thread.

    `known` has those that were sifted before, by their place in the journal; new ones are added. Rounds whose uploads
    the journal no longer has are not shown.
    """
    known = {} if known is None else known
    found: list[Sifted] = []
    place, by = runner.fold.pending.opened, combining(runner.task)
    try:
        while by is not None and place > 0 and len(found) < ROUNDS:
            (data,) = runner.store.bodies_at(runner.task.hash, [place])
            envelope = open_signed(data).envelope
            if envelope.kind not in OWN:
                break
            if envelope.kind != CLOSED:
                place -= 1
                continue
            own = read_own(envelope.kind, envelope.body)
            if place not in known:
                known[place] = sift(runner, by, own, place)
            found.append(known[place])
            place = own.entries[0] - 1
    except StoreError:  # reduced: these bodies are gone
        pass
    return found


def sift(runner: TaskRunner, by: Combine, own: Own, place: int) -> Sifted:
    """What the rule made of this round, which the server's own entry at this place closed."""
    store, fold, hash_ = runner.store, runner.fold, runner.task.hash
    number, entries, count = own.number, own.entries, len(own.entries)
    at = store.received_at(hash_, place)
    if by.rooted and own.released:
        return _rated(runner, by, own, at)
    if fold.bodies is None or by.rooted or by.rule not in WHY:
        return Sifted(number, at, count)
    uploads = Journalled(entries, fold.bodies, fold.read_many)
    sizes = {row: next(uploads.blocks(row, 1)).size for row in uploads.rows}
    row = max(sizes, key=lambda name: sizes[name])  # counts add up: the rule has the long one
    if count * count * sizes[row] > MOST_WORK:
        return Sifted(number, at, count)
    blocks = partial(_means, uploads, row)
    ranks = bucket_ranks(np.int64(number), count) if by.before == "bucketing" else None
    far = distances_from(blocks, combine_blocks(blocks, count, by, ranks))
    shares, usual = shares_of(blocks, count, by, ranks), float(np.median(far)) or 1.0
    shown = tuple(float(each) for each in far / usual if np.isfinite(each))
    if shares is None:
        return Sifted(number, at, count, distances=shown)
    none = shares <= 0
    senders = [] if runner.is_masked else _senders(runner, [entries[int(each)] for each in np.flatnonzero(none)])
    less = int((~none & (shares < LESS)).sum())
    return Sifted(number, at, count, int(none.sum()), less, distances=shown, outside=tuple(senders))


def _rated(runner: TaskRunner, by: Combine, own: Own, at: str) -> Sifted:
    """A round of a rule that looks at rows of the server's: what passed the server's own door is in its entry."""
    table, released, count = root_table(runner.task), own.released or {}, len(own.entries)
    reasons: tuple[tuple[str, int], ...] = ()
    if "scores" in released:
        scores = np.asarray(released["scores"]) * float(table["scores"].grid.step)
        taken = np.flatnonzero(scores > 0) if by.rule == "fltrust" else np.argsort(-scores, kind="stable")[: by.keep]
        shown = tuple(float(each) for each in scores)
    elif "taken" in released:
        said = np.rint(np.asarray(released["taken"]) * float(table["taken"].grid.step)).astype(np.int64)
        taken, shown = np.flatnonzero(said > 0), ()
        reasons = _counted(said)
    else:
        taken, shown = np.asarray(released["chosen"]), ()
    none = [place for number, place in enumerate(own.entries) if number not in set(taken.tolist())]
    outside = [] if runner.is_masked else _senders(runner, none)
    return Sifted(own.number, at, count, len(none), 0, shown, reasons=reasons, outside=tuple(outside))


def _counted(said: Integers) -> tuple[tuple[str, int], ...]:
    """How many uploads were left out for which reason, the most common first. Entries of 0 are from servers that did
    not write the reason."""
    found = Counter(BECAUSE[REASONS[-each]] for each in said.tolist() if -len(REASONS) < each < 0)
    return tuple(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def _means(uploads: Journalled, row: str) -> Iterator[Array]:
    for _, some in uploads.columns(row, block_width(uploads.count)):
        yield some / uploads.devices[:, None].astype(np.float64)


def _senders(runner: TaskRunner, places: Sequence[int]) -> list[str]:
    return sorted(runner.store.senders_of(runner.task.hash, places))


def left_out_most(rounds: Iterable[Sifted], most: int = 10) -> list[tuple[str, int]]:
    """The devices whose uploads were left out most often, and how often."""
    return sorted(Counter(each for round_ in rounds for each in round_.outside).items(), key=lambda p: (-p[1], p[0]))[
        :most
    ]
