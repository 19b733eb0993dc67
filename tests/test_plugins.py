"""Plug-ins: a protocol, a model or a feature map that does not come with crowdml, and everything that may be wrong."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from plugged import no_plugins_left

from crowdml import plugins
from crowdml.cli import cli
from crowdml.errors import PluginError, TaskError
from crowdml.features.maps import MapSettings, make_map
from crowdml.messages import KINDS as MESSAGES
from crowdml.models.make import make_model
from crowdml.protocols import PROTOCOLS, check_for_devices, check_plugins, find, settled
from crowdml.protocols.registry import load_plugin
from crowdml.task import Task, find_task, from_canonical

COPY = """
from dataclasses import replace

from crowdml.messages import Public, message
from crowdml.protocol import Role
from crowdml.protocols import sgd


@message("copy/params/1")
class Said:
    version: Public[int]


def as_sgd(task):
    table = {key: value for key, value in task.protocol.items() if key != "plugin"}
    return replace(task, protocol={**table, "kind": "sgd"})


def under(f):
    return lambda task, *rest: f(as_sgd(task), *rest)


of = sgd.protocol
protocol = replace(
    of,
    name="copy",
    device=Role(under(of.device.start), {event: under(hear) for event, hear in of.device.on.items()}),
    server=Role(under(of.server.start), {event: under(hear) for event, hear in of.server.on.items()}),
    mechanisms=under(of.mechanisms),
    check=under(of.check),
    batch=under(of.batch),
    model=under(of.model),
    settle=lambda task: replace(task, privacy=of.settle(as_sgd(task)).privacy),
    expected=under(of.expected),
    progress=under(of.progress),
)
"""
"""sgd under another name, as a plug-in."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Every test begins without plug-ins, and leaves none."""
    with no_plugins_left():
        yield


def written(folder: Path, text: str, name: str = "copy.py") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


def copied(**protocol: object) -> Task:
    """The shipped task `activity`, for the plug-in's protocol."""
    return find_task("activity").with_(protocol={"kind": "copy", **protocol})


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def installed(folder: Path, name: str, version: str, entries: str, code: str) -> None:
    """A distribution as pip leaves it: a module, and what says that it is there."""
    (folder / f"{name.replace('-', '_')}.py").write_text(textwrap.dedent(code), encoding="utf-8")
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(textwrap.dedent(entries))


ENTRY = "[crowdml.protocols]\ncopy = crowd_copy:protocol\n"


# --- where they come from ---


def test_a_file_named_with_plugin_gives_its_protocol_to_tasks_which_pin_its_digest(tmp_path: Path):
    file = written(tmp_path, COPY)
    load_plugin(file)
    task = settled(copied())
    assert task.protocol["plugin"] == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    assert find(task).name == "copy"
    assert check_for_devices(from_canonical(task.canonical)).name == "copy"


def test_an_installed_distribution_gives_its_protocol_to_tasks_which_pin_its_name_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    installed(tmp_path, "Crowd_Copy", "1.2", ENTRY.replace("crowd_copy", "Crowd_Copy"), COPY)
    monkeypatch.syspath_prepend(tmp_path)
    task = settled(copied())
    assert task.protocol["plugin"] == "crowd-copy 1.2"
    assert "copy" in PROTOCOLS
    assert check_for_devices(task).name == "copy"


def test_our_own_protocols_are_pinned_by_nothing_so_that_hashes_stand():
    task = settled(find_task("activity"))
    assert "plugin" not in task.protocol
    assert "plugin" not in task.model


