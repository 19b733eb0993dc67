"""SecProbe: rounds of uploads, of which the server takes those that do well on rows of its own.

Zhao et al., Algorithms 1 to 3, in the forms that have a guarantee (privacy review, section 4). A device
releases once, of public features and labels, the noisy second moments (SP-A) or the noisy coefficients of its loss
(SP-C, the functional mechanism, where `privacy.mechanism = "discrete-laplace"`). Whoever has them solves for weights as
often as they like, which is post-processing: that is all of the paper's local training. The server gathers M uploads,
combines them by the rule of `protocol.combine`, adds what comes of it to the rounds before, and publishes the weights
that all of it gives. With `rule = "exponential"` it rates each upload on private rows of its own and draws K of M by
the exponential mechanism, through its own door: charged to these rows, journalled, and not drawn again in a replay.

Where we differ, and why:
- Hidden layers are fixed and public (`protocol.map`). Trained on the perturbed loss, as published, they leak x (Z1).
- Noise is drawn once for all samples of a batch, and each sample is in one. Published budgets are per epoch (Z3).
- The exponential mechanism hides a row of the server's, at 1/d: uploads are releases, so it costs no sample anything,
  and it hides no participant's quality, which the average shows anyway (Z7, Z8). `top` on public rows needs no noise.
- A device leaves when it likes, and not when its own error is small: the number of its messages would tell (R3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

from crowdml.arrays import Array, Integers
from crowdml.channels import contribution, heard_by
from crowdml.errors import TaskError
from crowdml.features.maps import MapSettings
from crowdml.messages import Public, message
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.private import Release
from crowdml.protocol import Protocol, Role, Tally, device_role
from crowdml.robust import Combine
from crowdml.second_moments import Regression, Solver, check_prices, moments_row, polynomial_row, read_ridge
from crowdml.settings import Between, read_kind
from crowdml.shape import Shape
from crowdml.task import Task


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: Annotated[int, Between(1, 100_000)]
    """The samples that a device gives, all in one release."""
    combine: Combine
    """How a round of uploads becomes one: "exponential", "top", or a robust rule."""
    map: MapSettings = field(default_factory=MapSettings)
    positive: bool = False
    """Features and labels below zero count as zero: the sensitivity is then 2 instead of sqrt(4.5)."""
    kind: str = "secprobe"


@lru_cache(maxsize=256)
def plan(task: Task) -> Regression[Any]:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_kind(Settings, task.protocol, "protocol")
    c = read_ridge(task)
    if task.masking is not None:
        raise TaskError(
            '[masking] with protocol.kind = "secprobe": its server rates the upload of each device, and under masks it '
            'would hear sums alone. Leave [masking] out, or take protocol.kind = "gram".'
        )
    check_prices(task)
    said = "how features and labels go together here, blurred with noise"
    if task.privacy.mechanism == "skellam":
        row = moments_row(task, settings.map, batch=settings.batch, positive=settings.positive, promise=said)
    elif task.privacy.mechanism == "discrete-laplace":
        if settings.positive:
            raise TaskError("protocol.positive is for moments with Skellam noise: units lie in [0, 1]. Leave it out.")
        row = polynomial_row(task, settings.map, batch=settings.batch, promise=said)
    else:
        raise TaskError(
            f'privacy.mechanism = "{task.privacy.mechanism}": secprobe adds all of the noise to a device\'s own '
            'moments, which is "skellam", or to the coefficients of its loss, which is "discrete-laplace".'
        )
    return Regression(settings.map, row, task.features.dimension, task.classes, float(task.labels.bound), c)


def mechanisms(task: Task) -> Mapping[str, Mechanism]:
    """Everything that may leave a device, and at what price: one row."""
    return {"moments": plan(task).mechanism}


# --- what travels ---


@message("secprobe/model/1")
class Fitted:
    """The publication: weights for the task's features, and how many rounds made them (none at first)."""

    weights: Public[Array]
    version: Public[Integers]


@contribution("secprobe/moments/1", masked="secprobe/masked/1", total="secprobe/total/1")
class Moments:
    """A device's upload: the second moments of a batch with all of their noise."""

    moments: Release[Integers]
    version: Public[Integers]


SOLVER = Solver(plan, Fitted)


def fits(shape: Shape, masked: bool) -> str | None:
    """It has no masked form, and nobody chooses a rule in a task's place."""
    return (
        "secprobe needs a task file that chooses a rule, protocol.combine, and has no masks. One is in "
        "docs/protocols/secprobe.md; run it with `crowdml simulate` or `Crowd.from_task`."
    )


heard = heard_by(Moments, SOLVER.fit, tried=SOLVER.try_alone, grouped=SOLVER.take_group)
device = device_role(Moments, Fitted, SOLVER.contribute)
server = Role(start=SOLVER.publish_initial, on=heard)
protocol = Protocol(
    "secprobe",
    device,
    server,
    mechanisms,
    model=lambda task, state: state.weights,
    shapes=lambda task: {"moments": (plan(task).mechanism.length,)},
    progress=lambda task, state: Tally(int(state.devices)),
    contribution=Moments,
    predict=SOLVER.predict,
    scores=SOLVER.scores,
    regression=plan,
    traced=False,  # moments are multiplied in 64 bits, and maps are NumPy's
    settings=Settings,
    fits=fits,
    usual_model=lambda shape: "ridge",
)
