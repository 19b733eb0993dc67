"""Records: dataclasses, frozen unless they say otherwise, whose methods are made when the first one is.

`dataclass` compiles six methods a class as soon as the class is read. A device reads some ninety classes at its start
and makes objects of half of them; writing the methods took it longer than all the rest of its import (`crowdml bench
device`). So this waits. To readers, type checkers and `dataclasses.fields` a record is a dataclass.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")

FIELDS = "__dataclass_fields__"
_one_at_a_time = threading.RLock()


class _Later:
    """Stands where `dataclasses` looks for the fields, until somebody looks."""

    def __init__(self, cls: type[Any], options: dict[str, bool]) -> None:
        self.cls, self.options = cls, options

    def __get__(self, _: Any, owner: type[Any]) -> Any:
        _make(self.cls)
        return getattr(self.cls, FIELDS)


@overload
def record(cls: type[T], /) -> type[T]: ...


@overload
def record(*, frozen: bool = True, eq: bool = True) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T] | None = None, /, *, frozen: bool = True, eq: bool = True) -> Any:
    """A dataclass, completed at its first use."""

    def wait(cls: type[T]) -> type[T]:
        def __init__(self: Any, *values: Any, **named: Any) -> None:  # noqa: N807  stands in for the one to be made
            _make(cls)
            self.__init__(*values, **named)

        cls.__init__ = __init__
        setattr(cls, FIELDS, _Later(cls, {"frozen": frozen, "eq": eq}))
        return cls

    return wait if cls is None else wait(cls)


def _make(cls: type[Any]) -> None:
    """Complete a record. The stand-in goes last, and in one piece, so that another thread finds it or the real one."""
    with _one_at_a_time:
        later = vars(cls).get(FIELDS)
        if isinstance(later, _Later):
            delattr(cls, FIELDS)
            dataclasses.dataclass(init=False, **later.options)(cls)
            heir = type(cls.__name__, (cls,), {"__module__": cls.__module__})
            options = {**later.options, "eq": False}
            cls.__init__ = dataclasses.dataclass(repr=False, **options)(heir).__init__
