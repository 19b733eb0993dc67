"""What no run of the code would show: who imports whom, who looks into a Private, where randomness comes from.

Everything is read from the source itself, with `ast`, so that it holds for code that no test calls.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import crowdml

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(crowdml.__file__).resolve().parent

BOTTOM = {"errors", "arrays", "records", "texts", "exact", "addresses", "lines", "pace"} | {
    "convolutions",
    "safetensors",
    "artefacts",
}
CORE = BOTTOM | {
    "settings",
    "privacy",
    "task",
    "messages",
    "robust",
    "channels",
    "plugins",
    "protocol",
    "turn",
    "price",
    "shape",
}
LIBRARY = CORE | {
    "models",
    "features",
    "datasets",
    "secagg",
    "buffer",
    "wire",
    "storage",
    "rooted",
    "second_moments",
    "protocols",
    "attacks",
    "suggest",
    "verdict",
}
SHELLS = {"device", "server", "sim"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "records": set(),
    "texts": set(),
    "exact": set(),
    "pace": set(),  # what server, devices and simulator agree on
    "lines": {"errors", "texts"},
    "convolutions": {"arrays"},
    "safetensors": {"errors"},
    "artefacts": {"errors"},
    "addresses": {"errors", "records"},
    "arrays": {"errors"},
    "settings": BOTTOM,
    "plugins": BOTTOM | {"messages"},  # to take back the messages of one that fails
    "models": BOTTOM | {"settings", "plugins"},
    "features": BOTTOM | {"plugins"},
    "datasets": BOTTOM | {"features"},
    "task": BOTTOM | {"settings"},
    "shape": BOTTOM | {"task"},
    "verdict": BOTTOM,
    "suggest": CORE | {"protocols"},
    "attacks": CORE | {"protocols"},
    "privacy": BOTTOM | {"task"},  # rows have the task's noise
    "messages": BOTTOM | {"privacy"},
    "robust": BOTTOM | {"settings"},
    "ratings": BOTTOM,
    "channels": BOTTOM | {"settings", "privacy", "task", "messages", "robust", "features", "ratings"},
    "protocol": BOTTOM | {"settings", "privacy", "task", "shape", "messages", "channels", "models"},
    "turn": BOTTOM | {"privacy", "task", "messages", "channels", "protocol"},
    "plugin": CORE | {"models", "features"},  # what authors of plug-ins import
    "price": BOTTOM | {"privacy", "task", "protocol"},
    "secagg": CORE | {"wire"},  # signed keys and strict packing
    "buffer": CORE,
    "wire": CORE,
    "storage": CORE | {"wire"},  # the server's journal keeps what was signed
    "rooted": BOTTOM | {"models", "privacy", "robust"},
    "second_moments": CORE | {"models", "features", "rooted"},
    "protocols": CORE | {"models", "features", "second_moments"},
    "device": LIBRARY,
    "server": LIBRARY,
    "sim": LIBRARY,
    "experiments": LIBRARY | SHELLS | {"crowdml", "demo"},  # the demo's server and fleet, for a live figure
    "bench": LIBRARY | SHELLS | {"crowdml"},
    "demo": LIBRARY | SHELLS,
    "cli": LIBRARY | SHELLS | {"experiments", "bench", "demo", "crowdml"},
    "__main__": {"cli"},  # `python -m crowdml`
    "crowdml": {
        "errors",
        "sim",
        "task",
        "protocols",
    },  # the package itself: `crowdml.Crowd`, found when it is asked for
}
"""Each piece of the library, and what it may import besides itself. Imports point one way: no cycle can hide here."""

WITH_JAX = {"sim", "experiments", "bench"}
HEAVY = {"jax", "scipy", "sklearn", "matplotlib", "dp_accounting", "mpmath", "opendp", "pandas", "pyarrow", "torch"}

MAY_OPEN_PRIVATE = {"privacy/private.py", "privacy/door.py", "sim/pytrees.py"}
MAY_MAKE_RELEASES = {"privacy/private.py", "privacy/door.py", "messages.py", "sim/pytrees.py"}
MAY_OPEN_MASKED = {"privacy/private.py", "messages.py", "sim/pytrees.py"}
MAY_MAKE_MASKED = {"privacy/private.py", "privacy/door.py", "sim/pytrees.py"}
THE_CHANNEL = {
    "device/runner.py",
    "sim/compiled.py",
    "experiments/published/stragglers.py",
    "messages.py",
    "sim/studies.py",
}
"""Who takes the integers out of what leaves under masks: to put masks on them; the simulator leaves those out."""

BY_CHANCE = {"datasets", "sim", "experiments", "bench", "demo", "cli"}
"""Where something may be drawn from a seed; a seed that its caller names."""

ANSWERS = {
    "law",
    "reach",
    "clip",
    "clipped",
    "whole",
    "alone",
    "device_alone",
    "levels",
    "scale",
    "sigma",
    "rho",
    "honest",
}
"""What people once looked for in some rows, and all rows answer now (or their laws)."""

SOURCES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

MACHINE_PATH = re.compile(r"(?<![\w.:~/}-])/(?:work|home|root|Users|mnt|srv|opt|tmp|workspace)/\w|\b[A-Z]:\\\\?\w")
REGISTRY_HOST = re.compile(  # brackets keep these lines from finding themselves
    r"(?i)\b(?:index-ur[l]|find-link[s]|trusted-hos[t]|registr[y]\.[a-z]+\.[a-z]|files\.pythonhoste[d]|pypi\.or[g]/simple"
    r"|artifactor[y]|[a-z0-9-]+\.pkg\.de[v]|nexu[s]\.[a-z]+\.[a-z])|@\s+file:/"
)


@cache
def tree(source: str) -> ast.Module:
    return ast.parse((PACKAGE / source).read_text(encoding="utf-8"), source)


def piece(source: str) -> str:
    """The part of the layout that a file belongs to: 'privacy', 'messages', or 'crowdml' for the package itself."""
    first = source.split("/")[0].removesuffix(".py")
    return "crowdml" if first == "__init__" else first


@cache
def imports(source: str) -> tuple[tuple[str, int, bool], ...]:
    """Every module that a file imports, the line, and whether that waits in a function or for a type checker."""

    def visit(node: ast.AST, waits: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield name.name, child.lineno, waits
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{source}:{child.lineno} imports relative to itself; name the module in full."
                assert child.module is not None
                for name in child.names:
                    yield f"{child.module}.{name.name}", child.lineno, waits
            else:
                later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                typing = isinstance(child, ast.If) and ast.unparse(child.test) in (
                    "TYPE_CHECKING",
                    "typing.TYPE_CHECKING",
                )
                yield from visit(child, waits or later or typing)

    return tuple(visit(tree(source), False))


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(source)))


def target(module: str) -> str | None:
    """The piece of our own library that an import names; None for somebody else's."""
    head, _, rest = module.partition(".")
    if head != "crowdml" or rest == "__version__":
        return None
    first = rest.split(".")[0]
    return first if first in MAY_IMPORT else "crowdml"


def dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def of_every_source(check: Callable[[str], None]) -> Callable[[], None]:
    """One test for all files, which fails with every file that breaks the rule."""

    def test() -> None:
        found: list[str] = []
        for source in SOURCES:
            try:
                check(source)
            except AssertionError as error:
                found.append(str(error))
        assert not found, "\n".join(found)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def test_every_file_has_a_place_in_the_layout():
    strangers = {piece(source) for source in SOURCES} - set(MAY_IMPORT)
    assert not strangers, f"Not in the layout of the library: {sorted(strangers)}. Give each a row in MAY_IMPORT."


def test_the_table_of_imports_has_no_cycle():
    left = {name: set(allowed) - {"crowdml"} for name, allowed in MAY_IMPORT.items() if name != "crowdml"}
    while left:
        done = {name for name, allowed in left.items() if not allowed & set(left)}
        assert done, f"These may import one another in a circle: {sorted(left)}."
        left = {name: allowed for name, allowed in left.items() if name not in done}


@of_every_source
def test_imports_point_one_way(source: str):
    here = piece(source)
    for module, line, _ in imports(source):
        there = target(module)
        assert there is None or there == here or there in MAY_IMPORT[here], (
            f"src/crowdml/{source}:{line} imports {module}: {here} may import {sorted(MAY_IMPORT[here])}."
        )


def test_device_server_and_simulator_never_import_one_another():
    for shell in SHELLS:
        assert not MAY_IMPORT[shell] & (SHELLS | {"experiments", "bench", "cli"})


def test_no_protocol_imports_another():
    for source in SOURCES:
        if source.startswith("protocols/") and source != "protocols/__init__.py":
            found = {module for module, _, _ in imports(source) if module.startswith("crowdml.protocols")}
            assert not found, f"src/crowdml/{source} imports {found}: what two protocols share belongs below them."


@of_every_source
def test_jax_is_imported_by_the_simulator_alone(source: str):
    if piece(source) in WITH_JAX:
        return
    for module, line, _ in imports(source):
        assert module.split(".")[0] != "jax", f"src/crowdml/{source}:{line} imports {module}: devices have no JAX."


