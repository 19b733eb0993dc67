/**
 * Rows of a protocol's table with the task's noise, alone or under masks. A protocol says what leaves and what bounds
 * it, the task says which noise hides it. Mirrors src/crowdml/privacy/rows.py.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {import("./mechanisms.js").Losses} Losses
 * @typedef {import("./mechanisms.js").Mechanism} Mechanism
 * @typedef {import("./mechanisms.js").Part} Part
 * @typedef {import("./tasks.js").Task} Task
 *
 * @typedef {object} Asked
 * @property {string} name of the row, and of its price in the task
 * @property {number} length
 * @property {Part} covers
 * @property {string} promise
 * @property {number} [releases] how many check-ins one price is for; as often as a sample is used
 * @property {readonly Fraction[] | null} [shares] what each check-in of a device gives of its value
 */

import {
  gaussianSigma,
  l1Of,
  laplaceScale,
  rhoFor,
  rootUp,
  roundDown,
  skellamLoss,
  skellamVariance,
} from "./calibration.js";
import * as fractions from "./fractions.js";
import { LARGEST_CLIP } from "./grid.js";
import { group, pure, zcdp } from "./losses.js";
import { shareOf, squaredShare } from "./mechanisms.js";
import { LARGEST } from "./noise.js";
import { Problem } from "./problems.js";

const { add, ceiling, compare, divide, floor, fraction, fromNumber, multiply, square, toNumber, whole, wholeRoot } =
  fractions;

/** A finer grid than this many steps a clip gains nothing that the noise does not hide. */
export const FINEST_CLIP = 2 ** 13;
const FINE = 256; // rounding costs sqrt(entries) steps; the bound is this many times as much where noise allows
const COARSE = 16; // and at least so many times
const FURTHEST = 2 ** 24; // grid steps: the largest reach of a vector's entries
const FINEST_SHARE = 2 ** 16; // a share of a stable vector is a multiple of its inverse
const TWO = whole(2);

/** @param {string} why @returns {never} */
function refuse(why) {
  throw new Problem("invalid-task", why);
}

/** The norm in which the task's noise hides a vector. @param {Task} task @returns {"l1" | "l2"} */
export function noiseNorm(task) {
  return task.privacy.mechanism === "discrete-laplace" && !task.masking ? "l1" : "l2";
}

/** @param {Task} task @param {string} name @returns {Fraction} */
function priceOf(task, name) {
  return task.privacy.epsilon[name] ?? refuse(`privacy.epsilon.${name} is missing: the row has no price.`);
}

/** @param {Task} task @returns {Pick<Mechanism, "observer" | "schedule">} */
function seen(task) {
  return { observer: task.masking ? "aggregate" : "anyone", schedule: null };
}

/** How many times the price of a whole value one unit pays at the most: a share costs its square in zCDP (power 2),
 * itself in pure epsilon. @param {readonly Fraction[] | null} shares @param {number} releases @param {1 | 2} power */
function worth(shares, releases, power) {
  if (shares === null) return whole(releases);
  const costs = shares.map((share) => (power === 1 ? share : square(share)));
  return costs.toSorted((a, b) => compare(b, a)).slice(0, releases).reduce(add, fractions.ZERO);
}

// --- sums of clipped contributions ---

/** The sum of vectors no longer than `bound`: one a sample, or one in all (`whole`).
 * @param {Task} task @param {Asked & { bound: number, whole?: boolean }} asked @returns {Mechanism} */
