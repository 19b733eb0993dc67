/**
 * Calibration: how much noise a loss asks for. Scales are rounded up, losses down; what is returned is exact.
 *
 * Logarithms of two machines may differ in their last digit. Where that could decide a rounding, the result here is the
 * one with more noise: `rhoFor` is never above Python's. Mirrors src/crowdml/privacy/calibration.py.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {import("./losses.js").Renyi} Renyi
 */

import * as fractions from "./fractions.js";
import { allows, conversion, doubtOf, epsilonOf, filterOf, limitOf, renyi, times, totalOf, zcdp } from "./losses.js";

const { add, ceiling, compare, divide, floor, fraction, multiply, square, subtract, whole } = fractions;
const BITS = 30; // of a rounded scale or rho: one part in a billion
const TWO = whole(2);

/** The power of two just below a positive fraction, or the next one down. @param {Fraction} value */
function exponentOf(value) {
  return fractions.bitLength(value.top) - fractions.bitLength(value.bottom) - 1;
}

/** @param {number} exponent @returns {Fraction} */
function powerOfTwo(exponent) {
  const power = 1n << BigInt(Math.abs(exponent));
  return exponent < 0 ? { top: 1n, bottom: power } : { top: power, bottom: 1n };
}

/** The largest rho, but for one part in a billion, such that rho-zCDP is (epsilon, delta)-DP. Rounded down.
 * @param {Fraction} epsilon @param {number} delta @returns {Fraction} */
export function rhoFor(epsilon, delta) {
  if (epsilon.top <= 0n || !(delta > 0 && delta < 1)) {
    throw new RangeError("Gaussian noise needs an epsilon and a delta.");
  }
  const filter = filterOf(epsilon, delta);
  const limit = limitOf(filter);
  const room = limit && subtract(limit, doubtOf(filter));
  if (!room || !filter.order || room.top <= 0n) {
    throw new RangeError("No zCDP loss is known to keep this epsilon and delta. Raise one of them.");
  }
  const largest = divide(room, filter.order);
  const unit = powerOfTwo(exponentOf(divide(limit, filter.order)) - BITS);
  let rho = multiply(whole(floor(divide(largest, unit))), unit);
  while (compare(fractions.exact(epsilonOf(totalOf(zcdp(rho)), delta) * (1 + 1e-14)), epsilon) > 0) {
    rho = subtract(rho, unit);
  }
  return rho;
}

/** b = sensitivity / epsilon of P(z) ~ exp(-|z| / b), exact. @param {Fraction} sensitivity @param {Fraction} epsilon */
export function laplaceScale(sensitivity, epsilon) {
  return divide(sensitivity, epsilon);
}

/** sigma with sensitivity^2 / (2 sigma^2) <= rho, exact: the root is rounded up by at most one part in 2^30, to a
 * fraction whose denominator is a power of two. @param {Fraction} sensitivity @param {Fraction} rho
 * @returns {Fraction} */
export function gaussianSigma(sensitivity, rho) {
  if (sensitivity.top <= 0n || rho.top <= 0n) throw new RangeError("A sensitivity and a rho are above 0.");
  const variance = divide(square(sensitivity), multiply(TWO, rho));
  const shift = Math.max(0, BITS + 1 - Math.floor(exponentOf(variance) / 2));
  const scaled = ceiling(multiply(variance, powerOfTwo(2 * shift)));
  return fraction(fractions.wholeRoot(scaled - 1n) + 1n, 1n << BigInt(shift));
}

/** A loss to spend at the most, down by at most one part in 2^30 to a multiple of a power of two: a short text.
 * @param {Fraction} value @returns {Fraction} */
export function roundDown(value) {
  const unit = powerOfTwo(exponentOf(value) - BITS);
  return multiply(whole(floor(divide(value, unit))), unit);
}

/** Up by at most one part in 2^bits to a multiple of a power of two. @param {Fraction} value @param {number} [bits] */
function roundUp(value, bits = BITS) {
  const unit = powerOfTwo(exponentOf(value) - bits);
  return multiply(whole(ceiling(divide(value, unit))), unit);
}

/** The square root, rounded up by at most 2^-20; exact where it is a multiple of that. @param {Fraction} value */
export function rootUp(value) {
  const scaled = ceiling(multiply(value, powerOfTwo(40)));
  const root = fractions.wholeRoot(scaled);
  return fraction(root * root < scaled ? root + 1n : root, 1n << 20n);
}

/** How far integers can move in the l1 norm that move by l2 in the l2 norm: sqrt(length) l2, rounded up, or l2^2.
 * @param {Fraction} l2 @param {number} length @returns {Fraction} */