@of_every_source
def test_heavy_libraries_are_imported_where_they_are_needed_and_not_before(source: str):
    if piece(source) in WITH_JAX:
        return
    for module, line, waits in imports(source):
        assert waits or module.split(".")[0] not in HEAVY, (
            f"src/crowdml/{source}:{line} imports {module} at once: import it in the function that needs it."
        )


@of_every_source
def test_only_the_door_looks_into_a_private_value(source: str):
    if source in MAY_OPEN_PRIVATE:
        return
    for node in nodes(source):
        named = isinstance(node, ast.Attribute) and node.attr in ("_value", "_Private__value")
        spelt = isinstance(node, ast.Constant) and node.value == "_value"
        opened = named or spelt
        line = getattr(node, "lineno", 0)
        assert not opened, f"src/crowdml/{source}:{line} names _value: compute with `map`, let out by the door."


def test_those_who_may_look_into_a_private_value_still_do():
    for source in MAY_OPEN_PRIVATE:
        assert any(isinstance(node, ast.Attribute) and node.attr == "_value" for node in nodes(source)), source


@cache
def mechanisms() -> set[str]:
    """The names of all classes of mechanisms."""
    homes = [source for source in SOURCES if re.match(r"privacy/(mechanisms|moments)\b", source)]
    found = {node.name for home in homes for node in ast.walk(tree(home)) if isinstance(node, ast.ClassDef)}
    assert {"Mechanism", "GridLaplace", "Scheduled", "SkellamGram"} <= found
    return found


@of_every_source
def test_outside_privacy_nobody_asks_which_kind_of_mechanism_a_row_is(source: str):
    """Every row answers the same questions (`Mechanism`), so a new kind needs no other file."""
    if source.startswith("privacy/"):
        return
    for node in nodes(source):
        asked = []
        if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass"):
            asked = [dotted(part).split(".")[-1] for part in ast.walk(node.args[-1])]
        elif isinstance(node, ast.MatchClass):
            asked = [dotted(node.cls).split(".")[-1]]
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node.left):
            asked = [dotted(part).split(".")[-1] for each in node.comparators for part in ast.walk(each)]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            asked = [name.value] if isinstance(name, ast.Constant) and name.value in ANSWERS else []
            assert not asked, f"src/crowdml/{source}:{node.lineno} looks for {asked[0]!r} in a row: all rows have it."
        found = mechanisms() & set(asked)
        line = getattr(node, "lineno", 0)
        assert not found, f"src/crowdml/{source}:{line} asks for {sorted(found)}: ask the row what it needs to know."


@of_every_source
def test_only_the_door_the_codec_and_the_pytrees_make_releases(source: str):
    if source in MAY_MAKE_RELEASES:
        return
    for node in nodes(source):
        made = isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "Release"
        assert not made, f"src/crowdml/{source}:{getattr(node, 'lineno', 0)} makes a Release: only the door may."


@of_every_source
def test_only_the_channel_looks_into_a_masked_value(source: str):
    for node in nodes(source):
        where = f"src/crowdml/{source}:{getattr(node, 'lineno', 0)}"
        named = isinstance(node, ast.Attribute) and node.attr == "_summand"
        spelt = isinstance(node, ast.Constant) and node.value == "_summand"
        assert source in MAY_OPEN_MASKED or not (named or spelt), (
            f"{where} names _summand: it leaves under masks alone."
        )
        asked = isinstance(node, ast.Name) and node.id == "masked_steps"
        assert source in THE_CHANNEL or not asked, f"{where} opens what leaves under masks: only the channel may."


@of_every_source
def test_only_the_door_and_the_pytrees_make_masked_values(source: str):
    knows = any(module == "crowdml.privacy.private.Masked" for module, _, _ in imports(source))
    for node in nodes(source):
        made = isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "Masked"
        assert source in MAY_MAKE_MASKED or not (knows and made), (
            f"src/crowdml/{source}:{getattr(node, 'lineno', 0)} makes a Masked value: only the door may."
        )


def test_those_who_may_look_into_a_masked_value_still_do():
    for source in MAY_OPEN_MASKED:
        assert any(isinstance(node, ast.Attribute) and node.attr == "_summand" for node in nodes(source)), source
    for source in THE_CHANNEL - {"experiments/published/stragglers.py"}:
        assert any(isinstance(node, ast.Name) and node.id == "masked_steps" for node in nodes(source)), source