export function sumRow(task, asked) {
  if (task.masking) return maskedSum(task, asked, task.masking.honest);
  const { name, shares = null, releases = task.privacy.uses } = asked;
  if (task.privacy.mechanism === "discrete-laplace") {
    const each = shortened(divide(priceOf(task, name), worth(shares, releases, 1)), shares);
    const { step, clip } = chooseGrid(task, asked, laplaceScale(TWO, each));
    const law = /** @type {const} */ ({ kind: "laplace", scale: laplaceScale(whole(2 * clip), each) });
    return scheduled(
      { ...sum(task, asked, step, clip), norm: "l1", law, losses: lossesOf(pure(each), asked) },
      asked,
      (level, of) => lossesOf(pure(multiply(shareOf(level, of), each)), asked),
    );
  }
  const all = rhoFor(priceOf(task, name), task.privacy.delta);
  const rho = shortened(divide(all, worth(shares, releases, 2)), shares);
  const { step, clip } = chooseGrid(task, asked, gaussianSigma(TWO, rho));
  const law = /** @type {const} */ ({ kind: "gaussian", sigma: gaussianSigma(whole(2 * clip), rho) });
  return scheduled(
    { ...sum(task, asked, step, clip), norm: "l2", law, losses: lossesOf(zcdp(rho), asked) },
    asked,
    (level, of) => lossesOf(zcdp(multiply(squaredShare(level, of), rho)), asked),
  );
}

/** @param {Task} task @param {Asked & { whole?: boolean }} asked @param {Fraction} step @param {number} clip */
function sum(task, { length, covers, promise, whole: one = false }, step, clip) {
  /** @type {Mechanism["adjacency"]} */
  const adjacency = task.privacy.unit === "device" ? "replace-device" : "replace-sample";
  const form = /** @type {const} */ ("sum");
  return { ...seen(task), form, bound: clip, step, length, covers, promise, whole: one, adjacency };
}

/** @param {import("./losses.js").Loss} loss @param {Asked & { whole?: boolean }} asked @returns {Losses} */
function lossesOf(loss, { covers, whole: one = false }) {
  return { loss, deviceLoss: group(loss, one ? 1 : covers.stop - covers.start) };
}

/** A short fraction where check-ins are added up exactly. @param {Fraction} loss
 * @param {readonly Fraction[] | null} shares */
function shortened(loss, shares) {
  return shares === null ? loss : roundDown(loss);
}

/** The row with its schedule, if it has one: shares rounded down to what the row can give.
 * @param {Mechanism} row @param {Asked} asked @param {(level: number, of: number) => Losses} at @returns {Mechanism} */
function scheduled(row, { shares = null }, at) {
  if (shares === null) return row;
  const of = row.form === "sum" ? row.bound : FINEST_SHARE;
  const levels = levelsOf(shares, of);
  if (!row.whole || !levels.length || of > Math.max(LARGEST_CLIP, FINEST_SHARE)) refuse("This schedule gives nothing.");
  return { ...row, losses: at(Math.max(...levels), of), schedule: { levels, of, at: (level) => at(level, of) } };
}

/** @param {readonly Fraction[]} shares @param {number} of @returns {number[]} up to the first that gives nothing */
function levelsOf(shares, of) {
  const levels = shares.map((share) => Number(floor(multiply(share, whole(of)))));
  const end = levels.indexOf(0);
  return end < 0 ? levels : levels.slice(0, end);
}

/** @param {Task} task @param {Asked & { bound: number, whole?: boolean }} asked @param {number} honest
 * @returns {Mechanism} */
function maskedSum(task, asked, honest) {
  const { name, length, covers, releases = task.privacy.uses } = asked;
  /** @param {number} clip */
  const share = (clip) => shareOfNoise(task, name, honest, whole(2 * clip), l1Of(whole(2 * clip), length), releases);
  const rough = fraction(wholeRoot(ceiling(share(FINEST_CLIP))) + 1n, BigInt(FINEST_CLIP));
  const { step, clip } = chooseGrid(task, asked, rough);
  const variance = share(clip);
  /** @param {number} contributions @param {number} shares */
  const loss = (contributions, shares) => {
    const l2 = whole(2 * clip * contributions);
    return skellamLoss(l2, l1Of(l2, length), multiply(whole(shares), variance));
  };
  const all = asked.whole ? 1 : covers.stop - covers.start;
  const law = /** @type {const} */ ({ kind: "skellam", variance });
  return { ...sum(task, asked, step, clip), norm: "l2", law, losses: maskedLosses(loss, all, honest) };
}

