"""The mutants of `deep.py` that no test kills, each with the reason why it does no harm."""

from __future__ import annotations

CACHE = "Chooses which of two caches holds the roster: memory, never what is read."
WORK = "Only more work: a secret that came back is rebuilt again, and verified again against what its owner signed."
LIVENESS = (
    "Only how many wrong shares are decoded at the last attempt: a round with hundreds of liars ends or is abandoned. "
    "A secret counts only if its owner signed it, whichever attempt found it."
)

SIGNATURES = "Only saves verifying more signatures than the quorum needs."

SURVIVORS: dict[str, str] = {
    "secagg/cohort.py read_roster: len(data) <= COMPLETE * ENTRY -> False": CACHE,
    "secagg/cohort.py read_roster: len(data) <= COMPLETE * ENTRY -> True": CACHE,
    "secagg/graph.py _threshold: threshold > k -> False": (
        "With t > k too many neighbours are missing before anybody is: `tail` of less than one is 1, which fails, too."
    ),
    "secagg/device.py reveal: found >= roster.plan.quorum -> False": SIGNATURES,
    "secagg/server.py _rebuild: attempt == ATTEMPTS - 1 -> False": LIVENESS,
    "secagg/server.py _rebuild: attempt == ATTEMPTS - 1 -> True": LIVENESS,
    "secagg/server.py _rebuild: owner not in found -> True": WORK,
    "secagg/server.py _rebuild: owner not in found #2 -> True": WORK,
    "secagg/server.py _rebuild: len(shown[owner]) > threshold -> True": WORK,
}
