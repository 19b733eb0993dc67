/**
 * A multi-layer perceptron: any depth, three activations, softmax or squared error over classes.
 * weights: layer by layer, a matrix [n_in, n_out] by rows, then its biases. Mirrors src/crowdml/models/mlp.py.
 *
 * No bound holds for its gradients: a task gives one, `protocol.clip`. What enters a unit, a score or a slope counts as
 * zero where it is not finite or beyond 1e15; a sample with such a feature has a gradient of zero.
 *
 * @typedef {import("./models.js").Numbers} Numbers
 * @typedef {import("./models.js").Model} Model
 * @typedef {object} Settings
 * @property {readonly number[]} widths units of each layer, the features first and the scores last
 * @property {"relu" | "tanh" | "sigmoid"} activation
 * @property {"softmax" | "squared"} top
 *
 * @typedef {{ readonly entering: Float64Array[], readonly scores: Float64Array }} Passed
 */

import { Problem } from "./problems.js";
import { argmax, isClass, softmaxSlopes } from "./scores.js";

const ROOT = 1e15;
const MOST_WEIGHTS = 10_000_000;

/** @param {{ [key: string]: unknown }} settings @param {number} dimension @param {number} classes @returns {Model} */
export function networkModel(settings, dimension, classes) {
  // the seed makes the first weights, which come from the server
  const { hidden, seed: _, activation = "relu", top = "softmax", ...unknown } = settings;
  if (Object.keys(unknown).length) refuse(`model.${Object.keys(unknown)[0]} is a setting that a browser does not know`);
  if (!Array.isArray(hidden) || !hidden.length || !hidden.every(isWidth)) refuse("model.hidden is no list of units");
  if (activation !== "relu" && activation !== "tanh" && activation !== "sigmoid") return refuse("model.activation");
  if (top !== "softmax" && top !== "squared") return refuse("model.top is neither softmax nor squared");
  const widths = [dimension, .../** @type {number[]} */ (hidden), classes];
  const size = widths.slice(1).reduce((total, out, at) => total + (widths[at] + 1) * out, 0);
  if (size > MOST_WEIGHTS) refuse(`the model has ${size} weights, and a device takes ${MOST_WEIGHTS} at most`);
  return modelOf({ widths, activation, top }, size);
}

/** @param {string} why @returns {never} */
function refuse(why) {
  throw new Problem("invalid-task", `A browser cannot take part in this task: ${why}.`);
}

/** @param {unknown} width */
function isWidth(width) {
  return Number.isSafeInteger(width) && Number(width) >= 1;
}

/** @param {Settings} settings @param {number} size @returns {Model} */
function modelOf(settings, size) {
  const classes = settings.widths[settings.widths.length - 1];
  return {
    shape: [size],
    size,
    cells: classes,
    convex: false,
    bounded: false,
    gradient: (weights, x, y) => gradientOf(settings, size, weights, x, y),
    predict: (weights, x) => argmax(forward(settings, weights, x).scores),
    bound: () => refuse("a network's gradient has no bound, and the task gives no protocol.clip"),
    smoothness: () => null, // products of layers: no constant holds for all weights
  };
}

/** What enters each layer, and the scores. @param {Settings} settings @param {Numbers} weights @param {Numbers} x
 * @returns {Passed} */
function forward({ widths, activation }, weights, x) {
  const entering = [Float64Array.from(x, finite)];
  let at = 0;
  for (let layer = 1;; layer++) {
    const [into, out] = [widths[layer - 1], widths[layer]];
    const found = times(weights, at, entering[layer - 1], out).map(finite);
    at += (into + 1) * out;
    if (layer === widths.length - 1) return { entering, scores: usable(x) ? found : new Float64Array(out) };
    entering.push(found.map((value) => activate(activation, value)));
  }
}

/** One layer: entering @ matrix + biases. @param {Numbers} weights @param {number} at where its matrix begins
 * @param {Float64Array} entering @param {number} out @returns {Float64Array} */
function times(weights, at, entering, out) {
  const found = new Float64Array(out);
  entering.forEach((value, row) => {
    const start = at + row * out;
    if (value !== 0) { for (let column = 0; column < out; column++) found[column] += value * weights[start + column]; }
  });
  const biases = at + entering.length * out;
  for (let column = 0; column < out; column++) found[column] += weights[biases + column];
  return found;
}

/** @param {Settings["activation"]} activation @param {number} value */
function activate(activation, value) {
  if (activation === "relu") return Math.max(value, 0);
  return activation === "tanh" ? Math.tanh(value) : 0.5 + 0.5 * Math.tanh(0.5 * value);
}

/** The slope of an activation where its value is `value`. @param {Settings["activation"]} activation
 * @param {number} value */
function slopeAt(activation, value) {
  if (activation === "relu") return value > 0 ? 1 : 0;
  return activation === "tanh" ? 1 - value * value : value * (1 - value);
}

/** @param {Settings} settings @param {number} size @param {Numbers} weights @param {Numbers} x @param {number} y
 * @returns {Float64Array} */
function gradientOf(settings, size, weights, x, y) {
  const gradient = new Float64Array(size);
  const { entering, scores } = forward(settings, weights, x);
  if (!usable(x) || !isClass(y, scores.length)) return gradient;
  /** @type {Float64Array} */
  let slopes = topSlopes(settings.top, scores, y).map(finite);
  let end = size;
  for (let layer = entering.length - 1; layer >= 0; layer--) {
    const start = end - (entering[layer].length + 1) * slopes.length;
    writeProducts(gradient, start, entering[layer], slopes);
    if (layer > 0) slopes = backwards(settings.activation, weights, start, entering[layer], slopes);
    end = start;
  }
  return gradient;
}

/** The loss's slope in the scores. @param {Settings["top"]} top @param {Float64Array} scores @param {number} y */
function topSlopes(top, scores, y) {
  if (top === "squared") return scores.map((score, at) => score - Number(at === y));
  return softmaxSlopes(scores, y) ?? new Float64Array(scores.length);
}

/** @param {Float64Array} gradient @param {number} start @param {Float64Array} entering @param {Float64Array} slopes */
function writeProducts(gradient, start, entering, slopes) {
  const out = slopes.length;
  entering.forEach((value, row) => {
    for (let column = 0; column < out; column++) gradient[start + row * out + column] = value * slopes[column];
  });
  gradient.set(slopes, start + entering.length * out);
}

/** The slopes in what entered the layer before. @param {Settings["activation"]} activation @param {Numbers} weights
 * @param {number} start @param {Float64Array} entering @param {Float64Array} slopes @returns {Float64Array} */
function backwards(activation, weights, start, entering, slopes) {
  return entering.map((value, row) => {
    let back = 0;
    const at = start + row * slopes.length;
    for (let column = 0; column < slopes.length; column++) back += slopes[column] * weights[at + column];
    return finite(back * slopeAt(activation, value));
  });
}

/** @param {number} value */
function finite(value) {
  return Math.abs(value) <= ROOT ? value : 0; // NaN is not
}

/** @param {Numbers} x */
function usable(x) {
  return x.every((value) => Math.abs(value) <= ROOT);
}
