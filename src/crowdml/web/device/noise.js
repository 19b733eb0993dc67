/**
 * Where noise comes from: the browser's own entropy, through the exact table sampler of docs/proofs/sampler.md.
 *
 * A draw compares 63 random bits with a table of a law's distribution function; where they do not decide, 64 more bits
 * do. There is no float in it and no bias. The same bytes give the same integers as in src/crowdml/privacy/noise.py.
 *
 * Out of scope: constant time. Which entries of a table are read depends on the noise drawn.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {import("./laws.js").Law} Law
 * @typedef {(size: number) => Uint8Array} Entropy so many uniform, independent bytes
 * @typedef {object} Source independent integer noise; parameters are exact and public
 * @property {(scale: Fraction, length: number) => Int32Array} discreteLaplace P(z) ~ exp(-|z| / scale)
 * @property {(sigma: Fraction, length: number) => Int32Array} discreteGaussian P(z) ~ exp(-z^2 / (2 sigma^2))
 * @property {(variance: Fraction, length: number) => Int32Array} skellam Poisson(v / 2) - Poisson(v / 2)
 *
 * @typedef {object} Table the thresholds of a law's first look, as 63 bits in two halves
 * @property {Law} law
 * @property {Uint32Array} high
 * @property {Uint32Array} low
 */

import { bitLength, ceiling, compare, divide, multiply, round, toNumber, whole } from "./fractions.js";
import { discreteGaussian, geometric, skellam, thresholds } from "./laws.js";

/** Grid steps: the largest sigma that a device draws; a larger Skellam share is the sum of several draws. */
export const LARGEST = 2 ** 15;
/** Grid steps: the largest Laplace scale, whose tables grow with its root alone. */
const WIDEST = 2 ** 20;
/** Draws that one Skellam value may be the sum of. */
export const MOST_DRAWS = 1024;
const WORD = 63; // bits of the first look: a word of 64 less one bit, which serves as the sign
const AT_ONCE = 65_536; // bytes that a browser gives in one call
const MOST_TABLES = 64;

/** The browser's own entropy. @param {number} size @returns {Uint8Array} */
export function systemEntropy(size) {
  const bytes = new Uint8Array(size);
  for (let at = 0; at < size; at += AT_ONCE) crypto.getRandomValues(bytes.subarray(at, Math.min(at + AT_ONCE, size)));
  return bytes;
}

/** Exact noise. It has no seed: noise from a known seed is no noise, so another entropy is for tests alone.
 * @param {Entropy} [entropy] @returns {Source} */
export function noiseFrom(entropy = systemEntropy) {
  return {
    discreteLaplace: (scale, length) => laplaceDraws(scale, length, entropy),
    discreteGaussian: (sigma, length) => {
      atMost("sigma", sigma, LARGEST);
      return held(signedDraws(discreteGaussian(sigma), length, entropy));
    },
    skellam: (variance, length) => skellamDraws(variance, length, entropy),
  };
}

/** X = G or -1 - G, and G = m H + L, with independent H, L and choice: three small tables at any scale.
 * @param {Fraction} scale @param {number} length @param {Entropy} entropy */
function laplaceDraws(scale, length, entropy) {
  atMost("scale", scale, WIDEST);
  const m = blockOf(scale);
  const laws = [geometric(divide(scale, whole(m))), geometric(scale, m), geometric(scale, 2)];
  const [high, low, side] = laws.map((law) => draw(tableOf(law), length, entropy).values);
  return held(high.map((block, at) => (side[at] ? -1 - (m * block + low[at]) : m * block + low[at])));
}

/** @param {Fraction} variance @param {number} length @param {Entropy} entropy */
function skellamDraws(variance, length, entropy) {
  atMost("variance", variance, MOST_DRAWS * LARGEST ** 2);
  const parts = Math.max(1, Number(ceiling(divide(variance, whole(LARGEST ** 2)))));
  const law = skellam(divide(variance, whole(parts)));
  const total = new Float64Array(length); // whole numbers far below 2^53
  for (let part = 0; part < parts; part++) {
    signedDraws(law, length, entropy).forEach((value, at) => (total[at] += value));
  }
  return held(total);
}

/** Signs are fair and independent of the size; that of a zero does not matter.
 * @param {Law} law @param {number} length @param {Entropy} entropy @returns {Float64Array} */
function signedDraws(law, length, entropy) {
  const { values, coins } = draw(tableOf(law), length, entropy);
  return values.map((value, at) => (coins[at] ? 0 - value : value));
}

/** Independent draws of the law, and as many fair coins. All first words are read at once, then, in the order of the
 * draws, what the undecided ones need. @param {Table} table @param {number} length @param {Entropy} entropy */