def test_entry_points_are_not_looked_at_for_our_own_names():
    code = (
        "import sys; from crowdml.protocols import find, refusal; from crowdml.task import find_task\n"
        "for name in ('activity', 'gram-mnist', 'traffic'):\n"
        "    refusal(find_task(name))\n"
        "print('importlib.metadata' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


def test_a_task_that_is_not_pinned_is_simulated_and_hosted_by_nobody(tmp_path: Path):
    load_plugin(written(tmp_path, COPY))
    assert find(copied()).name == "copy"
    with pytest.raises(TaskError, match=r"protocol.plugin is missing. Start it with `crowdml task start`"):
        check_for_devices(copied())


# --- a task that asks for something else ---


def test_a_device_without_the_plugin_is_told_what_to_install():
    with pytest.raises(PluginError, match=r"'copy' needs the plug-in crowd-copy 1.2, .*`pip install crowd-copy==1.2`"):
        check_for_devices(copied(plugin="crowd-copy 1.2"))
    with pytest.raises(PluginError, match=r"needs the plug-in sha256:0{64}.*ask who runs the study.*--plugin FILE.py"):
        check_for_devices(copied(plugin=f"sha256:{'0' * 64}"))


def test_another_version_than_the_pinned_one_is_refused_with_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    installed(tmp_path, "crowd-copy", "1.2", ENTRY, COPY)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"made with the plug-in crowd-copy 1.1, and crowd-copy 1.2 is here.*==1.1`"):
        find(copied(plugin="crowd-copy 1.1"))


@pytest.mark.parametrize("pin", ["crowd-copy", "crowd-copy 1; rm", "x --index 1", "sha256:12", 3, "a\n1"])
def test_a_pin_that_could_not_stand_in_a_command_is_refused(pin: object):
    with pytest.raises(PluginError, match=r"protocol.plugin = .*: a distribution and its version"):
        find(copied(plugin=pin))


def test_a_pin_beside_one_of_ours_is_refused():
    with pytest.raises(PluginError, match=r"protocol.kind = 'sgd' comes with crowdml. Leave it out"):
        find(find_task("activity").with_(protocol={"plugin": "crowdml 1.0"}))


def test_an_unknown_protocol_without_a_pin_names_those_there_are(tmp_path: Path):
    load_plugin(written(tmp_path, COPY))
    wrong = copied().with_(protocol={"kind": "copie"})
    with pytest.raises(TaskError, match=r"choose one of admm, copy, gram, .* install the plug-in.*mean 'copy'"):
        find(wrong)


# --- what is wrong with a plug-in ---


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import nothing_like_this", r"copy.py cannot be imported \(copy.py, line 2\): ModuleNotFoundError: No module"),
        ("def f(:\n", r"cannot be imported \(line 2\): SyntaxError: invalid syntax\. Mend"),
        ("raise SystemExit(3)", r"cannot be imported \(copy.py, line 2\): SystemExit: 3"),
        ("x = 1", r"defines none of `protocol`, `model`, `feature_map`"),
        ("protocol = 3", r"`protocol` is a int, and has to be a crowdml Protocol"),
        ("model = int", r"`model` has to be a dataclass with a `kind`"),
        ("feature_map = 3", r"`feature_map` is a int, and has to be a crowdml MapKind"),
        ("def mechanisms(task):\n    return {'a': 1, 'b': 2, 'a': 3}", r"line 3, names the row 'a' twice"),
        ("class Said:\n    votes: int\n    votes: int", r"line 4, declares 'votes' of Said twice"),
        (
            "from crowdml.messages import message\nfrom crowdml.privacy.private import Private\n"
            "@message('x/1')\nclass Said:\n    votes: Private[int]",
            r"line \d+\): Said.votes is declared Private.*Declare it Release",
        ),
        (
            "from crowdml.messages import Public, message\n"
            "@message('sgd/gradient/1')\nclass Said:\n    version: Public[int]",
            r"the kind 'sgd/gradient/1', and crowdml's own begin so",
        ),
    ],
)
def test_a_file_that_is_no_plugin_is_refused_in_one_sentence_and_leaves_nothing(tmp_path: Path, code: str, words: str):
    kinds, modules = set(MESSAGES), {name for name in sys.modules if not name.startswith("crowdml.")}
    with pytest.raises(PluginError, match=words):
        load_plugin(written(tmp_path, "\n" + code))
    assert "crowdml_plugin" not in "".join(set(sys.modules) - modules)
    assert {kind for kind in MESSAGES if kind not in kinds and not kind.startswith("sgd/")} == set()
    assert not plugins.FILES


def test_a_public_field_with_a_private_value_in_it_is_refused_where_it_is_declared(tmp_path: Path):
    code = (
        "from crowdml.messages import Public, message\nfrom crowdml.privacy.private import Private\n"
        "@message('x/1')\nclass Said:\n    votes: Public[tuple[Private[int], ...]]"
    )
    with pytest.raises(PluginError, match=r"Said.votes is declared .*Declare it Release"):
        load_plugin(written(tmp_path, code))


