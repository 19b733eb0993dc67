/**
 * Second moments under masks: products of whole numbers, summed over samples, with one share of Skellam noise.
 * Each sample is clipped and brought to whole numbers first and multiplied afterwards, so the sensitivity is that of
 * what is sent. Mirrors src/crowdml/privacy/moments.py; proof: docs/proofs/moments.md.
 *
 * A sum of products is below 2^53, so it is exact in float64 in whatever order it is added.
 *
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {import("./grid.js").Row} Row
 * @typedef {import("./mechanisms.js").Mechanism} Mechanism
 * @typedef {import("./mechanisms.js").Part} Part
 * @typedef {import("./noise.js").Source} Source
 * @typedef {import("./tasks.js").Task} Task
 */

import { l1Of, momentsLoss, momentsVariance, rootUp } from "./calibration.js";
import { ceiling, compare, divide, fraction, multiply, toNumber, whole } from "./fractions.js";
import { refuseTask } from "./sections.js";

const FINEST_CLIP = 2 ** 9; // features of norm one on a finer grid gain nothing that the noise does not hide
const LARGEST_SHARE = 2 ** 16; // grid steps: the deviation of a device's share
const LARGEST_PART = 2 ** 17; // grid steps: noise of a larger deviation is drawn as a sum
const TOO_LARGE = 1e15;
const EXACT = 2 ** 53;

/** How far replacing so many samples moves the moments for |h|, |y| <= clip, rounded up: sqrt(9/2) clip^2 each.
 * @param {number} samples @param {number} clip @returns {Fraction} */
function moved(samples, clip) {
  return multiply(whole(samples), rootUp(multiply(fraction(9n, 2n), whole(BigInt(clip) ** 4n))));
}

/** The moments of so many samples with this device's share of the noise, on the finest useful grid. @param {Task} task
 * @param {{ features: number, labels: number, batch: number, honest: number, promise: string }} asked
 * @returns {Mechanism} */
export function momentsRow(task, { features, labels, batch, honest, promise }) {
  const { delta, epsilon, grid, unit } = task.privacy;
  const length = (features * (features + 1)) / 2 + features * labels;
  const own = unit === "device" ? batch : 1;
  /** @param {number} clip */
  const share = (clip) => {
    const l2 = moved(own, clip);
    return divide(momentsVariance(l2, l1Of(l2, length), epsilon.moments, delta), whole(honest));
  };
  let clip = FINEST_CLIP;
  while (clip > 1 && compare(share(clip), whole(LARGEST_SHARE ** 2)) > 0) clip /= 2;
  if (grid !== null) clip = clipOf(grid, clip);
  if (batch * clip * clip >= EXACT) refuseTask("the sums of its samples are not exact in 53 bits");
  const variance = share(clip);
  /** @param {number} samples @param {number} shares */
  const loss = (samples, shares) => {
    const l2 = moved(samples, clip);
    return momentsLoss(l2, l1Of(l2, length), multiply(whole(shares), variance));
  };
  return {
    form: "gram",
    norm: "l2",
    bound: clip,
    step: fraction(1n, BigInt(clip)),
    length,
    features,
    covers: { start: 0, stop: batch },
    whole: false,
    observer: "aggregate",
    adjacency: unit === "device" ? "replace-device" : "replace-sample",
    law: { kind: "skellam", variance },
    losses: {
      loss: loss(own, honest),
      deviceLoss: loss(batch, honest),
      alone: loss(own, 1),
      deviceAlone: loss(batch, 1),
    },
    promise,
    schedule: null,
  };
}

/** @param {Fraction} grid @param {number} finest @returns {number} */
function clipOf(grid, finest) {
  const wanted = toNumber(divide(whole(1), grid));
  const fits = Number.isInteger(Math.log2(wanted)) && wanted >= 1 && wanted <= finest;
  return fits ? wanted : refuseTask(`privacy.grid is not a power of two from ${1 / finest} to 1`);
}

/** The moments with this device's share of the noise: the diagonal, what is above it row by row, then features times
 * labels. @param {Mechanism} row @param {readonly Row[]} contributions @param {Source} noise @returns {Float64Array} */
export function drawMoments(row, contributions, noise) {
  const features = row.features ?? 0;
  const width = row.length / features - (features + 1) / 2 + features; // features and labels
  const total = momentNoise(row, features, noise);
  for (const each of contributions) {
    const h = stepsOf(each, 0, features, row);
    addProducts(total, h, stepsOf(each, features, width, row));
  }
  return total;
}

/** A part of a row in grid steps, of integer norm at most the clip; zero where it cannot be used. @param {Row} row
 * @param {number} from @param {number} to @param {Mechanism} grid @returns {Float64Array} */
function stepsOf(row, from, to, { bound, step }) {
  const [length, unit] = [to - from, toNumber(step)];
  const scaled = Float64Array.from({ length }, (_, at) => row[from + at] / unit);
  if (!scaled.every((value) => Math.abs(value) <= TOO_LARGE)) return new Float64Array(length);
  const size = Math.sqrt(squares(scaled));
  const steps = scaled.map((value) => Math.trunc(value * (bound / Math.max(size, bound))));
  return squares(steps) <= bound * bound ? steps : new Float64Array(length);
}

/** @param {Float64Array} row */
function squares(row) {
  return row.reduce((sum, value) => sum + value * value, 0);
}

/** Adds h h^T and h y^T in their order. @param {Float64Array} total @param {Float64Array} h @param {Float64Array} y */
function addProducts(total, h, y) {
  let at = 0;
  for (const value of h) total[at++] += value * value;
  h.forEach((value, row) => {
    for (let column = row + 1; column < h.length; column++) total[at++] += value * h[column];
  });
  for (const value of h) for (const label of y) total[at++] += value * label;
}

/** One share of the noise: of its whole variance on the diagonal and beside the labels, of half of it off the diagonal.
 * @param {Mechanism} row @param {number} features @param {Source} noise @returns {Float64Array} */
function momentNoise({ law, length }, features, noise) {
  const total = new Float64Array(length);
  if (law.kind !== "skellam") throw new Error("Moments have Skellam noise.");
  const parts = Math.max(1, Number(ceiling(divide(law.variance, whole(LARGEST_PART ** 2)))));
  const each = divide(law.variance, whole(parts));
  const above = (features * (features - 1)) / 2;
  const places = [
    { begin: 0, size: features, variance: each },
    { begin: features, size: above, variance: divide(each, whole(2)) },
    { begin: features + above, size: length - features - above, variance: each },
  ];
  for (let part = 0; part < parts; part++) {
    for (const { begin, size, variance } of places) {
      noise.skellam(variance, size).forEach((value, at) => (total[begin + at] += value));
    }
  }
  return total;
}