export function l1Of(l2, length) {
  const root = fractions.wholeRoot(ceiling(multiply(whole(length), square(l2))));
  return fractions.least(whole(root + 1n), square(l2));
}

// --- Skellam ---

/** @param {number} first @param {number} end @param {number} step */
function range(first, end, step) {
  return Array.from({ length: Math.ceil((end - first) / step) }, (_, at) => first + at * step);
}

/** Orders of the divergences that a Skellam release is charged with. */
export const ORDERS = [
  ...range(2, 33, 1),
  ...range(34, 65, 2),
  ...range(68, 129, 4),
  ...range(144, 257, 16),
  ...range(320, 449, 64),
  512,
  768,
  1024,
  2048,
  4096,
];

/** What Skellam noise of this variance proves for an integer query of these sensitivities (Agarwal, Kairouz, Liu 2021).
 * `smallest` is the variance of the entries with least noise, where `l2` weighs each by its own.
 * @param {Fraction} l2 @param {Fraction} l1 @param {Fraction} variance @param {Fraction} [smallest] @returns {Renyi} */
export function skellamLoss(l2, l1, variance, smallest = variance) {
  const power = square(l2);
  const values = ORDERS.map((order) => {
    const [a, six] = [whole(2 * order - 1), multiply(whole(6), l1)];
    const inner = divide(add(multiply(a, power), six), multiply(whole(4), square(smallest)));
    const outer = divide(multiply(whole(3), l1), multiply(TWO, smallest));
    const first = divide(multiply(whole(order), power), multiply(TWO, variance));
    return roundUp(add(first, fractions.least(inner, outer)));
  });
  return renyi(ORDERS, values);
}

/** The least variance, rounded up, such that `uses` releases with Skellam noise of it are (epsilon, delta)-DP.
 * @param {Fraction} l2 @param {Fraction} l1 @param {Fraction} epsilon @param {number} delta @param {number} uses
 * @returns {Fraction} */
export function skellamVariance(l2, l1, epsilon, delta, uses) {
  const cheapest = Math.min(...ORDERS.map((order) => conversion(order, delta).value + conversion(order, delta).error));
  if (!(cheapest < fractions.toNumber(epsilon))) throw new RangeError("No Skellam noise keeps this epsilon and delta.");
  /** @param {Fraction} variance */
  const isEnough = (variance) => isWithin(times(totalOf(skellamLoss(l2, l1, variance)), uses), epsilon, delta);
  let high = roundUp(divide(square(l2), divide(multiply(TWO, rhoFor(epsilon, delta)), whole(uses))), 8);
  while (!isEnough(high)) high = multiply(high, TWO);
  let low = divide(high, TWO);
  while (isEnough(low)) [low, high] = [divide(low, TWO), low];
  return halve(low, high, isEnough);
}

/** Whether a plan keeps a budget, however the last digit of a logarithm falls. @param {import("./losses.js").Total}
 * plan
 * @param {Fraction} epsilon @param {number} delta */
function isWithin(plan, epsilon, delta) {
  const within = compare(fractions.exact(epsilonOf(plan, delta) * (1 + 1e-14)), epsilon) <= 0;
  return within && allows(filterOf(epsilon, delta, plan), plan);
}

/** The upper end of twenty halvings between what is not enough and what is. @param {Fraction} low @param {Fraction}
 * high
 * @param {(value: Fraction) => boolean} isEnough @returns {Fraction} */
function halve(low, high, isEnough) {
  for (let turn = 0; turn < 20; turn++) {
    const middle = divide(add(low, high), TWO);
    if (isEnough(middle)) high = middle;
    else low = middle;
  }
  return high;
}

/** What Skellam noise proves for second moments, where entries off the diagonal have half the variance.
 * @param {Fraction} l2 @param {Fraction} l1 @param {Fraction} variance @returns {Renyi} */
export function momentsLoss(l2, l1, variance) {
  return skellamLoss(l2, l1, variance, divide(variance, TWO));
}

/** The least variance, rounded up, such that one release of second moments is (epsilon, delta)-DP. @param {Fraction} l2
 * @param {Fraction} l1 @param {Fraction} epsilon @param {number} delta @returns {Fraction} */
export function momentsVariance(l2, l1, epsilon, delta) {
  /** @param {Fraction} variance */
  const isEnough = (variance) => isWithin(totalOf(momentsLoss(l2, l1, variance)), epsilon, delta);
  let low = skellamVariance(l2, l1, epsilon, delta, 1);
  let high = low;
  while (!isEnough(high)) [low, high] = [high, multiply(high, TWO)];
  return high === low ? high : halve(low, high, isEnough);
}
