/**
 * Rows as a task takes them: columns within public bounds, each scaled alike, and each row within the task's ball.
 * Each row is treated alone, and nothing is fitted. Mirrors src/crowdml/features/bounds.py and norms.py.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {object} Features
 * @property {number} dimension
 * @property {{ readonly kind: "l1" | "l2", readonly bound: Fraction }} norm
 * @property {readonly Fraction[] | null} low one bound for all columns, or one for each
 * @property {readonly Fraction[] | null} high
 */

import { toNumber } from "./fractions.js";

/** Scaled entries are rounded to float32; this margin keeps the rounded row inside the bound. */
const INSIDE = 1 - 2 ** -22;

/** A row as the device learns from it. One with a number that is not finite becomes the zero row.
 * @param {Features} features @param {ArrayLike<number>} row @returns {Float32Array} */
export function prepareRow(features, row) {
  const wide = Float64Array.from(row);
  if (wide.length !== features.dimension) throw new RangeError(`A row has ${features.dimension} numbers.`);
  if (!wide.every(Number.isFinite)) return new Float32Array(features.dimension);
  return intoBall(scaled(features, wide), features.norm.kind, toNumber(features.norm.bound));
}

/** Each column held within its bounds and brought to -1 to 1; one whose bounds are equal says nothing, and becomes 0.
 * @param {Features} features @param {Float64Array} row @returns {Float64Array} */
function scaled({ low, high }, row) {
  if (low === null || high === null) return row;
  const [lows, highs] = [low.map(toNumber), high.map(toNumber)];
  return row.map((value, at) => {
    const begin = lows[at % lows.length];
    const width = highs[at % highs.length] - begin;
    const factor = width > 0 ? 2 / width : 0;
    return Math.max(-1, Math.min(1, (value - (begin + width / 2)) * factor));
  });
}

/** A row outside the ball is shrunk onto it; one inside keeps its length. @param {Float64Array} row
 * @param {"l1" | "l2"} norm @param {number} bound @returns {Float32Array} */
export function intoBall(row, norm, bound) {
  const largest = row.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  if (largest === 0) return new Float32Array(row.length);
  const unit = row.map((value) => value / largest); // squares neither overflow nor vanish
  const sum = unit.reduce((total, value) => total + (norm === "l1" ? Math.abs(value) : value * value), 0);
  const reach = (bound * INSIDE) / (norm === "l1" ? sum : Math.sqrt(sum));
  return Float32Array.from(largest > reach ? unit.map((value) => value * reach) : row);
}
