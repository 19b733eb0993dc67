/** grid.json: sums of clipped, truncated rows; counts, and vectors that are rounded to the nearest step. */

import { parse, toNumber } from "../../../src/crowdml/web/device/fractions.js";
import { countCells, roundOnGrid, sumOnGrid } from "../../../src/crowdml/web/device/grid.js";
import { check, equal, refused } from "./expect.js";

/**
 * @typedef {{ name: string, norm: "l1" | "l2", step: string, clip: number, rows: (number | string)[][], sum: number[]
 * }} Case
 * @param {Case[]} vectors
 */
export function checks(vectors) {
  return [
    ...vectors.map(({ name, norm, step, clip, rows, sum }) =>
      check(name, () => {
        const numbers = rows.map((row) => Float32Array.from(row, Number));
        equal(sumOnGrid(numbers, sum.length, { step: toNumber(parse(step)), norm, clip }), sum, "the sum");
      })
    ),
    check("a clip that no grid has is refused", async () => {
      for (const clip of [0, 46_001, NaN]) await refused(() => sumOnGrid([], 1, { step: 1, norm: "l2", clip }));
    }),
    check("a sample is in one cell at most", () => {
      equal(countCells([0, 2, -1, 2, 9, NaN], 3), [1, 0, 2], "the counts");
    }),
    check("to the nearest step, the even one of two, within the limit", () => {
      equal(
        roundOnGrid([0.5, 1.5, -0.5, -1.5, 2.4, 99, -99], 7, { step: 1, limit: 7 }),
        [0, 2, 0, -2, 2, 7, -7],
        "steps",
      );
      equal(roundOnGrid([1, NaN, 3], 3, { step: 1, limit: 7 }), [0, 0, 0], "with a number that is none");
      equal(roundOnGrid([Infinity, 1, 3], 3, { step: 1, limit: 7 }), [0, 0, 0], "with an infinite one");
    }),
  ];
}
