/** Gradients and predictions for tests in Python. */

import { prepareRow } from "../../src/crowdml/web/device/features.js";
import { parse } from "../../src/crowdml/web/device/fractions.js";
import { makeMap, readMap } from "../../src/crowdml/web/device/maps.js";
import { labelCells, makeModel, mistakeCells, sampleGradients } from "../../src/crowdml/web/device/models.js";

/** @param {(number | string)[]} row */
function numbers(row) {
  return Float64Array.from(row, Number); // JSON has no NaN: it comes as a text
}

/** @param {{ [key: string]: unknown }} table @param {number} dimension @param {number} classes @param {number[]}
 * weights
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

/** Rows as a task takes them. @param {{ low: string[] | null, high: string[] | null, norm: "l1" | "l2", bound: string
 * }} task
 * @param {(number | string)[][]} x */
export function prepared({ low, high, norm, bound }, x) {
  const given = {
    low: low && low.map(parse),
    high: high && high.map(parse),
    norm: { kind: norm, bound: parse(bound) },
  };
  return x.map((row) => Array.from(prepareRow({ ...given, dimension: row.length }, numbers(row))));
}

/** A public map's features. @param {{ [key: string]: number | string }} settings @param {(number | string)[][]} x */
export async function mapped(settings, x) {
  const read = Object.entries(settings).map((
    [key, value],
  ) => [key, typeof value === "string" && key !== "kind" ? parse(value) : value]);
  const map = await makeMap(readMap(Object.fromEntries(read), "map"), x[0].length);
  return x.map((row) => Array.from(map.of(numbers(row))));
}
