"""A server that is trusted with every update, and adds noise once to the mean of enough of them. Simulation alone.

Hamm, Luken & Xie 2017, section 3.2: where only other devices are to learn nothing, a mean of B_s updates moves by a
B_s-th of what one of them does, and so does the noise. The paper divides by B_s whatever |W| is (L9); here a mean of
fewer than B_s is never let out, and the round is lost.

Devices run the handlers of `local_updates` on a task without noise of their own; what they say is clipped once more,
and the server's handler hears a noisy total, as it does of a cohort. The noise is floating-point noise from a seed
(R5), so the guarantee is one of real numbers and of a simulated server: nothing here runs on a device, and no server
over HTTP offers it, since none that hears plain updates is trusted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples, finite_or_zero
from crowdml.errors import GuaranteeError, TaskError
from crowdml.messages import total
from crowdml.privacy.calibration import rho_for
from crowdml.privacy.losses import ZCDP, Loss, Pure, Total
from crowdml.privacy.noise import Silence
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.protocols import find
from crowdml.protocols.local_updates import plan
from crowdml.sim.layout import Holding
from crowdml.sim.pytrees import register
from crowdml.sim.world import uniform
from crowdml.task import Task
from crowdml.turn import check_in, first_turn, server_turn

__all__ = ["GAMMA", "GAUSSIAN", "TrustedMean", "TrustedRun", "calibrate", "run"]

GAUSSIAN, GAMMA = "gaussian", "l2-gamma"
ORDER, VANISHED = 18, 19
"""What a random number is for, beside those of `world` and `cohorts`."""


@dataclass(frozen=True)
class TrustedMean:
    """The mean of at least `least` updates, each clipped to `clip` in the l2 norm, with noise that the server adds.

    Guarantee, in real numbers: against other devices, with the server trusted, for replacing a device, per round that
    it is in; the mean moves by at most 2 clip / `least` then. "gaussian": rho-zCDP. "l2-gamma": epsilon-DP; the noise
    has a density proportional to exp(-epsilon |z| / sensitivity), which is a radius of Gamma(length, sensitivity /
    epsilon) and an even direction (L2), without the factor of 2 that the paper prints (L1).
    """

    clip: float
    least: int
    length: int
    scale: float
    """Deviation of each entry; of "l2-gamma" the scale of the radius."""
    law: str = GAUSSIAN
    observer: Observer = Observer.DEVICES
    adjacency: Adjacency = Adjacency.REPLACE_DEVICE

    def __post_init__(self) -> None:
        if self.law not in (GAUSSIAN, GAMMA):
            raise TaskError(f"law = {self.law!r}: choose one of {GAUSSIAN}, {GAMMA}.")
        if self.observer is not Observer.DEVICES:
            raise GuaranteeError(
                f"a mean that the server makes of plain updates, seen by {self.observer.value}: the server sees every "
                "one of them, so it has to be trusted. Let devices add noise (local_updates), use masks, or promise "
                "something about other devices alone."
            )
        if self.least < 1 or self.length < 1 or not (0 < self.clip < math.inf and 0 < self.scale < math.inf):
            raise GuaranteeError(
                f"a mean of at least {self.least} updates of {self.length} entries, clip {self.clip:g}, noise "
                f"{self.scale:g}: all of them above 0 and finite."
            )

    @property
    def sensitivity(self) -> float:
        """Sensitivity of the mean, in the l2 norm."""
        return 2 * self.clip / self.least

    @property
    def loss(self) -> Loss:
        """Loss of a round that a device is in."""
        moved = Fraction(self.sensitivity) / Fraction(self.scale)
        return Pure(moved) if self.law == GAMMA else ZCDP(moved**2 / 2)

    @property
    def promise(self) -> str:
        return (
            "where the model would go from here, which the server sees as it is; others see it in a mean of at least "
            f"{self.least} devices that the server blurs. This holds as long as the server is trusted"
        )

    def noise(self, key: Array) -> Array:
        """[length], floats from a seed."""
        if self.law == GAUSSIAN:
            return self.scale * jax.random.normal(key, (self.length,))
        radius, direction = jax.random.split(key)
        way = jax.random.normal(direction, (self.length,))
        return self.scale * jax.random.gamma(radius, self.length) * way / jnp.linalg.norm(way)

    def release(self, updates: Array, there: Array, key: Array) -> tuple[Array, Array]:
        """Updates [m, length], and which of them are there [m] -> the noisy mean, and whether it may be let out.

        Where it may not it is all zeros. A non-finite update counts as zero (R6).
        """
        updates = jnp.where(there[:, None], finite_or_zero(updates, rows=True), 0)
        sizes = jnp.linalg.norm(updates, axis=1, keepdims=True)
        clipped = updates * jnp.minimum(1, self.clip / jnp.maximum(sizes, 1e-30))
        heard = there.sum()
        enough = heard >= self.least
        mean = clipped.sum(0) / jnp.maximum(heard, 1) + self.noise(key)
        return jnp.where(enough, mean, 0), enough


def calibrate(
    law: str, *, clip: float, least: int, length: int, epsilon: float, delta: float, rounds: int
) -> TrustedMean:
    """The noise with which a device that is in so many rounds pays epsilon at delta for all of them."""
    if not epsilon > 0 or rounds < 1:
        raise GuaranteeError(f"epsilon = {epsilon:g} for {rounds} rounds: both must be above 0.")
    pure = law == GAMMA
    per_move = rounds / epsilon if pure else math.sqrt(rounds / (2 * float(rho_for(epsilon, delta))))
    return TrustedMean(clip, least, length, 2 * clip / least * per_move * (1 + 1e-9), law)


@dataclass(frozen=True)
class TrustedRun:
    """What a simulated trusted server published, and what a device pays for it."""

    weights: Array
    """[T, ...]: after each round."""
    heard: Array
    """[T]: |W|."""
    released: Array
    """[T]: whether |W| was enough."""
    mechanism: TrustedMean
    rounds: int
    """How many rounds a device is in, at most."""
    delta: float

    @property
    def total(self) -> Total:
        """Total of the device that is in most rounds. Lost ones count: public numbers laid them out."""
        return Total.of([self.mechanism.loss]).scaled(self.rounds)

    @property
    def epsilon(self) -> float:
        return self.total.epsilon(0.0 if self.mechanism.law == GAMMA else self.delta)


def run(
    task: Task,
    holding: Holding,
    seed: int,
    *,
    cohort: int,
    least: int,
    epsilon: float,
    delta: float = 1e-6,
    law: str = GAUSSIAN,
    dropout: float = 0.0,
) -> TrustedRun:
    """One trial: in every round `cohort` devices are asked for an update, some vanish, and the rest are averaged.

    The task is one of `local_updates` with `privacy.mechanism = "none"` and a clip. Each device takes part once with
    each of its batches; epsilon is what it pays for all of these.
    """
    protocol, fixed = find(task), plan(task)
    if protocol.name != "local_updates" or task.privacy.mechanism != "none" or task.masking is not None:
        raise TaskError(
            f"task {task.name!r}: a trusted server adds the noise, to plain updates. Use protocol.kind = "
            '"local_updates" and privacy.mechanism = "none", without [masking].'
        )
    if not 0 < fixed.clip < math.inf:
        raise TaskError("protocol.clip is missing: noise for others is calibrated to the longest update (L3).")
    if not 1 <= least <= cohort or not 0 <= dropout < 1:
        raise TaskError(
            f"a mean of at least {least} of {cohort} devices, of which {dropout:.0%} vanish: from 1 to all of them, "
            "and a share below 1."
        )
    batch, devices = protocol.batch(task), holding.devices
    trips = int((holding.counts // batch).min())
    if cohort > devices or trips < 1:
        raise TaskError(f"{devices} devices with {trips} batches each make no round of {cohort}.")
    every = np.arange(devices)
    order = [np.argsort(uniform(seed, every, trip, ORDER), kind="stable") for trip in range(trips)]
    full = devices // cohort * cohort
    device = np.concatenate([each[:full].reshape(-1, cohort) for each in order])
    trip = np.repeat(np.arange(trips), devices // cohort)
    there = uniform(seed, device, trip[:, None], VANISHED) >= dropout
    mechanism = calibrate(
        law, clip=min(fixed.clip, float(fixed.settings.update_clip or math.inf)), least=least,
        length=math.prod(fixed.model.shape), epsilon=epsilon, delta=delta, rounds=trips,
    )  # fmt: skip
    rows = holding.rows(device[..., None], trip[:, None, None] * batch + np.arange(batch))
    register()
    start = first_turn(protocol, task)
    carry = jax.tree.map(jnp.asarray, (start.state, start.published))
    x, y = jnp.asarray(holding.x), jnp.asarray(holding.y)

    def one_round(carry: Any, feed: Any) -> Any:
        (state, offered), (wanted, number, alive, key) = carry, feed

        def says(some: Array) -> Array:
            batch = Samples(x[some], y[some])
            return check_in(protocol, task, batch, offered, noise=Silence(), me=0, trip=number).message.update.value

        mean, enough = mechanism.release(jax.lax.map(says, wanted), alive, key)
        asked = jnp.maximum(alive.sum(), 1).astype(jnp.int32)
        heard = total("local/total/1", {"update": mean * asked}, devices=asked, version=offered.version)
        turn = server_turn(protocol, task, state, heard)
        after = jax.tree.map(lambda old, new: jnp.where(enough, new, old), carry, (turn.state, turn.published))
        return after, (after[0].weights, alive.sum(), enough)

    keys = jax.random.split(jax.random.key(seed), len(device))
    feed = (jnp.asarray(rows), jnp.asarray(trip, jnp.int32), jnp.asarray(there), keys)
    _, seen = jax.jit(lambda carry, feed: jax.lax.scan(one_round, carry, feed))(carry, feed)
    weights, heard, released = (np.asarray(each) for each in seen)
    return TrustedRun(weights, heard, released, mechanism, trips, delta)