@of_every_source
def test_randomness_is_an_argument(source: str):
    """No module `random`, no hidden state of NumPy's, and a generator only from a seed that somebody passed in."""
    for module, line, _ in imports(source):
        assert module.split(".")[0] != "random", f"src/crowdml/{source}:{line} imports random: noise has an owner."
        assert not module.startswith(("numpy.random", "jax.random")), (
            f"src/crowdml/{source}:{line} imports {module}: write np.random.default_rng(seed) where it is used."
        )
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and dotted(node.value) in ("np.random", "numpy.random"):
            assert node.attr in ("default_rng", "Generator", "SeedSequence"), (
                f"src/crowdml/{source}:{node.lineno} uses np.random.{node.attr}: it draws from a state that all share."
            )
            assert piece(source) in BY_CHANCE, (
                f"src/crowdml/{source}:{node.lineno}: devices draw from SystemSource alone."
            )
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in (
            "default_rng",
            "SeedSequence",
            "PRNGKey",
        ):
            given = [*node.args, *(word.value for word in node.keywords)]
            named = given and not (isinstance(given[0], ast.Constant) and given[0].value is None)
            assert named, (
                f"src/crowdml/{source}:{node.lineno} makes a generator without a seed: take one as an argument."
            )


@of_every_source
def test_nothing_on_a_device_has_a_default_seed(source: str):
    if piece(source) in {"datasets", "sim", "experiments", "bench"}:
        return
    for node in nodes(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            arguments = node.args
            plain = [*arguments.posonlyargs, *arguments.args]
            defaults = [*zip(plain[len(plain) - len(arguments.defaults) :], arguments.defaults, strict=True)]
            defaults += [pair for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if pair[1]]
            for argument, value in defaults:
                fixed = "seed" in argument.arg and not (isinstance(value, ast.Constant) and value.value is None)
                assert not fixed, (
                    f"src/crowdml/{source}:{node.lineno}: {argument.arg} has a default; known noise is no noise."
                )
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "seed" in node.target.id:
            empty = node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None)
            assert empty, (
                f"src/crowdml/{source}:{node.lineno}: {node.target.id} has a default; known noise is no noise."
            )


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of every docstring: of modules, classes, functions, and of what is assigned."""
    for node in nodes(source):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.lineno, each.value.value.strip()


def test_docstrings_have_their_noun_in_them():
    """One that begins with "Of" or "The same" makes no sense alone, in an editor's tooltip."""
    found = [
        f"src/crowdml/{source}:{line}: {text.splitlines()[0]}"
        for source in SOURCES
        for line, text in docstrings(source)
        if re.match(r"(Of|The same|That|Who|Whose|Whom)\b", text)
    ]
    assert len(found) <= 20, "Write each as a sentence, or a noun phrase that makes sense alone:\n" + "\n".join(found)


def test_no_sql_numbers_its_placeholders():
    """`?1` with a sequence of values is an error from Python 3.14 on: SQL says `?`, or a name."""
    asks = [source for source in SOURCES if source.startswith("storage/")]
    assert "storage/device/ledger.py" in asks
    assert [source for source in asks if re.search(r"\?\d", (PACKAGE / source).read_text(encoding="utf-8"))] == []


def test_every_module_has_a_name_of_its_own():
    nameless = {"utils.py", "util.py", "common.py", "helpers.py", "helper.py", "base.py", "misc.py"}
    found = [source for source in SOURCES if source.split("/")[-1] in nameless]
    assert not found, f"{found}: a thing without a home does not have its name yet."


def test_no_two_files_of_tests_have_one_name():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    twice = [name for name, times in names.items() if times > 1]
    assert not twice, f"{twice}: pytest imports one of them and fails at the other. Give each a name of its own."


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: there is no list of tracked files")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_path_of_one_machine_or_a_package_registry():
    found: list[str] = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" in data:
            continue  # a picture, an archive
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def imported_by(statement: str) -> set[str]:
    """The heavy libraries that a new interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_package_and_the_device_side_import_no_heavy_library():
    elsewhere = ("cli/", "server/", "storage/server/", *(f"{name}/" for name in WITH_JAX))
    device_side = [source for source in SOURCES if not source.startswith(elsewhere)]
    names = [
        f"crowdml.{source.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__") for source in device_side
    ]
    assert {"crowdml", "crowdml.protocols.sgd", "crowdml.storage.device.ledger", "crowdml.models.make"} <= set(names)
    assert imported_by("import " + ", ".join(sorted(names))) == set()


def test_asking_the_command_line_for_help_imports_no_heavy_library():
    assert imported_by("import crowdml.cli") == set()