/** @param {(contributions: number, shares: number) => import("./losses.js").Loss} loss @param {number} all
 * @param {number} honest @returns {Losses} */
function maskedLosses(loss, all, honest) {
  const [one, everything] = [loss(1, honest), loss(all, honest)];
  return { loss: one, deviceLoss: everything, alone: loss(1, 1), deviceAlone: loss(all, 1) };
}

/** The variance of one device's share, in squared grid steps. @param {Task} task @param {string} name
 * @param {number} honest @param {Fraction} l2 @param {Fraction} l1 @param {number} releases @returns {Fraction} */
function shareOfNoise(task, name, honest, l2, l1, releases) {
  return divide(skellamVariance(l2, l1, priceOf(task, name), task.privacy.delta, releases), whole(honest));
}

/** The finest useful grid whose noise a device still draws at once, and the clip in its steps, rounded up.
 * @param {Task} task @param {Asked & { bound: number }} asked @param {Fraction} noisePerClip */
function chooseGrid(task, { name, bound }, noisePerClip) {
  if (!(bound > 0 && bound < Infinity)) refuse(`row ${name} has the bound ${bound}, and it must be a number above 0.`);
  const most = Number(floor(divide(whole(LARGEST), noisePerClip)));
  if (most < 1) refuse(`privacy.epsilon.${name} is so small that its noise leaves the grid. Raise it.`);
  /** @param {number} step */
  const clipAt = (step) => Math.ceil((bound / step) * (1 + 1e-6));
  let step = 1;
  while (bound / step < Math.min(FINEST_CLIP, most) / 2) step /= 2;
  while (bound / step > FINEST_CLIP || clipAt(step) > most) step *= 2;
  const wanted = task.privacy.grid === null ? step : toNumber(powerOfTwo(task.privacy.grid));
  if (wanted < step) refuse(`privacy.grid = ${wanted} is too fine for this noise; ${step} or coarser.`);
  checkStep(wanted, 64);
  return { step: fromNumber(wanted), clip: clipAt(wanted) };
}

/** @param {number} step @param {number} bits */
function checkStep(step, bits) {
  if (step < 2 ** -bits || step > 2 ** bits) refuse("No grid fits features of this size. Scale them.");
}

/** @param {Fraction} step @returns {Fraction} */
function powerOfTwo(step) {
  const bits = step.top * step.bottom;
  const power = step.top > 0n && (bits & (bits - 1n)) === 0n;
  return power ? step : refuse("privacy.grid is not a power of two.");
}

// --- counts ---

/** Counts in so many cells; each sample adds one to a single cell, or to none.
 * @param {Task} task @param {Asked} asked `length` is the number of cells @returns {Mechanism} */
export function countRow(task, { name, length, covers, promise }) {
  const moved = whole(Math.min(length, 2)); // a replaced sample leaves a cell and enters another
  const row = /** @type {const} */ ({
    ...seen(task),
    form: "count",
    norm: "l1",
    bound: 1,
    step: fractions.ONE,
    length,
    covers,
    promise,
    whole: false,
    adjacency: "replace-sample",
  });
  if (task.masking) return maskedCount(task, name, row, moved, task.masking.honest);
  const epsilon = divide(priceOf(task, name), whole(task.privacy.uses));
  const law = /** @type {const} */ ({ kind: "laplace", scale: laplaceScale(moved, epsilon) });
  return { ...row, law, losses: lossesOf(pure(epsilon), { name, length, covers, promise }) };
}

/** @param {Task} task @param {string} name @param {Omit<Mechanism, "law" | "losses">} row @param {Fraction} moved
 * @param {number} honest @returns {Mechanism} */
function maskedCount(task, name, row, moved, honest) {
  const variance = shareOfNoise(task, name, honest, rootUp(moved), moved, task.privacy.uses);
  /** @param {number} samples @param {number} shares */
  const loss = (samples, shares) => {
    const l1 = multiply(whole(samples), moved);
    return skellamLoss(rootUp(multiply(l1, whole(samples))), l1, multiply(whole(shares), variance));
  };
  const losses = maskedLosses(loss, row.covers.stop - row.covers.start, honest);
  return { ...row, law: { kind: "skellam", variance }, losses };
}

