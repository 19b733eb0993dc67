/**
 * Public feature maps: what a task names by kind and seed, and every device makes for itself. A map brings a sample to
 * features of norm one at most. Mirrors src/crowdml/features/maps.py for the kinds "identity" and "cosine".
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./models.js").Numbers} Numbers
 * @typedef {ReturnType<typeof readMap>} MapSettings
 * @typedef {{ readonly length: number, readonly of: (x: Numbers) => Float32Array }} FeatureMap
 */

import { concat, sha256, toUtf8 } from "./bytes.js";
import { fraction, toNumber, whole } from "./fractions.js";
import { count, numberBetween, oneOf, optional, table } from "./sections.js";

/** The deviation of the sum of four bytes. */
const BELL = Math.sqrt((4 * (256 ** 2 - 1)) / 12);
const INSIDE = 1 - 2 ** -22;

export const readMap = table({
  constant: optional(numberBetween(whole(0), fraction(99n, 100n)), fraction(1n, 10n)),
  features: optional(count(1, 4096), 512),
  kind: optional(oneOf("identity", "cosine"), "identity"),
  seed: optional(count(0, Number.MAX_SAFE_INTEGER), 0),
  width: optional(numberBetween(fraction(1n, 10n ** 6n), whole(10 ** 6)), whole(1)),
});

/** How many features a map gives, with its constant. @param {MapSettings} settings @param {number} dimension */
export function mapLength({ constant, features, kind }, dimension) {
  return (kind === "cosine" ? features : dimension) + (constant.top ? 1 : 0);
}

/** The map of a task whose samples have so many numbers. @param {MapSettings} settings @param {number} dimension
 * @returns {Promise<FeatureMap>} */
export async function makeMap(settings, dimension) {
  const raw = settings.kind === "cosine" ? await cosine(settings, dimension) : same;
  const k = toNumber(settings.constant);
  const length = mapLength(settings, dimension);
  return { length, of: (x) => within(raw(x.every(Number.isFinite) ? x : x.map(() => 0)), k, length) };
}

/** @param {Numbers} x @returns {Float32Array} */
function same(x) {
  return Float32Array.from(x);
}

/** Features of norm sqrt(1 - k^2) at most, and the constant k behind them. @param {Float32Array} found
 * @param {number} k
 * @param {number} length @returns {Float32Array} */
function within(found, k, length) {
  const radius = Math.sqrt(1 - k * k) * INSIDE;
  const size = Math.sqrt(found.reduce((sum, value) => sum + value * value, 0));
  const factor = radius / Math.max(size, radius);
  return Float32Array.from({ length }, (_, at) => (at < found.length ? found[at] * factor : k * INSIDE));
}

/** sqrt(2 / D) cos(x.w + b): a random Fourier feature of the Gaussian kernel (Rahimi and Recht 2007).
 * @param {MapSettings} settings @param {number} dimension @returns {Promise<(x: Numbers) => Float32Array>} */
async function cosine({ features, seed, width }, dimension) {
  const reach = toNumber(width);
  const slopes = Float32Array.from(await bells("cosine", seed, features * dimension), (bell) => bell / BELL / reach);
  const turns = Float32Array.from(await fractionsOf("phase", seed, features), (part) => 2 * Math.PI * part);
  const height = Math.fround(Math.sqrt(2 / features));
  return (x) =>
    Float32Array.from({ length: features }, (_, at) => {
      let sum = 0;
      for (let row = 0; row < dimension; row++) sum += x[row] * slopes[row * features + at];
      return height * Math.cos(sum + turns[at]);
    });
}

/** So many bytes of the public stream of a tag and a seed. @param {string} tag @param {number} seed @param {number}
 * size
 * @returns {Promise<Bytes>} */
async function stream(tag, seed, size) {
  const head = concat(toUtf8("crowdml/maps/1\0"), toUtf8(`${tag}\0`), littleEndian(seed));
  const blocks = Array.from({ length: Math.ceil(size / 32) }, (_, at) => sha256(concat(head, littleEndian(at))));
  return concat(...(await Promise.all(blocks))).slice(0, size);
}

/** @param {number} number @returns {Bytes} 8 bytes */
function littleEndian(number) {
  const bytes = new Uint8Array(8);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(number), true);
  return bytes;
}

/** Sums of four bytes less 510: near to a normal distribution. @param {string} tag @param {number} seed
 * @param {number} length @returns {Promise<number[]>} */
async function bells(tag, seed, length) {
  const bytes = await stream(tag, seed, 4 * length);
  return Array.from({ length }, (_, at) => bytes.subarray(4 * at, 4 * at + 4).reduce((sum, byte) => sum + byte, -510));
}

/** Little-endian words over 2^32. @param {string} tag @param {number} seed @param {number} length
 * @returns {Promise<number[]>} */
async function fractionsOf(tag, seed, length) {
  const bytes = await stream(tag, seed, 4 * length);
  const view = new DataView(bytes.buffer);
  return Array.from({ length }, (_, at) => view.getUint32(4 * at, true) / 2 ** 32);
}
