/**
 * The laws of the noise as exact integers: discrete Laplace, discrete Gaussian, Skellam.
 *
 * `thresholds` encloses a distribution function F at any precision: T[k] <= 2^bits F(k) < T[k] + 2, proved in
 * docs/proofs/sampler.md. No float takes part in an enclosure: floats only guess how long a table has to be, and
 * integers check the guess. Mirrors src/crowdml/privacy/laws.py, to the last unit.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {object} Law a law on 0, 1, 2, ...: of a geometric variable, or of the size of a symmetric one
 * @property {string} name names the law and its parameter: equal laws have equal names
 * @property {1n | 2n} sides how often each value above zero counts
 * @property {number | null} below the support ends before this value; null: it does not end
 * @property {(k: number) => number} depth about -log(P(k) / P(0))
 * @property {(count: number, precision: bigint) => Ratios} ratios
 *
 * @typedef {object} Ratios P(k) / P(k - 1) for k = 1 to `count`
 * @property {(k: number) => bigint} at the ratio at k - 1, in units of 2^-precision; it is asked for in rising order
 * @property {bigint} error a bound on the error of each, in units
 */

import { bitLength, ceiling, compare, divide, fraction, ONE, square, toNumber, toText, whole } from "./fractions.js";

const HALF = fraction(1n, 2n);

/** P(k) ~ exp(-k / scale) on 0, 1, 2, ..., or on 0 .. below - 1: what a discrete Laplace variable is made of.
 * @param {Fraction} scale @param {number | null} [below] @returns {Law} */
export function geometric(scale, below = null) {
  return {
    name: `geometric ${toText(scale)} ${below}`,
    sides: 1n,
    below,
    depth: (k) => toNumber(divide(whole(k), scale)),
    ratios: (_, precision) => same(expMinus(divide(ONE, scale), precision)),
  };
}

/** @param {bigint} ratio @returns {Ratios} */
function same(ratio) {
  return { at: () => ratio, error: 2n };
}

/** P(z) ~ exp(-z^2 / (2 sigma^2)) (Canonne, Kamath, Steinke 2020). @param {Fraction} sigma @returns {Law} */
export function discreteGaussian(sigma) {
  const variance = square(sigma);
  return {
    name: `gaussian ${toText(sigma)}`,
    sides: 2n,
    below: null,
    depth: (k) => toNumber(fraction(BigInt(k) * BigInt(k) * variance.bottom, 2n * variance.top)),
    ratios: (count, precision) => gaussianRatios(variance, count, precision),
  };
}

/** r_k = exp(-(2k - 1) / (2 sigma^2)) by r_(k+1) = r_k q: each product adds the errors of both and one unit.
 * @param {Fraction} variance @param {number} count @param {bigint} precision @returns {Ratios} */
function gaussianRatios(variance, count, precision) {
  let ratio = expMinus(divide(HALF, variance), precision);
  const step = expMinus(divide(ONE, variance), precision);
  const at = () => {
    const now = ratio;
    ratio = (ratio * step) >> precision;
    return now;
  };
  return { at, error: 3n * BigInt(count) };
}

/** The difference of two Poisson variables of mean variance / 2. Sums of such differences are Skellam again, and their
 * variances add. @param {Fraction} variance @returns {Law} */
export function skellam(variance) {
  const v = toNumber(variance);
  /** @param {number} k */
  const depth = (k) => k * Math.asinh(k / v) - (k * k) / (v + Math.hypot(k, v));
  return {
    name: `skellam ${toText(variance)}`,
    sides: 2n,
    below: null,
    depth,
    ratios: (count, precision) => skellamRatios(variance, depth, count, precision),
  };
}

/**
 * r_k = P(k) / P(k-1) downwards by r_k = 1 / (2k / variance + r_(k+1)), from the certain 0 <= r <= 1 far out. Two
 * bounds close in on each other; from `count` down the lower one goes on alone, and each step adds two units to its
 * error.
 * @param {Fraction} variance @param {(k: number) => number} depth @param {number} count @param {bigint} precision
 * @returns {Ratios}
 */
function skellamRatios(variance, depth, count, precision) {
  const one = 1n << precision;
  const power = 1n << (2n * precision);
  const top = (2n * variance.bottom) << precision;
  let [low, high] = [0n, one];
  const target = depth(count) + (Number(precision) * Math.log(2)) / 2 + 2;
  for (let k = first((n) => depth(n) > target, count); k > count; k--) {
    const term = (BigInt(k) * top) / variance.top;
    [low, high] = [power / (term + 1n + high), smaller(power / larger(term + low, one) + 1n, one)];
  }
  const error = high - low + 2n * BigInt(count);
  const ratios = downwards(count, low, (k, ratio) => power / larger((BigInt(k) * top) / variance.top + ratio, one));
  return { at: (k) => ratios[k], error };
}

