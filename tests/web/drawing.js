/** Draws for tests in Python: from given bytes, or from the browser's own entropy. */

import { fromHex, sha256, toHex, toUtf8 } from "../../src/crowdml/web/device/bytes.js";
import { parse } from "../../src/crowdml/web/device/fractions.js";
import { discreteGaussian, geometric, skellam, thresholds } from "../../src/crowdml/web/device/laws.js";
import { forgetTables, noiseFrom, systemEntropy } from "../../src/crowdml/web/device/noise.js";

/** @typedef {"discreteLaplace" | "discreteGaussian" | "skellam"} Name */

/** @param {Name} law @param {string} parameter @param {number} length @param {string | null} hex
 * @returns {{ values: number[], used: number }} */
export function draws(law, parameter, length, hex) {
  const data = hex === null ? null : fromHex(hex);
  let used = 0;
  const source = noiseFrom((size) => (data === null ? systemEntropy(size) : data.subarray(used, used += size)));
  return { values: Array.from(source[law](parse(parameter), length)), used };
}

/** Milliseconds for the first draw, which makes the table, and for `length` draws after that.
 * @param {string} sigma @param {number} length */
export function times(sigma, length) {
  forgetTables();
  const begin = performance.now();
  noiseFrom().discreteGaussian(parse(sigma), 1);
  const made = performance.now();
  noiseFrom().discreteGaussian(parse(sigma), length);
  return { table: made - begin, draws: performance.now() - made };
}

/** The SHA-256 of a law's table, one number a line, and how long the table is. @param {string} law
 * @param {string} parameter @param {number | null} below @param {number} bits */
export async function table(law, parameter, below, bits) {
  const value = parse(parameter);
  const made = {
    discreteGaussian: discreteGaussian(value),
    skellam: skellam(value),
    geometric: geometric(value, below),
  };
  const found = thresholds(made[/** @type {keyof made} */ (law)], bits);
  return [found.length, toHex(await sha256(toUtf8(found.join("\n"))))];
}
