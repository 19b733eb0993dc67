/**
 * Models: each sample's gradient from public weights, and the bounds that privacy rests on. No noise, no state.
 * Everything is computed in float64; what leaves is put on a grid afterwards. Mirrors src/crowdml/models.
 *
 * A sample with a number that is not finite, or whose scores are beyond 1e30, has a gradient of zero; so has one whose
 * label is outside the public range. Nothing raises on a value.
 *
 * @typedef {Float64Array | Float32Array} Numbers
 * @typedef {{ readonly x: readonly Numbers[], readonly y: readonly number[] }} Samples rows of features, and labels
 * @typedef {"l1" | "l2"} Norm
 *
 * @typedef {object} Model
 * @property {readonly number[]} shape of the weights
 * @property {number} size how many weights there are
 * @property {number} cells of a label: the classes
 * @property {boolean} convex whether each sample's loss is convex in the weights
 * @property {boolean} bounded whether `bound` has an answer
 * @property {(weights: Numbers, x: Numbers, y: number) => Float64Array} gradient of one sample's loss, flat
 * @property {(weights: Numbers, x: Numbers) => number} predict a class
 * @property {(norm: Norm, radius: number) => number} bound on one gradient's norm, for features no longer than the
 * radius
 * @property {(radius: number) => number | null} smoothness Lipschitz constant of one gradient; null: it has none
 */

import { networkModel } from "./networks.js";
import { Problem } from "./problems.js";
import { argmax, isClass, softmaxSlopes } from "./scores.js";

/** A score beyond this is as good as infinite. */
const LARGEST = 1e30;

/** The model that a task names. @param {{ [key: string]: unknown }} table the task's `[model]`, without penalties
 * @param {number} dimension @param {number} classes @returns {Model} */
export function makeModel(table, dimension, classes) {
  const { kind, ...settings } = table;
  if (kind === "mlp") return networkModel(settings, dimension, classes);
  const make = { softmax: softmaxModel, logistic: logisticModel, svm: svmModel }[String(kind)];
  if (!make) return refuse(`a model of kind ${JSON.stringify(kind)} is none that a browser can learn`);
  const { bias = false, ...others } = settings;
  const unknown = Object.keys(others);
  if (unknown.length) refuse(`model.${unknown[0]} is a setting that a browser does not know`);
  if (typeof bias !== "boolean") return refuse("model.bias is not true or false");
  if (kind !== "softmax" && classes !== 2) refuse(`a model of kind "${kind}" tells two classes apart, not ${classes}`);
  return make(dimension, classes, bias);
}

/** @param {string} why @returns {never} */
function refuse(why) {
  throw new Problem("invalid-task", `A browser cannot take part in this task: ${why}.`);
}

/** weights [d, c], or [d + 1, c] with a bias; gradient x (p - e_y)^T, whose l1 norm is below 2 |x|_1 and whose l2
 * norm is below sqrt(2) |x|_2. @param {number} dimension @param {number} classes @param {boolean} bias
 * @returns {Model} */
function softmaxModel(dimension, classes, bias) {
  const rows = dimension + Number(bias);
  /** @param {Numbers} weights @param {Numbers} x */
  const scores = (weights, x) => scoresOf(weights, withBias(x, bias), classes);
  return {
    ...convexModel([rows, classes], classes, bias, { l1: 2, l2: Math.SQRT2 }, 1 / 2),
    gradient: (weights, x, y) => outer(withBias(x, bias), softmaxSlopes(scores(weights, x), y), classes),
    predict: (weights, x) => argmax(settled(scores(weights, x))),
  };
}

/** weights [d], y 0 or 1; gradient (p - y) x with p = 1 / (1 + exp(-x.w)), so |gradient| <= |x|.
 * @param {number} dimension @param {number} _ @param {boolean} bias @returns {Model} */
function logisticModel(dimension, _, bias) {
  return twoClasses(dimension, bias, 1 / 4, (score, y) => 0.5 + 0.5 * Math.tanh(0.5 * score) - y);
}

/** weights [d], y 0 or 1; gradient -s x where s x.w < 1 with s = 2 y - 1, else 0, so |gradient| <= |x|.
 * @param {number} dimension @param {number} _ @param {boolean} bias @returns {Model} */