// --- a vector that one sample moves by a proven bound ---

/** @typedef {{ stability: number, deviceStability: number, floatError: Fraction }} Moves */

/** One vector that one sample moves by `stability` and all of them by `deviceStability` (l2 norm, in its own unit).
 * What floats may add to the bounds, and rounding to the grid, are paid.
 * @param {Task} task @param {Asked & Moves} asked @returns {Mechanism} */
export function stableRow(task, asked) {
  const { name, length, shares = null, releases = task.privacy.uses } = asked;
  if (!task.masking && task.privacy.mechanism !== "discrete-gaussian") {
    refuse(`privacy.mechanism = "${task.privacy.mechanism}": without [masking] an update needs "discrete-gaussian".`);
  }
  const times = whole(ceiling(worth(shares, releases, 2)));
  const all = task.masking ? fractions.ZERO : rhoFor(priceOf(task, name), task.privacy.delta);
  /** @param {Fraction} step */
  const at = (step) => stableAt(task, asked, step, task.masking ? all : divide(all, times), Number(times.top));
  const found = finestStable(task, asked, at);
  if (shares === null || task.masking) return found.row;
  const unit = dearest(found.moves, levelsOf(shares, FINEST_SHARE), releases, length);
  const rho = roundDown(divide(all, unit));
  const row = gaussianStable(task, asked, found.moves, rho);
  return scheduled(row, asked, (level, of) => stableLosses(found.moves, length, rho, shareOf(level, of)));
}

/** @typedef {{ step: Fraction, one: Fraction, everything: Fraction, limit: number }} Moved bounds on a grid */

/** @param {Task} task @param {Asked & Moves} asked @param {Fraction} step @param {Fraction} rho @param {number} times
 * @returns {{ row: Mechanism, moves: Moved }} */
function stableAt(task, asked, step, rho, times) {
  const slack = add(asked.floatError, divide(step, whole(1024)));
  const one = add(fromNumber(asked.stability * (1 + 1e-9)), slack);
  const all = add(fromNumber(asked.deviceStability * (1 + 1e-9)), slack);
  const everything = fractions.most(one, all);
  const limit = Number(ceiling(divide(divide(everything, TWO), step))) + 1;
  const moves = { step, one, everything, limit };
  if (!task.masking) return { row: gaussianStable(task, asked, moves, rho), moves };
  return { row: skellamStable(task, asked, moves, times, task.masking.honest), moves };
}

/** @param {Task} task @param {Asked} asked @param {Moved} moves */
function stable(task, { length, covers, promise }, { step, limit }) {
  return /** @type {const} */ ({
    ...seen(task),
    form: "stable",
    norm: "l2",
    bound: limit,
    step,
    length,
    covers,
    promise,
    whole: true,
    adjacency: "replace-sample",
  });
}

/** @param {Task} task @param {Asked} asked @param {Moved} moves @param {Fraction} rho @returns {Mechanism} */
function gaussianStable(task, asked, moves, rho) {
  const sigma = gaussianSigma(movedBy(moves, moves.one, asked.length), rho);
  const losses = stableLosses(moves, asked.length, rho, null);
  return { ...stable(task, asked, moves), law: { kind: "gaussian", sigma }, losses };
}

/** @param {Task} task @param {Asked} asked @param {Moved} moves @param {number} times @param {number} honest
 * @returns {Mechanism} */
function skellamStable(task, asked, moves, times, honest) {
  const { name, length } = asked;
  const l2 = add(divide(moves.one, moves.step), rootUp(whole(length)));
  const variance = shareOfNoise(task, name, honest, l2, l1Of(l2, length), times);
  /** @param {number} samples @param {number} shares */
  const loss = (samples, shares) => {
    const reach = movedBy(moves, samples === 1 ? moves.one : moves.everything, length);
    return skellamLoss(reach, l1Of(reach, length), multiply(whole(shares), variance));
  };
  return { ...stable(task, asked, moves), law: { kind: "skellam", variance }, losses: maskedLosses(loss, 2, honest) };
}