/** @param {number} count @param {bigint} last @param {(k: number, ratio: bigint) => bigint} step */
function downwards(count, last, step) {
  /** @type {bigint[]} */
  const found = Array(count);
  let ratio = last;
  for (let k = count; k > 0; k--) {
    ratio = step(k, ratio);
    found[k - 1] = ratio;
  }
  return found;
}

/** An integer E with E <= 2^precision exp(-x) <= E + 2, for x >= 0. @param {Fraction} x @param {bigint} precision
 * @returns {bigint} */
export function expMinus(x, precision) {
  if (compare(x, whole(precision)) >= 0) return 0n;
  const halvings = BigInt(bitLength(ceiling(x)) + 8);
  for (let extra = halvings + 32n;; extra *= 2n) {
    const [low, high] = expBetween(x, halvings, precision + extra);
    const [least, most] = [low >> extra, -(-high >> extra)];
    if (most - least <= 2n) return least;
  }
}

/** Bounds on 2^work exp(-x), by the series of exp at x / 2^halvings, a reciprocal and squares, each rounded outwards.
 * @param {Fraction} x @param {bigint} halvings @param {bigint} work @returns {[bigint, bigint]} */
function expBetween(x, halvings, work) {
  const one = 1n << work;
  const bottom = x.bottom << halvings;
  let [sum, terms] = [one, 0n];
  for (let term = one; term; sum += term) term = (term * x.top) / (bottom * ++terms);
  let low = (one << work) / (sum + 2n * terms + 2n);
  let high = smaller((one << work) / sum + 1n, one);
  for (let turn = 0n; turn < halvings; turn++) {
    low = (low * low) >> work;
    high = ((high * high) >> work) + 1n;
  }
  return [low, high];
}

/**
 * T with T[k] <= 2^bits F(k) < T[k] + 2. At the last k, F is 1 and T is 2^bits, or 1 - F is below 2^-bits.
 * @param {Law} law @param {number} bits @returns {bigint[]}
 */
export function thresholds(law, bits) {
  let reach = (bits + 4) * Math.log(2) + 1;
  for (let spare = 12;; spare += 32, reach += 8) {
    const found = enclose(law, bits, reach, spare);
    if (found) return found;
  }
}

/** One attempt with a table that reaches so deep and so many spare bits; null where these do not prove the enclosure.
 * @param {Law} law @param {number} bits @param {number} reach @param {number} spare @returns {bigint[] | null} */
function enclose(law, bits, reach, spare) {
  const deep = first((k) => law.depth(k) >= reach, 2);
  const last = law.below === null ? deep : Math.min(deep, law.below - 1);
  const ends = law.below !== null && last === law.below - 1;
  const precision = BigInt(Math.max(128, bits + 3 * bitLength(BigInt(last)) + spare));
  const one = 1n << precision;
  const ratios = law.ratios(last + 1, precision);
  const { sums, weight } = addUp(ratios, last, precision, law.sides);
  const total = sums[last];
  const n = BigInt(last);
  const slack = law.sides * n * (n + 1n) * (ratios.error + 1n);
  const ratio = ratios.at(last) + ratios.error; // of the first weight left out; later ratios are smaller still
  const beyond = law.sides * (weight + n * (ratios.error + 1n)) * ratio;
  const rest = ends ? 0n : ratio < one ? beyond / (one - ratio) + 1n : total;
  if ((4n * slack + 2n * rest) << BigInt(bits) > total - slack) return null;
  return cut(sums, slack, total + slack + rest, bits, ends);
}

/** The partial sums of the weights up to the one at `last`, and that weight (of one side), each product rounded down.
 * @param {Ratios} ratios @param {number} last @param {bigint} precision @param {bigint} sides */
function addUp(ratios, last, precision, sides) {
  let [weight, total] = [1n << precision, 1n << precision];
  const sums = [total];
  for (let k = 0; k < last; k++) {
    weight = (weight * ratios.at(k)) >> precision;
    total += sides * weight;
    sums.push(total);
  }
  return { sums, weight };
}

/** The thresholds: each sum at its least, over all of the weight at its most. @param {bigint[]} sums
 * @param {bigint} slack @param {bigint} most @param {number} bits @param {boolean} ends */
function cut(sums, slack, most, bits, ends) {
  const found = sums.map((sum) => larger(0n, ((sum - slack) << BigInt(bits)) / most));
  if (ends) found[found.length - 1] = 1n << BigInt(bits);
  return found;
}

/** The smallest n >= atLeast where a condition that stays true holds.
 * @param {(n: number) => boolean} holds @param {number} atLeast @returns {number} */
export function first(holds, atLeast) {
  let [low, high] = [atLeast - 1, Math.max(atLeast, 1)];
  while (!holds(high)) [low, high] = [high, 2 * high];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (holds(middle)) high = middle;
    else low = middle;
  }
  return high;
}

/** @param {bigint} a @param {bigint} b */
function larger(a, b) {
  return a > b ? a : b;
}

/** @param {bigint} a @param {bigint} b */
function smaller(a, b) {
  return a < b ? a : b;
}