def test_a_plugin_that_failed_can_be_tried_again(tmp_path: Path):
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        load_plugin(written(tmp_path, COPY + "\n1 / 0\n"))
    load_plugin(written(tmp_path, COPY))
    assert find(copied()).name == "copy"


def test_what_a_plugin_raises_on_a_device_is_told_without_its_words_for_they_may_hold_a_sample(tmp_path: Path):
    load_plugin(written(tmp_path, COPY + "\n\ndef look(x):\n    return {}[x]\n"))
    look = sys.modules[PROTOCOLS["copy"].mechanisms.__module__].look
    with (
        pytest.raises(PluginError) as told,
        plugins.blaming("it failed", "Nothing was sent.", alone=True, quotes=False),
    ):
        look(0.123)
    assert re.fullmatch(r"it failed \(copy.py, line \d+, in `look`\): KeyError. Nothing was sent.", str(told.value))
    assert told.value.__suppress_context__


def test_what_is_raised_without_a_plugin_is_not_blamed_on_one():
    with pytest.raises(KeyError), plugins.blaming("it failed", "", alone=True):
        raise KeyError(3)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(PluginError, match=r"--plugin .*none.py: No such file"):
        load_plugin(tmp_path / "none.py")


def test_a_name_of_ours_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(PluginError, match=r"calls its protocol 'sgd', and crowdml has one of that name"):
        load_plugin(written(tmp_path, COPY.replace('name="copy"', 'name="sgd"')))
    installed(tmp_path, "crowd-copy", "1.2", ENTRY.replace("copy =", "sgd ="), COPY)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"crowd-copy 1.2 has a protocol 'sgd', and so has crowdml itself"):
        check_plugins()


def test_a_name_of_another_plugin_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    load_plugin(written(tmp_path, COPY))
    with pytest.raises(PluginError, match=r"two.py calls its protocol 'copy', and so does .*copy.py"):
        load_plugin(written(tmp_path, COPY.replace("copy/params", "two/params"), "two.py"))
    PROTOCOLS._named.clear()
    installed(tmp_path, "crowd-copy", "1.2", ENTRY, COPY)
    installed(tmp_path, "other", "2.0", ENTRY.replace("crowd_copy", "other"), COPY)
    monkeypatch.syspath_prepend(tmp_path)
    vars(PROTOCOLS).pop("_installed", None)
    with pytest.raises(PluginError, match=r"has a protocol 'copy', and so has the plug-in .*Uninstall one of them"):
        find(copied())


def test_an_installed_plugin_that_fails_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed(tmp_path, "crowd-copy", "1.2", ENTRY, "\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = r"crowd-copy 1.2 cannot be imported \(crowd_copy.py, line 2\): ZeroDivisionError.*pip uninstall crowd-copy"
    with pytest.raises(PluginError, match=words):
        find(copied())


def test_an_entry_point_and_its_protocol_have_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed(tmp_path, "crowd-copy", "1.2", ENTRY.replace("copy =", "copie ="), COPY)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"lists a protocol 'copie', which calls itself 'copy'"):
        find(copied(kind="copie"))


# --- models and feature maps ---

MODEL = """
from dataclasses import dataclass
from typing import ClassVar, Annotated

from crowdml.models import Softmax
from crowdml.settings import Between


@dataclass(frozen=True)
class Halved(Softmax):
    kind: ClassVar[str] = "halved"
    dimension: int
    classes: int
    share: Annotated[float, Between(0, 1)] = 0.5

    def predict(self, weights, x):
        return super().predict(weights * self.share, x)


model = Halved
"""

MAP = """
from crowdml.features.maps import MapKind

feature_map = MapKind("doubled", lambda settings, dimension: dimension, lambda settings, dimension: lambda x: 2 * x,
                      random=False)
"""


