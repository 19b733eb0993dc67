"""Plug-ins: protocols, models and feature maps that others wrote, under the names by which task files ask for them.

Code never travels. A plug-in is installed with pip, where its entry point is found, or named with `--plugin FILE.py`. A
published task pins it: `plugin = "NAME VERSION"` of the distribution, or `plugin = "sha256:..."` of the file. A server
or a device with anything else refuses the task, and says what to install.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from crowdml.errors import CrowdmlError, PluginError
from crowdml.records import record

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")

PIN = re.compile(r"[a-z0-9][a-z0-9.-]{0,99} [0-9][A-Za-z0-9.!+-]{0,99}|sha256:[0-9a-f]{64}")
"""What a task may pin: it stands in a command that an owner is told to run, so it holds no other character."""

FILES: list[Path] = []
"""The files that `--plugin` named, in order."""
PACKAGES: set[str] = set()
"""The packages, or modules, of all plug-ins that were imported: errors are told by them."""


def options() -> list[str]:
    """Options that give these plug-ins to a command that this one starts."""
    return [word for path in FILES for word in ("--plugin", str(path))]


@record
class Plugin(Generic[T]):
    """Something that does not come with crowdml, and where it came from."""

    value: T
    pin: str
    """What a task pins: "crowdml-votes 1.2", or "sha256:" and the file's digest."""
    where: str
    """The distribution or the file, for errors."""