/** In grid steps, rounding paid: entries within the limit move by twice the limit at most, and are rounded.
 * @param {Moved} moves @param {Fraction} stability @param {number} length @returns {Fraction} */
function movedBy({ step, limit }, stability, length) {
  const root = rootUp(whole(length));
  return fractions.least(add(divide(stability, step), root), multiply(whole(2 * limit), root));
}

/** What a check-in costs that gives this share of its vector under the noise of the whole one (null: the whole vector).
 * @param {Moved} moves @param {number} length @param {Fraction} rho @param {Fraction | null} share @returns {Losses} */
function stableLosses(moves, length, rho, share) {
  if (share !== null && share.top === 0n) return { loss: zcdp(fractions.ZERO), deviceLoss: zcdp(fractions.ZERO) };
  const slack = divide(moves.step, whole(1024)); // for the product with the share
  /** @param {Fraction} bound */
  const part = (bound) => (share === null ? bound : add(multiply(share, bound), slack));
  const [one, everything] = [movedBy(moves, part(moves.one), length), movedBy(moves, part(moves.everything), length)];
  const smaller = divide(one, movedBy(moves, moves.one, length));
  const paid = multiply(square(smaller), rho);
  return { loss: zcdp(paid), deviceLoss: zcdp(multiply(paid, square(divide(everything, one)))) };
}

/** What the most expensive check-ins cost together at a rho of 1. @param {Moved} moves @param {readonly number[]}
 * levels
 * @param {number} releases @param {number} length @returns {Fraction} */
function dearest(moves, levels, releases, length) {
  const costs = levels.toSorted((a, b) => b - a).slice(0, releases).map((level) => {
    const { loss } = stableLosses(moves, length, fractions.ONE, shareOf(level, FINEST_SHARE));
    return loss.kind === "zcdp" ? loss.rho : fractions.ZERO;
  });
  return costs.reduce(add, fractions.ZERO);
}

/** The row on the finest useful grid whose noise a device draws at once, or on the coarsest that rounding allows.
 * @param {Task} task @param {Asked & Moves} asked @param {(step: Fraction) => { row: Mechanism, moves: Moved }} at */
function finestStable(task, { stability, deviceStability, length, covers }, at) {
  const root = rootUp(whole(length));
  const finest = divide(fromNumber(stability), multiply(whole(FINE), root));
  const wanted = task.privacy.grid === null ? null : powerOfTwo(task.privacy.grid);
  let step = wanted ?? fromNumber(2 ** Math.floor(Math.log2(toNumber(finest))));
  /** @param {Fraction} tried */
  const coarse = (tried) => compare(divide(fromNumber(stability), tried), multiply(whole(COARSE), root)) < 0;
  if (wanted !== null && coarse(wanted)) refuse("privacy.grid is so coarse that rounding to it costs too much.");
  checkStep(toNumber(step), 44);
  for (;;) {
    const wide = Number(ceiling(divide(divide(fromNumber(deviceStability), TWO), step))) + 2 > FURTHEST;
    const found = wide ? null : at(step);
    if (found !== null && (wanted !== null || isNarrow(found.row.law))) return found;
    step = multiply(step, TWO);
    if (wanted !== null || coarse(step)) {
      const many = covers.stop - covers.start;
      return found ?? refuse(`protocol.batch = ${many}: an update of so many samples fits no grid. Lower it.`);
    }
  }
}

/** @param {import("./mechanisms.js").NoiseLaw} law @returns {boolean} whether one draw makes it */
function isNarrow(law) {
  if (law.kind === "gaussian") return toNumber(square(law.sigma)) <= LARGEST ** 2;
  return law.kind === "skellam" ? toNumber(law.variance) <= LARGEST ** 2 : false;
}