def test_a_plugin_gives_a_model_with_settings_of_its_own(tmp_path: Path):
    load_plugin(written(tmp_path, MODEL))
    assert make_model("halved", 3, 4, share=0.25).shape == (3, 4)
    with pytest.raises(TaskError, match=r"model.share = 2.0: must lie between 0 and 1"):
        make_model("halved", 3, 4, share=2.0)
    with pytest.raises(TaskError, match=r"model.shar = 2.0: no such key. Did you mean 'share'"):
        make_model("halved", 3, 4, shar=2.0)
    task = settled(find_task("activity").with_(model={"kind": "halved"}))
    assert task.model["plugin"].startswith("sha256:")
    assert "plugin" not in task.protocol
    find(from_canonical(task.canonical))


def test_the_card_of_a_model_of_a_plugin_has_lines_that_ask_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("onnx")
    from crowdml.price import Epsilons
    from crowdml.server.export import Exported, model_file, onnx_file, snippet

    load_plugin(written(tmp_path, MODEL))
    task = settled(find_task("activity").with_(model={"kind": "halved", "share": 0.5}))
    weights = np.random.default_rng(1).normal(size=make_model("halved", 64, 3).shape).astype(np.float32)
    model = Exported(task, weights, 1, 8, 8, 1, paid=Epsilons(1.0, 5.5))
    (tmp_path / "m.safetensors").write_bytes(model_file(model))
    monkeypatch.chdir(tmp_path)
    said: dict[str, object] = {"print": lambda value: said.update(value=value)}
    exec(snippet(model, "m.safetensors"), said)
    assert list(said["value"]) == [task.labels.classes[0]]
    with pytest.raises(TaskError, match=r"a plug-in computes it, and it is not written as ONNX"):
        onnx_file(model)


def test_a_plugin_gives_a_feature_map_whose_rows_have_norm_one_at_most(tmp_path: Path):
    load_plugin(written(tmp_path, MAP))
    made = make_map(MapSettings("doubled"), 4)
    rows = made(np.eye(4, dtype=np.float32))
    assert rows.shape == (4, 5)
    assert (np.linalg.norm(rows, axis=1) <= 1).all()
    task = find_task("digits-gram")
    task = settled(task.with_(protocol={"map": {"kind": "doubled"}}))
    assert task.protocol["map"]["plugin"].startswith("sha256:")
    find(from_canonical(task.canonical))


# --- commands ---


def test_every_command_that_takes_a_task_takes_a_plugin():
    import click

    def walk(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
        if isinstance(command, click.Group):
            for word, inner in command.commands.items():
                yield from walk(inner, f"{name} {word}".strip())
        else:
            yield name, command

    unlike = {"demo": "its tasks are shipped", "invite": "it reads names alone", "task new": "it writes a shipped one"}
    for name, command in walk(cli, ""):
        options = {option for parameter in command.params for option in parameter.opts}
        takes = "--task" in options or name.startswith("task ") or name in ("simulate", "compare", "serve", "replay")
        assert ("--plugin" in options) == (takes and name not in unlike), name


def test_task_check_prices_a_plugins_task_and_prints_the_hash_with_its_pin(tmp_path: Path):
    file, task = written(tmp_path, COPY), tmp_path / "mine.toml"
    assert run("task", "new", str(task)).exit_code == 0
    task.write_text(task.read_text().replace('kind = "sgd"', 'kind = "copy"'))
    without = run("task", "check", str(task))
    assert without.exit_code == 1
    assert "protocol.kind = 'copy': choose one of" in without.output
    done = run("task", "check", str(task), "--plugin", str(file))
    assert done.exit_code == 0, done.output
    load_plugin(file)
    assert settled(find_task(str(task))).hash.hex() in done.output


def test_a_plugin_that_fails_ends_a_command_with_one_sentence(tmp_path: Path):
    done = run("task", "list", "--plugin", str(written(tmp_path, "1 / 0")))
    assert done.exit_code == 1
    assert done.output.count("\n") <= 2
    assert "ZeroDivisionError" in done.output
    assert "Traceback" not in done.output


def test_a_plugin_stays_unused_by_tasks_of_ours(tmp_path: Path):
    before = settled(find_task("activity")).hash
    load_plugin(written(tmp_path, COPY))
    load_plugin(written(tmp_path, MODEL, "model.py"))
    assert settled(find_task("activity")).hash == before
    assert make_model("softmax", 2, 2).predict(np.zeros((2, 2)), np.zeros((1, 2))).shape == (1,)