class Registry(Mapping[str, T]):
    """Everything of one sort that a task may name: ours, then files named with `--plugin`, then what is installed.

    Ours are imported when they are asked for, and entry points are looked at for other names alone: a device needs one
    protocol, and starts faster without the rest.
    """

    def __init__(
        self,
        noun: str,
        group: str,
        ours: Mapping[str, Callable[[], T]],
        accept: Callable[[Any, str], tuple[str, T]],
        reserved: tuple[str, ...] = (),
    ) -> None:
        self.noun, self.group, self.ours = noun, group, ours
        self._taken = {*ours, *reserved}
        self._accept = accept
        self._named: dict[str, Plugin[T]] = {}
        self._loaded: dict[str, Plugin[T]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self.ours, *self._named, *self._installed}))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self.ours or name in self._named or name in self._installed

    def __getitem__(self, name: str) -> T:
        if name in self.ours:
            return self.ours[name]()
        found = self.plugin(name)
        if found is None:
            raise KeyError(name)
        return found.value

    def plugin(self, name: str) -> Plugin[T] | None:
        """The plug-in of this name, imported; None where the name is ours, or nobody's."""
        if name in self._taken:
            return None
        if name not in self._named and name not in self._loaded and name in self._installed:
            self._loaded[name] = self._load(self._installed[name])
        return self._named.get(name) or self._loaded.get(name)

    def admit(self, value: Any, pin: str, where: str) -> tuple[str, Plugin[T]]:
        """A plug-in from a file, under its own name. A name that is taken is refused."""
        name, accepted = self._accept(value, where)
        if name in self._taken:
            raise PluginError(
                f"{where} calls its {self.noun} {name!r}, and crowdml has one of that name. Give it another name."
            )
        if name in self._named or name in self._installed:
            other = self._named[name].where if name in self._named else _said(self._installed[name])
            raise PluginError(
                f"{where} calls its {self.noun} {name!r}, and so does {other}. Give it another name, or use only one."
            )
        return name, Plugin(accepted, pin, where)

    def add(self, name: str, found: Plugin[T]) -> None:
        """Take what was admitted."""
        self._named[name] = found

    def pinned(self, table: Mapping[str, Any], where: str) -> T | None:
        """What a table of a task names by its `kind`: ours, or the plug-in that it pins; None where nothing has that
        name and nothing is pinned. A task that is not published yet pins nothing, and takes what is here.
        """
        kind, pin = str(table["kind"]), table.get("plugin")
        if pin is None:
            return self.get(kind)
        if not isinstance(pin, str) or not PIN.fullmatch(pin):
            raise PluginError(
                f'{where}.plugin = {pin!r}: a distribution and its version, such as "crowdml-votes 1.2", or "sha256:" '
                "and the digest of a file. Leave it out: `crowdml task start` writes it."
            )
        if kind in self._taken:
            raise PluginError(f"{where}.plugin = {pin!r}: {where}.kind = {kind!r} comes with crowdml. Leave it out.")
        found = self.plugin(kind)
        if found is None:
            raise PluginError(
                f"{where}.kind = {kind!r} needs the plug-in {pin}, which is not here. No server sends code: {_get(pin)}"
            )
        if found.pin != pin:
            raise PluginError(
                f"{where}.kind = {kind!r}: this task was made with the plug-in {pin}, and {found.pin} is here. Server "
                f"and devices must run the same code: {_get(pin)}"
            )
        return found.value

    def pin(self, table: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table with the plug-in that it names written in. Ours are not pinned, so that their hashes stand."""
        found = None if "kind" not in table else self.plugin(str(table["kind"]))
        return table if found is None or table.get("plugin") == found.pin else {**table, "plugin": found.pin}

    def check(self) -> None:
        """Refuse an installed plug-in whose name is taken, also where nobody asks for it."""
        _ = self._installed

    @cached_property
    def _installed(self) -> Mapping[str, EntryPoint]:
        """The entry points of this group by name, one each."""
        from importlib.metadata import entry_points  # slow, and few ask

        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self.group):
            other = found.setdefault(entry.name, entry)
            if entry.name in self._taken or _pin(other) != _pin(entry):
                owner = "crowdml itself" if entry.name in self._taken else _said(other)
                raise PluginError(
                    f"{_said(entry)} has a {self.noun} {entry.name!r}, and so has {owner}. Uninstall one of them: "
                    f"`pip uninstall {_pin(entry).split(' ')[0]}`."
                )
        return found

    def _load(self, entry: EntryPoint) -> Plugin[T]:
        where = _said(entry)
        advice = f"Ask its authors, or run `pip uninstall {_pin(entry).split(' ')[0]}`."
        with _importing(entry.module.split(".")[0], where, advice):
            value = entry.load()
            source = sys.modules[entry.module].__file__
            if source is not None:
                refuse_repeated(Path(source).read_bytes(), where)
            name, accepted = self._accept(value, where)
            if name != entry.name:
                raise PluginError(
                    f"{where} lists a {self.noun} {entry.name!r}, which calls itself {name!r}. Ask its authors."
                )
            return Plugin(accepted, _pin(entry), where)


def _pin(entry: EntryPoint) -> str:
    """The distribution of an entry point and its version, its name in the one form that package indexes use."""
    if entry.dist is None:
        raise PluginError(f"the entry point {entry.name!r} belongs to no installed distribution. Install it with pip.")
    return f"{re.sub(r'[-_.]+', '-', entry.dist.name).lower()} {entry.dist.version}"


def _said(entry: EntryPoint) -> str:
    return f"the plug-in {_pin(entry)}"


def _get(pin: str) -> str:
    """What an owner or an operator does about a plug-in that is not here."""
    if pin.startswith("sha256:"):
        return "ask who runs the study for that file, read it, and name it with --plugin FILE.py."
    name, version = pin.split(" ")
    return f"if you trust who wrote it, run `pip install {name}=={version}`."


def load_file(path: Path | str, registries: Mapping[str, Registry[Any]]) -> None:
    """Run a plug-in's file, and take what it defines under the names of `registries`: all of it, or nothing."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PluginError(f"--plugin {path}: {error.strerror or error}. Name a Python file.") from error
    digest = hashlib.sha256(data).hexdigest()
    module = ModuleType(f"crowdml_plugin_{digest[:16]}")
    if module.__name__ in sys.modules:
        return
    module.__file__ = str(path)
    with _importing(module.__name__, str(path), "Mend the file and try again."):
        refuse_repeated(data, str(path))
        refuse_siblings(data, path)
        sys.modules[module.__name__] = module  # where its dataclasses and messages look up their types
        exec(compile(data, str(path), "exec", dont_inherit=True), module.__dict__)
        found = {name: getattr(module, name) for name in registries if hasattr(module, name)}
        if not found:
            raise PluginError(f"{path} defines none of {', '.join(f'`{name}`' for name in registries)}. Define one.")
        admitted = [(registries[name], *registries[name].admit(value, f"sha256:{digest}", str(path)))
                    for name, value in found.items()]  # fmt: skip
    for registry, name, plugin in admitted:
        registry.add(name, plugin)
    FILES.append(path.resolve())


@contextmanager
def _importing(package: str, where: str, advice: str) -> Generator[None]:
    """Turn whatever a plug-in raises while it is imported into one sentence, and leave nothing of it behind."""
    from crowdml.messages import KINDS, forget

    PACKAGES.add(package)
    try:
        yield
    except (Exception, SystemExit) as error:
        for name in [each for each in sys.modules if each.split(".")[0] == package]:
            del sys.modules[name]  # what was half imported; a second try starts afresh
        forget([kind for kind, cls in KINDS.items() if cls.__module__.split(".")[0] == package])
        if isinstance(error, PluginError):
            raise
        raise PluginError(f"{where} cannot be imported{failed_at(error)}: {explained(error)}. {advice}") from error


@contextmanager
def blaming(
    what: str, advice: str, *, alone: bool = False, kept: Any = CrowdmlError, quotes: bool = True
) -> Generator[None]:
    """Turn what a plug-in raises into one sentence with its file, line and function: `what` failed, and `advice`.

    Errors of the type `kept` have a sentence already. `alone`: only if a line of a plug-in had a part in it; what is
    raised elsewhere is a bug of ours. Without `quotes` the error's own words are left out, for they may hold a sample.
    """
    try:
        yield
    except kept:
        raise
    except Exception as error:
        place = failed_at(error)
        if alone and not place:
            raise
        said = explained(error) if quotes else type(error).__name__
        raise PluginError(f"{what}{place}: {said}. {advice}") from (error if quotes else None)


def explained(error: BaseException) -> str:
    """What went wrong, in the first line of its own words, and its type where that is not ours."""
    kind = "" if isinstance(error, CrowdmlError) else f"{type(error).__name__}: "
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip()
    advice = "A handler changes nothing in place: it returns a new state" if "is read-only" in text else ""
    if type(error).__module__.startswith("jax"):
        advice = "Branch on no value (`where`), or say traced=False in the Protocol"
    return f"{kind}{text.partition(chr(10))[0].rstrip('.')}. {advice}".rstrip(" :.")


def failed_at(error: BaseException) -> str:
    """Where a plug-in failed: the last line of its own, and its function. Empty where none had a part in it."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f" (line {error.lineno})"
    frames = [(frame.f_globals.get("__name__", ""), frame.f_code, line)
              for frame, line in traceback.walk_tb(error.__traceback__)]  # fmt: skip
    own = [(code, line) for module, code, line in frames if module.split(".")[0] in PACKAGES]
    if not own:
        return ""
    code, line = own[-1]
    inside = {"<module>": "", "<lambda>": ", in a lambda"}.get(code.co_name, f", in `{code.co_name}`")
    return f" ({Path(code.co_filename).name}, line {line}{inside})"


def refuse_repeated(source: bytes, where: str) -> None:
    """Refuse a plug-in that declares a row or a field twice: Python keeps the last one and says nothing."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            names = [(key.value, key.lineno) for key in node.keys if isinstance(key, ast.Constant)]
            what = "names the row {!r} twice"
        elif isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            names = [(each.target.id, each.lineno) for each in fields if isinstance(each.target, ast.Name)]
            what = f"declares {{!r}} of {node.name} twice"
        else:
            continue
        seen: set[Any] = set()
        for name, line in names:
            if name in seen:
                raise PluginError(f"{where}, line {line}, {what.format(name)}. Leave one of them out.")
            seen.add(name)


def refuse_siblings(source: bytes, path: Path) -> None:
    """Refuse a file that imports another one of its folder: its digest would pin the one, and not the other."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        from_module = isinstance(node, ast.ImportFrom)
        for name in ["." * node.level + (node.module or "")] if from_module else [each.name for each in node.names]:
            first = name.split(".")[0]
            near = path.with_name(f"{first}.py"), path.parent / first / "__init__.py"
            if not first or (first != "crowdml" and any(each.is_file() for each in near)):
                raise PluginError(
                    f"{path}, line {node.lineno}, imports {name!r} from its own folder, and --plugin pins one file. "
                    "Put both into one file, or make a package with an entry point."
                )
