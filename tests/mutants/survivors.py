"""The mutants of `deep.py` that no test kills, each with the reason why it does no harm."""

from __future__ import annotations

CACHE = "Chooses which of two caches holds the roster: memory, never what is read."
WORK = "Only more work: a secret that came back is rebuilt again, and verified again against what its owner signed."
LIVENESS = (
    "Only how many wrong shares are decoded at the last attempt: a round with hundreds of liars ends or is abandoned. "
    "A secret counts only if its owner signed it, whichever attempt found it."
)

SIGNATURES = "Only saves verifying more signatures than the quorum needs."

REMEMBERED = "Only more work: the ledger reads again, or works out again, what it remembers. The answer is the same."
FORGETS = "Only how much is remembered: a table of answers that are worked out again is emptied more often, or never."
SAME = "The longer way to the same answer."
POSIX = "Always true where the tests run."
LOCKS = (
    "Only when SQLite takes its lock. A step that began with a reader's lock and finds that another process wrote is "
    "told so (busy), and nothing of it is written."
)
WORDS = "Only a sentence for people, or the number in it."
LIVENESS_OF_ROUND = (
    "Only whether the device goes on with this round or leaves it, and how soon. What it may say in a round is held "
    "by `secagg/device.py`, and the draw by the ledger."
)
AFTER_ITS_DRAW = "Shares are heard before the draw, and a device without one (`finish`) goes on after its draw alone."
STILL_WAITS = "The batch of a round that ended before the draw is not charged: it waits, and goes into a later round."
NO_ROUND = "Writes once more that no round is under way."
ON_DISK = "A round with a phase is on disk: the assertion below would say otherwise."
NUMBERED = "`secagg/device.py` refuses a message of another round by the number inside it."
AGAIN = "The device sends the same bytes once more than it needs to, which is free."

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
    "privacy/spending.py Spent.add: total not in kept -> True": REMEMBERED,
    "privacy/spending.py Spent.add: 'front' in known -> True": REMEMBERED,
    "privacy/spending.py Spent.refusal: first <= serial <= last -> True": WORDS,
    "storage/device/ledger.py Ledger._refused: refusal.cap == 'samples' -> False": WORDS,
    "storage/device/ledger.py Ledger._refused: refusal.cap == 'samples' -> True": WORDS,
    "privacy/spending.py Spent.refusal: new == step.size -> False": SAME,
    "storage/device/ledger.py Ledger._know: task not in self._shared.tasks -> True": REMEMBERED,
    "storage/device/file.py LedgerFile._look_round: version != self._version -> True": REMEMBERED,
    "storage/device/ledger.py Ledger._next_seq: task not in self._seqs -> True": REMEMBERED,
    "storage/device/ledger.py Ledger._next_serial: serial is None -> True": REMEMBERED,
    "privacy/spending.py History.spent: found is None -> True": REMEMBERED,
    "storage/device/ledger.py Ledger._written: seq >= self._next_seq(task) -> False": SAME,
    "privacy/spending.py Spent.after: new < samples -> True": SAME,
    "privacy/spending.py Step.verdict: found is None -> True": REMEMBERED,
    "privacy/spending.py Step.verdict: len(self._verdicts) >= MOST_REMEMBERED -> False": FORGETS,
    "privacy/spending.py Step.verdict: len(self._verdicts) >= MOST_REMEMBERED -> True": FORGETS,
    "privacy/spending.py _by_identity.ask: known is None -> True": REMEMBERED,
    "privacy/spending.py _by_identity.ask: len(found) >= MOST_REMEMBERED -> False": FORGETS,
    "privacy/spending.py _by_identity.ask: len(found) >= MOST_REMEMBERED -> True": FORGETS,
    "privacy/spending.py _covers: whole.orders == one.orders -> False": SAME,
    "privacy/spending.py _remembered.ask: len(shape) <= USUAL_STEP -> False": FORGETS,
    "privacy/spending.py _remembered.ask: len(shape) <= USUAL_STEP -> True": FORGETS,
    "privacy/spending.py placed: len(_steps) >= MOST_REMEMBERED -> False": FORGETS,
    "privacy/spending.py placed: len(_steps) >= MOST_REMEMBERED -> True": FORGETS,
    "privacy/spending.py placed: len(charges) <= USUAL_STEP -> False": FORGETS,
    "privacy/spending.py placed: len(charges) <= USUAL_STEP -> True": FORGETS,
    "privacy/spending.py placed: step is None -> True": REMEMBERED,
    "privacy/spending.py ceiling: least.orders == total.orders -> False": SAME,
    "device/rounds.py OwnRounds._begin: view.phase != 'advertise' -> False": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._end: problem.slug in ('round-over', 'round-refused') -> True": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._end: self._phase is not None -> True": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._ending: view.phase != 'summed' -> False": WORDS,
    "device/rounds.py OwnRounds._ending: view.phase != 'summed' -> True": WORDS,
    "device/rounds.py OwnRounds._ending: view.phase == 'abandoned' -> False": WORDS,
    "device/rounds.py OwnRounds._ending: view.phase == 'abandoned' -> True": WORDS,
    "device/rounds.py OwnRounds._follow: self._phase is None -> False": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._follow: self._phase is None -> True": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._follow: view.phase == SAID.get(self._phase or '') -> True": AGAIN,
    "device/rounds.py OwnRounds._hear: draw is None -> False": AFTER_ITS_DRAW,
    "device/rounds.py OwnRounds._keep: state.phase in DRAWN -> True": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._leave: phase in DRAWN -> True": STILL_WAITS,
    "device/rounds.py OwnRounds._leave: phase is not None -> True": NO_ROUND,
    "device/rounds.py OwnRounds._progress: view.phase == 'advertise' -> False": WORDS,
    "device/rounds.py OwnRounds._progress: view.phase == 'advertise' -> True": WORDS,
    "device/rounds.py OwnRounds._say: problem.slug == 'round-refused' -> True": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._say: state.phase != ADVERTISED -> True": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._say: state.phase == REVEALED -> False": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._say_aloud: line != self._told -> True": WORDS,
    "device/rounds.py OwnRounds._state: found is None -> False": ON_DISK,
    "device/rounds.py OwnRounds._step: PHASES.index(view.phase) < PHASES.index(SAID[phase]) -> True": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._step: view.round != self._last -> False": NUMBERED,
    "storage/device/file.py LedgerFile._prepare: os.name == 'posix' -> True": POSIX,
    "storage/device/file.py LedgerFile._prepare: os.name == 'posix' #2 -> True": POSIX,
    "storage/device/file.py LedgerFile._prepare: os.name == 'posix' #2 -> False": (
        "The name of a new file may be lost with the machine's power before anything is charged; no test cuts that."
    ),
    "storage/device/file.py LedgerFile.transaction: kind == 'deferred' -> False": LOCKS,
    "storage/device/file.py LedgerFile.transaction: kind == 'deferred' -> True": LOCKS,
    "storage/device/file.py LedgerFile.transaction: kind != 'deferred' -> True": REMEMBERED,
    "device/rounds.py OwnRounds._is_behind: self._phase is not None -> True": NO_ROUND,
    "device/rounds.py OwnRounds._is_behind: mark.round != self._last -> False": LIVENESS_OF_ROUND,
    "device/rounds.py OwnRounds._is_behind: self._phase == MASKED -> False": SAME,
    "device/rounds.py OwnRounds._mark_again: marked.last.hash != hashlib.sha256(said).hexdigest() -> True": (
        "Writes the mark of the same message once more."
    ),
}