function svmModel(dimension, _, bias) {
  return twoClasses(dimension, bias, null, (score, y) => ((2 * y - 1) * score < 1 ? 1 - 2 * y : 0));
}

/** @param {number} dimension @param {boolean} bias @param {number | null} curvature
 * @param {(score: number, y: number) => number} slope of the loss in the score @returns {Model} */
function twoClasses(dimension, bias, curvature, slope) {
  /** @param {Numbers} weights @param {Numbers} x */
  const score = (weights, x) => scoresOf(weights, withBias(x, bias), 1);
  return {
    ...convexModel([dimension + Number(bias)], 2, bias, { l1: 1, l2: 1 }, curvature),
    gradient: (weights, x, y) => {
      const scores = score(weights, x);
      const known = isClass(y, 2) && scores !== null;
      return outer(withBias(x, bias), known ? Float64Array.of(slope(scores[0], y)) : null, 1);
    },
    predict: (weights, x) => Number((score(weights, x)?.[0] ?? 0) > 0),
  };
}

/** What convex models of scores share. @param {number[]} shape @param {number} cells @param {boolean} bias
 * @param {{ l1: number, l2: number }} factor of |x| in the bound on a gradient
 * @param {number | null} curvature times |x|^2: the smoothness */
function convexModel(shape, cells, bias, factor, curvature) {
  /** @param {Norm} norm @param {number} radius */
  const reach = (norm, radius) => (!bias ? radius : norm === "l1" ? radius + 1 : Math.hypot(radius, 1));
  return {
    shape,
    size: shape.reduce((product, each) => product * each, 1),
    cells,
    convex: true,
    bounded: true,
    /** @param {Norm} norm @param {number} radius */
    bound: (norm, radius) => factor[norm] * reach(norm, radius),
    /** @param {number} radius */
    smoothness: (radius) => (curvature === null ? null : reach("l2", radius) ** 2 * curvature),
  };
}

/** @param {Numbers} x @param {boolean} bias @returns {Numbers} x, or (x, 1) */
function withBias(x, bias) {
  return bias ? Float64Array.of(...x, 1) : x;
}

/** x @ weights; null where a score is not finite or beyond 1e30. @param {Numbers} weights @param {Numbers} x
 * @param {number} classes @returns {Float64Array | null} */
function scoresOf(weights, x, classes) {
  const scores = new Float64Array(classes);
  x.forEach((value, row) => {
    for (let column = 0; column < classes; column++) scores[column] += value * weights[row * classes + column];
  });
  return scores.every((score) => Math.abs(score) <= LARGEST) ? scores : null; // false for NaN
}

/** The scores, or those of the zero sample. @param {Float64Array | null} scores */
function settled(scores) {
  return scores ?? Float64Array.of(0);
}

/** The outer product, flat; zero where the sample has no slopes. @param {Numbers} x @param {Float64Array | null} slopes
 * @param {number} columns how many slopes a sample has */
function outer(x, slopes, columns) {
  const product = new Float64Array(x.length * columns);
  if (slopes === null) return product;
  x.forEach((value, row) => slopes.forEach((slope, column) => (product[row * columns + column] = value * slope)));
  return product;
}

/** @param {Model} model @param {Numbers} weights @param {Samples} samples @returns {Float64Array[]} one a sample,
 * flat */
export function sampleGradients(model, weights, { x, y }) {
  return x.map((row, at) => model.gradient(weights, row, y[at]));
}

/** 0 where a prediction is wrong, -1 elsewhere: the cell of a sample in the count of mistakes.
 * @param {Model} model @param {Numbers} weights @param {Samples} samples @returns {number[]} */
export function mistakeCells(model, weights, { x, y }) {
  return x.map((row, at) => (isClass(y[at], model.cells) && model.predict(weights, row) !== y[at] ? 0 : -1));
}

/** The class of each label, -1 where it is none. @param {Model} model @param {Samples} samples @returns {number[]} */
export function labelCells(model, { y }) {
  return y.map((label) => (isClass(label, model.cells) ? label : -1));
}
