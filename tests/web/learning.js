/** Gradients and predictions for tests in Python. */

import { labelCells, makeModel, mistakeCells, sampleGradients } from "../../src/crowdml/web/device/models.js";

/** @param {(number | string)[]} row */
function numbers(row) {
  return Float64Array.from(row, Number); // JSON has no NaN: it comes as a text
}

/** @param {{ [key: string]: unknown }} table @param {number} dimension @param {number} classes @param {number[]} weights
 * @param {(number | string)[][]} x @param {number[]} y @param {number} radius */
export function learned(table, dimension, classes, weights, x, y, radius) {
  const model = makeModel(table, dimension, classes);
  const samples = { x: x.map(numbers), y };
  return {
    shape: model.shape,
    gradients: sampleGradients(model, numbers(weights), samples).map((row) => Array.from(row)),
    mistakes: mistakeCells(model, numbers(weights), samples).map((cell) => cell + 1),
    labels: labelCells(model, samples),
    bounds: model.bounded ? [model.bound("l1", radius), model.bound("l2", radius)] : null,
    smoothness: model.smoothness(radius),
  };
}
