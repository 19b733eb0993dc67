"""Plug-ins with one mistake each: `task check` and `simulate` refuse them in one sentence that says what and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from plugged import MEDIANS, SIGNS, no_plugins_left

from crowdml.cli import cli

MASKS = "masking = { cohort = 3, minimum = 3, colluders = 0, window = 1.0 }\n"
TASK = """
name = "corners"
features = {{ dimension = 4, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b", "c"] }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "broken", {settings} }}
privacy = {{ mechanism = "{noise}", epsilon = {{ {row} = 1.0 }} }}
stop = {{ steps = 3 }}
"""
BOTH = "batch = 5, rate = 0.5"


def refused(
    folder: Path, code: str, *words: str, masked: bool = False, settings: str = BOTH, row: str = "votes"
) -> str:
    """The line that a command says about a task of this plug-in, with exit code 1: `task check`, or a simulation."""
    noise = "skellam" if masked else "discrete-gaussian"
    (folder / "broken.py").write_text(code)
    task = TASK.format(noise=noise, row=row, settings=settings)
    (folder / "task.toml").write_text(task + (MASKS if masked else ""))
    command = ["simulate", "--data", "synthetic", "--devices", "12", *words] if words else ["task", "check"]
    with no_plugins_left():
        done = CliRunner().invoke(cli, [*command, str(folder / "task.toml"), "--plugin", str(folder / "broken.py")])
    assert (done.exit_code, done.output.count("\n"), "Traceback" in done.output) == (1, 1, False), done.output
    return done.output


def changed(*changes: tuple[str, str], file: Path = SIGNS) -> str:
    """An example under the name `broken`, with pieces of its text replaced."""
    code = re.sub('"(signs|medians)', '"broken', file.read_text())
    for old, new in changes:
        assert old in code, old
        code = code.replace(old, new, 1)
    return code


def raising(function: str) -> tuple[str, str]:
    """A change: this function raises on its first line."""
    (head,) = re.findall(rf"^def {function}\(.*\n", SIGNS.read_text(), re.M)
    return head, f"{head}    raise KeyError('oops')\n"


OOPS = r"\(broken.py, line \d+, in `{}`\): KeyError: 'oops'\. "
SAID = "cm.namespace(each.x).sign(model.gradients(public.weights, each))"
MIXED = "(lambda votes: votes - votes.mean(0))(model.gradients(public.weights, each))"
LAST = "    settings=Settings,\n"
START = "def start("
LEAKS = (
    "device=cm.device_role(Votes, Weights, votes)",
    "device=cm.Role(cm.wait, {cm.Sensed: cm.check_out, Weights: leak})",
)
LEAK = """seen = []


def leak(task, waiting, public, ctx):
    waiting.map(lambda each: seen.append(int(abs(each.x).sum() * 1e6)))
    said = cm.let_out(Votes, task, ctx, votes(task, waiting, public), version=seen[-1])
    return cm.Step(None, (cm.Send(cm.SERVER, said),))


"""
ROW = '    return {"votes": cm.sum_row(task, "votes", '
COUNTED = '"votes": cm.sum_row(task, "votes", bound=bound, shape=shape, covers=covers, promise="which way to go")'

ANSWERS = {
    "a row without covers": (
        [(", covers=covers", "")],
        r"line \d+, in `mechanisms`\): TypeError: .*'covers'\. Mend the",
    ),
    "a row and no table": (
        [('{"votes": cm.sum_row', "cm.sum_row"), ('"which way to go")}', '"which way to go")')],
        r"`mechanisms` gives a GridGaussian, and has to give a dict of rows: .*\. Mend the plug-in",
    ),
    "a table that raises": ([raising("mechanisms")], rf"'broken' failed {OOPS.format('mechanisms')}Mend the plug-in"),
    "a channel that raises": (
        [(LAST, f"{LAST}    channel=lambda task: 1 / 0,\n")],
        r"line \d+, in a lambda\): ZeroDiv",
    ),
    "a channel of another kind": (
        [(LAST, f"{LAST}    channel=lambda task: 'summed',\n")],
        r"`channel` gives 'summed', and has to give a Channel",
    ),
    "a capacity that raises": (
        [(LAST, f"{LAST}    capacity=lambda task: 1 / 0,\n")],
        r"line \d+, in a lambda\): ZeroDiv",
    ),
    "a buffer below a batch": (
        [(LAST, f"{LAST}    capacity=lambda task: 3,\n")],
        r"a batch has 5 samples and a buffer holds 3: at least 1, in this order",
    ),
    "settings that raise": (
        [('rate / sqrt(t)."""\n', 'rate / sqrt(t)."""\n\n    def __post_init__(self):\n        {}["oops"]\n')],
        OOPS.format("__post_init__"),
    ),
    "a row that the contribution lacks": (
        [(COUNTED, f"{COUNTED}, {COUNTED.replace(':', ':', 1).replace('votes', 'extra', 1)}")],
        r"`mechanisms` has a row 'extra', and its contribution has the fields votes\. Declare 'extra' there",
    ),
    "a field that the table lacks": (
        [
            ('{"votes": cm.sum_row', '{"voices": cm.sum_row'),
            (
                "    votes: cm.Release[cm.Integers]\n",
                "    votes: cm.Release[cm.Integers]\n    voices: cm.Release[cm.Integers] | None\n",
            ),
        ],
        r"its contribution has the field 'votes', and `mechanisms` the rows voices\. Add a row 'votes'",
    ),
    "no batch": (
        [("settings=Settings", "settings=None")],
        r"protocol 'broken' does not say how many samples a check-in has: declare `batch` in its settings",
    ),
    "no contribution": (
        [("    contribution=Votes,\n", "")],
        r"protocol 'broken' does not say what a device gives: pass its `contribution`",
    ),
    "no total": (
        [(', total="broken/total/1"', "")],
        r"a contribution has 'broken/masked/1' and no `total`: name both kinds",
    ),
    "no row": (
        [("    votes: cm.Release[cm.Integers]\n", "    votes: cm.Public[cm.Integers]\n")],
        r"Votes leaves under masks, so it needs a row of its own",
    ),
}

KINDS = {
    "a dash": ("bro-ken/weights/1", r"the kind 'bro-ken/weights/1': say protocol/message/version in small letters"),
    "no version": ("broken/weights", r"the kind 'broken/weights': say protocol/message/version"),
    "too long": (f"broken/{'w' * 60}/1", r"say protocol/message/version in .* at most 64 characters"),
    "ours, imported or not": ("admm/update/1", r"the kind 'admm/update/1', and crowdml's own begin so"),
    "its own": ("broken/votes/1", r"Two messages call themselves 'broken/votes/1': Weights and Votes"),
}

TURNS = {
    "the start": ([raising("start")], OOPS.format("start")),
    "the device": ([raising("votes")], OOPS.format("votes")),
    "the server": ([raising("follow")], OOPS.format("follow")),
    "the model": (
        [("model=lambda task, state: state.weights", "model=lambda task, state: state.oops")],
        r"line \d+, in a lambda\): Attr",
    ),
    "predict": (
        [(LAST, f"{LAST}    predict=lambda task, weights, x: weights,\n")],
        r"`predict` gives the shape \(4, 3\)",
    ),
    "a row that is not in the table": (
        [('{"votes": batch.map', '{"voices": batch.map')],
        r"Nothing may leave as 'voices'",
    ),
    "another shape": (
        [("(public.weights, each)))}", "(public.weights, each)[:, :2]))}")],
        r"a device says votes of shape \(2, 3\), and the server expects \(4, 3\)",
    ),
    "progress": ([(LAST, f"{LAST}    progress=lambda task, state: state.oops,\n")], r"line \d+, in a lambda\): Attr"),
    "in place": (
        [
            (
                "    after = Weights(state.weights - rate * majority, version)",
                "    after = state\n    after.weights[:] -= 1",
            )
        ],
        r"line \d+, in `follow`\): ValueError: .* is read-only\. A handler changes nothing in place: it returns a new",
    ),
    "in place, on the device": (
        [("batch.map(lambda each: ", "batch.map(lambda each: each.x.sort() or ")],
        r"ValueError: .* is read-only",
    ),
    "a state that changes its type": (
        [("state.weights - rate * majority", 'state.weights - rate * majority.astype("d")')],
        r"state has a weights of float64 \(4, 3\) after a turn, and of float32 \(4, 3\) before",
    ),
    "a state that is no struct": (
        [("cm.Step(first, (cm.Publish(first)", "cm.Step([], (cm.Publish(first)")],
        r"the server's state is a list: it is a dataclass of arrays",
    ),
    "a memory of its own": (
        [
            (
                "    after = Weights(state.weights -",
                "    start.calls = getattr(start, 'calls', 0) + 1\n"
                "    after = Weights(state.weights - xp.float32(start.calls) *",
            )
        ],
        r"gives another state for the same arguments",
    ),
    "nothing offered": ([("(cm.Publish(first),)", "()")], r"the server publishes nothing at its start"),
    "a public field that a sample moves": (
        [(START, LEAK + START), LEAKS],
        r"one sample was replaced, and the public field 'version' of broken/votes/1 changed: it would leave without",
    ),
    "samples that mix": (
        [(SAID, MIXED)],
        r"contributions of 5 samples to row 'votes' moved, others by up to 0\.\d+: row i of what `map` gives",
    ),
    "samples that mix by their largest": (
        [(SAID, "model.gradients(public.weights, each) / abs(each.x).max()")],
        r"contributions of 5 samples to row 'votes' moved",
    ),
    "a vector that moves further than its bound": (
        [
            (
                ROW + "bound=bound, ",
                ROW.replace("sum_row", "stable_row")
                + "stability=1e-2, device_stability=1e-2, float_error=Fraction(0), ",
            ),
            (SAID, "each.x.sum(0, keepdims=True)[:, :, None] * np.ones((1, 1, 3), np.float32)"),
        ],
        r"row 'votes' moved by [\d,]+ grid steps: its noise hides [\d,]+\. No device takes part",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_a_plugin_declares_wrongly_or_answers_with_an_error_is_one_sentence(tmp_path: Path, case: str):
    changes, words = ANSWERS[case]
    row = "votes = 1.0, voices" if "voices" in str(changes) else "votes"
    assert re.search(words, refused(tmp_path, changed(*changes), row=row))


def test_a_missing_setting_is_named_with_its_own_words_and_no_signature(tmp_path: Path):
    said = refused(tmp_path, changed(), settings="batch = 5")
    assert "protocol.rate is missing. How far the first vote moves a weight." in said
    assert "Settings(" not in said


@pytest.mark.parametrize("case", KINDS)
def test_a_kind_that_cannot_travel_or_is_taken_is_refused_where_it_is_declared(tmp_path: Path, case: str):
    kind, words = KINDS[case]
    assert re.search(words, refused(tmp_path, changed(('"broken/weights/1"', f'"{kind}"'))))


@pytest.mark.parametrize("case", TURNS)
def test_a_rehearsal_finds_what_would_fail_or_leak_in_the_first_check_ins(tmp_path: Path, case: str):
    changes, words = TURNS[case]
    said = refused(tmp_path, changed(*changes))
    assert re.search(words, said), said
    assert "'broken' failed in a rehearsal with made-up samples" in said


@pytest.mark.parametrize("case", ["the server", "another shape", "in place", "samples that mix"])
def test_a_rehearsal_is_the_same_under_masks(tmp_path: Path, case: str):
    changes, words = TURNS[case]
    words = "Row 'votes': The table prices 12 entries, and this value has 6" if case == "another shape" else words
    said = refused(tmp_path, changed(*changes), masked=True)
    assert re.search(words, said), said


@pytest.mark.parametrize("masked", [False, True])
def test_a_rehearsal_closes_a_gathered_round(tmp_path: Path, masked: bool):
    fails = ("    medians = [", "    raise KeyError('oops')\n    medians = [")
    said = refused(tmp_path, changed(fails, file=MEDIANS), masked=masked, row="gradient")
    assert re.search(OOPS.format("close"), said), said
    silent = ("(cm.Publish(after), *cm", "(*(), *cm")
    said = refused(tmp_path, changed(silent, file=MEDIANS), masked=masked, row="gradient")
    assert "the server closes round 0 and publishes no later version" in said


LATER = (
    (START, f"HEARD = []\n\n\n{START}"),
    ("    majority = xp", "    HEARD.append(1)\n    assert len(HEARD) < 6, 'oops'\n    majority = xp"),
)
"""A handler that fails after its rehearsal."""


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("engine", ["compiled", "events"])
def test_a_simulation_ends_with_one_sentence_where_a_handler_fails(tmp_path: Path, engine: str, masked: bool):
    assert "failed in a rehearsal" in refused(tmp_path, changed(raising("follow")), "--engine", engine, masked=masked)
    late = changed(*LATER, (LAST, f"{LAST}    traced=False,\n"))
    said = refused(tmp_path, late, "--engine", engine, masked=masked)
    assert re.search(r"'broken' failed \(broken.py, line \d+, in `follow`\): AssertionError: oops\. Mend", said), said


@pytest.mark.parametrize("engine", ["compiled", "events"])
def test_a_handler_that_cannot_be_compiled_is_told_of_traced(tmp_path: Path, engine: str):
    branches = ("    majority = xp", "    if heard.votes.value.sum() > 0:\n        pass\n    majority = xp")
    said = refused(tmp_path, changed(branches), "--engine", engine)
    assert re.search(r"in `follow`\): TracerBool.*: Attempted boolean .* Branch on no value .*traced=False", said), said


def test_a_file_that_imports_another_of_its_folder_is_refused_for_one_file_is_pinned(tmp_path: Path):
    (tmp_path / "beside.py").write_text("bound = 1\n")
    for line in ("import beside", "from beside import bound", "from . import beside"):
        said = refused(tmp_path, f"{line}\n{changed()}")
        assert "broken.py, line 1, imports" in said
        assert "from its own folder, and --plugin pins one file. Put both into one file, or make a package" in said
