/**
 * The grid: each contribution is clipped, truncated toward zero, checked as integers, and summed.
 * Replacing one contribution moves a sum by at most 2 * clip steps, whatever the contributions were.
 * Mirrors src/crowdml/privacy/grid.py.
 *
 * @typedef {"l1" | "l2"} Norm
 * @typedef {{ readonly length: number, readonly [place: number]: number }} Row
 */

/** In grid steps: the square of an l2 clip, and a little more, fits an int32. */
export const LARGEST_CLIP = 46_000;
/** In grid steps: a row that is longer counts as zero. */
const TOO_LARGE = 1e15;

/** The sum of rows of `length` numbers on a grid of this step. A row with an entry that is not finite counts as zero,
 * and so does one that is far beyond any use, or whose integer norm is above the clip all the same.
 * @param {Iterable<Row>} rows @param {number} length @param {{ step: number, norm: Norm, clip: number }} grid
 * @returns {Int32Array} */
export function sumOnGrid(rows, length, { step, norm, clip }) {
  if (!(clip >= 1 && clip <= LARGEST_CLIP)) {
    throw new RangeError(`A clip of ${clip} steps is outside 1 to ${LARGEST_CLIP}.`);
  }
  const total = new Int32Array(length);
  for (const row of rows) {
    const steps = stepsOf(row, length, { step, norm, clip });
    for (let at = 0; at < length; at++) total[at] += steps[at];
  }
  return total;
}

/** One row in grid steps, within the clip; zero where it cannot be used.
 * @param {Row} row @param {number} length @param {{ step: number, norm: Norm, clip: number }} grid
 * @returns {Float64Array} */
function stepsOf(row, length, { step, norm, clip }) {
  const scaled = Float64Array.from({ length }, (_, at) => row[at] / step);
  const size = norm === "l1" ? sizeOf(scaled, norm) : Math.sqrt(sizeOf(scaled, norm));
  if (!(size <= TOO_LARGE)) return new Float64Array(length); // NaN is not, either
  const factor = size > clip ? clip / size : 1;
  const steps = scaled.map((value) => Math.trunc(value * factor));
  const within = sizeOf(steps, norm) <= (norm === "l1" ? clip : clip * clip);
  return within ? steps : new Float64Array(length);
}

/** The l1 norm, or the square of the l2 norm: exact of integers within a clip. @param {Float64Array} row
 * @param {Norm} norm @returns {number} */
function sizeOf(row, norm) {
  let size = 0;
  for (const value of row) size += norm === "l1" ? Math.abs(value) : value * value;
  return size;
}

/** Counts of samples in cells: each row names the cell of one sample, -1 for none. A sample adds one to a single cell
 * at most. @param {Iterable<number>} cells @param {number} length @returns {Int32Array} */
export function countCells(cells, length) {
  const total = new Int32Array(length);
  for (const cell of cells) if (cell >= 0 && cell < length) total[cell] += 1;
  return total;
}

/** One vector that all samples made together, to the nearest step (the even one of two) and within the limit; zero
 * where one of its numbers is not finite. @param {Row} row @param {number} length @param {{ step: number,
 * limit: number }} grid
 * @returns {Int32Array} */
export function roundOnGrid(row, length, { step, limit }) {
  const usable = Array.from({ length }, (_, at) => row[at]).every(Number.isFinite);
  if (!usable) return new Int32Array(length);
  return Int32Array.from({ length }, (_, at) => toNearest(Math.max(-limit, Math.min(limit, row[at] / step))));
}

/** @param {number} value @returns {number} the nearest whole number, the even one of two */
function toNearest(value) {
  const low = Math.floor(value);
  const above = value - low;
  return above > 0.5 || (above === 0.5 && low % 2 !== 0) ? low + 1 : low;
}