function draw(table, length, entropy) {
  const words = bytesOf(entropy, 8 * length);
  const values = new Float64Array(length);
  const coins = new Uint8Array(length);
  for (let at = 0; at < length; at++) {
    const [low, high] = [words.getUint32(8 * at, true), words.getUint32(8 * at + 4, true)];
    coins[at] = low & 1;
    const [bitsLow, bitsHigh] = [((low >>> 1) | (high << 31)) >>> 0, high >>> 1];
    const found = countUpTo(table, bitsHigh, bitsLow);
    values[at] = isOpen(table, found, bitsHigh, bitsLow) ? decide(table.law, bitsHigh, bitsLow, entropy) : found;
  }
  return { values, coins };
}

/** How many thresholds are at most the number with these halves. @param {Table} table @param {number} high
 * @param {number} low @returns {number} */
function countUpTo(table, high, low) {
  let [from, to] = [0, table.high.length];
  while (from < to) {
    const middle = (from + to) >>> 1;
    const there = table.high[middle];
    if (there < high || (there === high && table.low[middle] <= low)) from = middle + 1;
    else to = middle;
  }
  return from;
}

/** Whether the bits do not decide: beyond the table, or less than 2 above the threshold before them.
 * @param {Table} table @param {number} found @param {number} high @param {number} low */
function isOpen(table, found, high, low) {
  if (found === table.high.length) return true;
  if (found === 0) return false;
  return (high - table.high[found - 1]) * 2 ** 32 + (low - table.low[found - 1]) < 2;
}

/** Decides with 64 more bits, and more again, until it decides; with probability one it does.
 * @param {Law} law @param {number} high @param {number} low @param {Entropy} entropy @returns {number} */
function decide(law, high, low, entropy) {
  let prefix = (BigInt(high) << 32n) | BigInt(low);
  for (let bits = WORD + 64;; bits += 64) {
    prefix = (prefix << 64n) | bytesOf(entropy, 8).getBigUint64(0, true);
    const table = thresholds(law, bits);
    const found = place(table, prefix);
    if (found < table.length && (found === 0 || prefix - table[found - 1] >= 2n)) return found;
  }
}

/** @param {bigint[]} table @param {bigint} prefix @returns {number} how many entries are at most the prefix */
function place(table, prefix) {
  let [from, to] = [0, table.length];
  while (from < to) {
    const middle = (from + to) >>> 1;
    if (table[middle] <= prefix) from = middle + 1;
    else to = middle;
  }
  return from;
}

/** @param {Entropy} entropy @param {number} size @returns {DataView} */
function bytesOf(entropy, size) {
  const bytes = entropy(size);
  if (bytes.length !== size) {
    throw new Error(
      `The source of entropy gave ${bytes.length} bytes where ${size} were asked for. No noise was drawn.`,
    );
  }
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
}

/** @type {Map<string, Table>} */
const tables = new Map();

/** The table of a law's first look, made at its first draw. @param {Law} law @returns {Table} */
function tableOf(law) {
  const known = tables.get(law.name);
  if (known) return known;
  const made = tabled(law);
  if (tables.size >= MOST_TABLES) tables.clear();
  tables.set(law.name, made);
  return made;
}

/** @param {Law} law @returns {Table} */
function tabled(law) {
  const halves = new DataView(BigUint64Array.from(thresholds(law, WORD)).buffer);
  const little = new Uint8Array(Uint32Array.of(1).buffer)[0] === 1;
  const length = halves.byteLength / 8;
  return {
    law,
    high: Uint32Array.from({ length }, (_, k) => halves.getUint32(8 * k + (little ? 4 : 0), little)),
    low: Uint32Array.from({ length }, (_, k) => halves.getUint32(8 * k + (little ? 0 : 4), little)),
  };
}

/** Builds each table anew when it is next drawn from: for measurements. */
export function forgetTables() {
  tables.clear();
}

/** Places in a block of a geometric variable: about as many as there are blocks within 63 bits of probability.
 * @param {Fraction} scale @returns {number} */
export function blockOf(scale) {
  const size = round(multiply(whole(44), scale));
  return 2 ** Math.floor(bitLength(size > 1n ? size : 1n) / 2);
}

/** As int32. A value outside, less likely than 2^-90000, is held at the edge, which any reader could do.
 * @param {Float64Array} values @returns {Int32Array} */
function held(values) {
  return Int32Array.from(values, (value) => Math.max(-(2 ** 31), Math.min(2 ** 31 - 1, value)));
}

/** @param {string} name @param {Fraction} value @param {number} largest */
function atMost(name, value, largest) {
  if (value.top <= 0n) throw new RangeError(`${name} is ${toNumber(value)}, and noise needs one above zero.`);
  if (compare(value, whole(largest)) <= 0) return;
  throw new RangeError(`${name} is ${toNumber(value)} grid steps, and a device draws at most ${largest}.`);
}
