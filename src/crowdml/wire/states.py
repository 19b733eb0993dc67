"""A role's state as bytes, between two of its steps: the arrays of a struct, in the codec of messages.

What is private has no bytes: a state that holds a batch is not written. Whoever reads one back knows what it looks
like, for the task says so; nothing in the bytes decides a type or a shape.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np

from crowdml.errors import ProtocolError
from crowdml.messages import encode


def pack_state(state: Any) -> bytes:
    """A struct of arrays, numbers and None."""
    for entry in dataclasses.fields(state):
        value = getattr(state, entry.name)
        if value is not None and np.asarray(value).dtype.kind not in "biuf":
            raise ProtocolError(
                f"{type(state).__name__}.{entry.name} holds a {type(value).__name__}, and between two steps arrays of "
                "numbers are kept, and nothing else. Nothing was sent. Let the handler end its turn without it."
            )
    return encode(state)


def unpack_state(like: Any, data: bytes) -> Any:
    """The state behind the bytes, in the types and shapes of `like`."""
    fields = msgpack.unpackb(data)
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(like):
        model, plain = getattr(like, entry.name), fields[entry.name]
        if model is None or plain is None:
            found[entry.name] = None
            continue
        model = np.asarray(model)
        array = np.frombuffer(plain[2], np.dtype(plain[0])) if isinstance(plain, list) else np.asarray(plain)
        value = array.astype(model.dtype).reshape(model.shape)
        found[entry.name] = value if model.ndim else value[()]
    return type(like)(**found)
