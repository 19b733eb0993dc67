/**
 * Mechanisms: what a row of a protocol's table adds noise to, and what a release through it costs.
 * Each takes the contributions of a part and bounds every one itself. Mirrors src/crowdml/privacy/mechanisms.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {import("./grid.js").Row} Row
 * @typedef {import("./losses.js").Loss} Loss
 * @typedef {import("./losses.js").Total} Total
 * @typedef {import("./noise.js").Source} Source
 * @typedef {{ readonly start: number, readonly stop: number }} Part rows of a sensed batch, the last not included
 *
 * @typedef {{ readonly kind: "laplace", readonly scale: Fraction }
 *   | { readonly kind: "gaussian", readonly sigma: Fraction }
 *   | { readonly kind: "skellam", readonly variance: Fraction }} NoiseLaw
 *
 * @typedef {object} Losses what one release costs
 * @property {Loss} loss one sample of the part
 * @property {Loss} deviceLoss the device, if all samples of the part are replaced
 * @property {Loss} [alone] one sample of a masked row, if everyone else of the cohort colludes
 * @property {Loss} [deviceAlone]
 *
 * @typedef {object} Schedule check-in t gives levels[t] / of of its value, and nothing after the last
 * @property {readonly number[]} levels
 * @property {number} of
 * @property {(level: number) => Losses} at what a check-in of this level costs
 *
 * @typedef {object} Mechanism a row of the table of what may leave
 * @property {"sum" | "count" | "stable" | "gram"} form clipped contributions added up; counts of samples in cells; one
 *   vector that all samples made and one sample moves by a proven bound; or second moments of clipped contributions
 * @property {"l1" | "l2"} norm
 * @property {number} bound grid steps: the clip of a sum or of moments, the limit of a stable vector's entries; of
 * counts 1
 * @property {Fraction} step the size of a grid step
 * @property {number} length entries, flat
 * @property {number} [features] of second moments: how many entries of a contribution are features, and not labels
 * @property {Part} covers the rows of the batch that it may use
 * @property {boolean} whole whether the samples make one contribution together
 * @property {"anyone" | "aggregate"} observer who may look for the guarantee to hold
 * @property {"replace-sample" | "replace-device"} adjacency
 * @property {NoiseLaw} law of the noise on each entry, in grid steps
 * @property {Losses} losses of the most expensive check-in
 * @property {string} promise what the owner reads
 * @property {Schedule | null} schedule where check-ins cost differently
 *
 * @typedef {Int32Array | Float64Array} Steps whole numbers: 64 bits of them under masks where a sum needs them
 * @typedef {readonly number[] | readonly Row[]} Contributions cells of samples for counts, else rows of numbers
 */

import { compare, fraction, square, toNumber, whole } from "./fractions.js";
import { countCells, roundOnGrid, sumOnGrid } from "./grid.js";
import { drawMoments } from "./moments.js";
import { LARGEST, MOST_DRAWS } from "./noise.js";

/** What check-in number `trip` (from 0) lets out: the contributions in grid steps, with the row's noise.
 * @param {Mechanism} row @param {Contributions} contributions @param {number} trip @param {Source} noise
 * @returns {Steps} */
export function drawRow(row, contributions, trip, noise) {
  if (row.form === "gram") return drawMoments(row, /** @type {readonly Row[]} */ (contributions), noise);
  const drawn = drawNoise(row.law, row.length, noise);
  const steps = stepsOf(row, contributions, levelAt(row, trip));
  return steps.map((value, at) => value + drawn[at]); // an int32 wraps round, as Python's does
}

/** @param {NoiseLaw} law @param {number} length @param {Source} noise @returns {Int32Array} */
function drawNoise(law, length, noise) {
  if (law.kind === "laplace") return noise.discreteLaplace(law.scale, length);
  return law.kind === "gaussian" ? noise.discreteGaussian(law.sigma, length) : noise.skellam(law.variance, length);
}

/** @param {Mechanism} row @param {Contributions} contributions @param {number | null} level @returns {Int32Array} */
function stepsOf(row, contributions, level) {
  if (row.form === "count") return countCells(/** @type {readonly number[]} */ (contributions), row.length);
  const step = toNumber(row.step);
  const rows = givenOf(/** @type {readonly Row[]} */ (contributions), row, level);
  if (row.form === "stable") return roundOnGrid(rows[0], row.length, { step, limit: row.bound });
  const clip = level === null ? row.bound : Math.max(level, 1);
  return sumOnGrid(rows, row.length, { step, norm: row.norm, clip });
}

/** The share of each contribution that a check-in gives. @param {readonly Row[]} rows @param {Mechanism} row
 * @param {number | null} level @returns {readonly Row[]} */
function givenOf(rows, { schedule, length }, level) {
  if (schedule === null || level === null) return rows;
  const share = Math.fround(level / schedule.of);
  return rows.map((row) => Float64Array.from({ length }, (_, at) => (level > 0 ? row[at] * share : 0)));
}

/** @param {Mechanism} row @param {number} trip @returns {number | null} null where every check-in gives the whole */
function levelAt({ schedule }, trip) {
  return schedule === null ? null : (schedule.levels[trip] ?? 0);
}

/** What check-in number `trip` costs. @param {Mechanism} row @param {number} trip @returns {Losses} */
export function lossesAt(row, trip) {
  return row.schedule === null ? row.losses : row.schedule.at(row.schedule.levels[trip] ?? 0);
}

/** How wide the noise is, in grid steps: sigma, the scale, or the deviation of a share. @param {NoiseLaw} law */
export function widthOf(law) {
  if (law.kind === "laplace") return toNumber(law.scale);
  return law.kind === "gaussian" ? toNumber(law.sigma) : Math.sqrt(toNumber(law.variance));
}

/** Whether a device draws such noise. @param {NoiseLaw} law @returns {boolean} */
export function isDrawable(law) {
  if (law.kind === "skellam") return compare(law.variance, whole(MOST_DRAWS * LARGEST ** 2)) <= 0;
  return compare(law.kind === "laplace" ? law.scale : law.sigma, whole(LARGEST)) <= 0;
}

/** @param {number} level @param {number} of @returns {Fraction} */
export function shareOf(level, of) {
  return fraction(BigInt(level), BigInt(of));
}

/** @param {number} level @param {number} of @returns {Fraction} */
export function squaredShare(level, of) {
  return square(shareOf(level, of));
}
