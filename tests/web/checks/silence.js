/** No noise, for vectors of everything else. Nothing drawn from it is private. */

/** @type {import("../../../src/crowdml/web/device/noise.js").Source} */
export const silence = {
  discreteLaplace: (_, length) => new Int32Array(length),
  discreteGaussian: (_, length) => new Int32Array(length),
  skellam: (_, length) => new Int32Array(length),
};

/** Flat numbers as rows of so many. @param {number[]} values @param {number} width @returns {Float64Array[]} */
export function rowsOf(values, width) {
  return Array.from(
    { length: values.length / width },
    (_, row) => Float64Array.from(values.slice(row * width, (row + 1) * width)),
  );
}
