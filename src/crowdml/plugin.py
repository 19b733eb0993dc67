"""Everything that a protocol, a model or a feature map of your own imports: `from crowdml import plugin as cm`.

The names here are the public surface for authors of plug-ins (docs/python.md). They change with a line in the
changelog; the rest of the package changes freely. docs/write-a-protocol.md writes a protocol with them.
"""

from __future__ import annotations

from crowdml.arrays import Array, Integers, Samples, fold, namespace, struct
from crowdml.channels import (
    NUMBER,
    Channel,
    Field,
    Gathering,
    Uploads,
    combined,
    contribution,
    fields_heard,
    heard_by,
    let_out,
)
from crowdml.errors import TaskError
from crowdml.features.maps import MapKind, MapSettings
from crowdml.messages import SERVER, Public, message
from crowdml.models import Model, Norm
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.private import Private, Release, Rows
from crowdml.privacy.rows import count_row, noise_norm, pin_grid, stable_row, sum_row
from crowdml.protocol import (
    CheckOut,
    Context,
    Gathered,
    Protocol,
    Publish,
    Role,
    Rule,
    Send,
    Sensed,
    Step,
    Stop,
    Tally,
    Wake,
    Woken,
    check_out,
    device_role,
    model_of,
    settings_of,
    stop_after,
    wait,
)
from crowdml.robust import Combine
from crowdml.settings import Between, OneOf, Positive
from crowdml.shape import Shape
from crowdml.task import Task

__all__ = [
    "NUMBER", "SERVER", "Array", "Between", "Channel", "CheckOut", "Combine", "Context", "Field", "Gathered",
    "Gathering", "Integers", "MapKind", "MapSettings", "Mechanism", "Model", "Norm", "OneOf", "Positive", "Private",
    "Protocol", "Public", "Publish", "Release", "Role", "Rows", "Rule", "Samples", "Send", "Sensed", "Shape",
    "Step", "Stop", "Tally", "Task", "TaskError", "Uploads", "Wake", "Woken", "check_out", "combined",
    "contribution", "count_row", "device_role", "fields_heard", "fold", "heard_by", "let_out", "message",
    "model_of", "namespace", "noise_norm", "pin_grid", "settings_of", "stable_row", "stop_after", "struct",
    "sum_row", "wait",
]  # fmt: skip
