/** draws.json: the same integers for the same random bytes, none of them left over. */

import { fromHex } from "../../../src/crowdml/web/device/bytes.js";
import { fraction, parse, toNumber } from "../../../src/crowdml/web/device/fractions.js";
import { discreteGaussian, expMinus, geometric, skellam, thresholds } from "../../../src/crowdml/web/device/laws.js";
import { blockOf, noiseFrom, systemEntropy } from "../../../src/crowdml/web/device/noise.js";
import { check, equal, holds, refused } from "./expect.js";

/**
 * @typedef {{ law: string, scale?: string, sigma?: string, variance?: string, bytes: string, block?: number,
 * values: number[] }} Case
 */

/** @param {Case[]} vectors */
export function checks(vectors) {
  return [
    ...vectors.map((row, at) => check(`${at} ${row.law} ${parameterOf(row)}`, () => drawn(row))),
    check("a table encloses the distribution, at any precision", enclosed),
    check("exp(-x) is enclosed within two units", exponential),
    check("draws on either side of each threshold fall on its side", sides),
    check("entropy comes in pieces that a browser gives, and is never the same", () => {
      const bytes = systemEntropy(200_001);
      equal(bytes.length, 200_001, "the bytes");
      holds(new Set(bytes.subarray(199_000)).size > 200, "the last piece is filled");
      holds(systemEntropy(16).join() !== systemEntropy(16).join(), "two calls differ");
    }),
    check("what no device draws is refused", async () => {
      const source = noiseFrom();
      for (
        const run of [
          () => source.discreteGaussian(parse("32769"), 1),
          () => source.discreteLaplace(parse("0"), 1),
          () => source.skellam(parse("2000000000000"), 1),
        ]
      ) {
        equal((await refused(run)).name, "RangeError", "the error");
      }
      const short = noiseFrom((size) => new Uint8Array(size - 1));
      holds((await refused(() => short.discreteGaussian(parse("2"), 3))).message.includes("entropy"), "a short source");
    }),
    check("a large Skellam share is the sum of several draws", () => {
      const drawnAtOnce = noiseFrom().skellam(parse("3221225472"), 400); // 3 * 2^30
      const mean = drawnAtOnce.reduce((sum, value) => sum + value * value, 0) / 400 / 3221225472;
      holds(mean > 0.6 && mean < 1.5, `the variance is ${mean} times what it should be`);
    }),
  ];
}

/** @param {Case} row */
function parameterOf(row) {
  return row.scale ?? row.sigma ?? row.variance ?? "";
}

/** @param {Case} row */
function drawn(row) {
  const data = fromHex(row.bytes);
  let used = 0;
  const source = noiseFrom((size) => data.subarray(used, used += size));
  const ask = {
    "discrete-laplace": source.discreteLaplace,
    "discrete-gaussian": source.discreteGaussian,
    skellam: source.skellam,
  };
  const parameter = parse(parameterOf(row));
  const found = ask[/** @type {keyof ask} */ (row.law)](parameter, row.values.length);
  equal(found, row.values, "the draws");
  equal(used, data.length, "the bytes that were read");
  if (row.block) equal(blockOf(parameter), row.block, "the block");
}

function enclosed() {
  const laws = [
    geometric(parse("7/2")),
    geometric(parse("7/2"), 8),
    discreteGaussian(parse("22/7")),
    skellam(parse("10")),
  ];
  for (const law of laws) {
    const [coarse, fine] = [thresholds(law, 63), thresholds(law, 200)];
    holds(fine.length >= coarse.length, "a finer table is no shorter");
    coarse.forEach((cut, k) => {
      const exact = fine[k] >> 137n;
      holds(cut <= exact && exact <= cut + 2n, `${law.name} at ${k}`);
    });
  }
}

/** Words around thresholds, with zeros behind them: the draw is where that number lies in a table of 200 bits, and what
 * lies less than 2 above a threshold takes a second look. */
function sides() {
  const sigma = parse("22/7");
  const law = discreteGaussian(sigma);
  const [table, fine] = [thresholds(law, 63), thresholds(law, 200)];
  for (const cut of table.filter((_, k) => k % 3 === 0)) {
    for (const number of [-2n, -1n, 0n, 1n, 2n, 3n].map((off) => cut + off)) {
      if (number < 0n || number >= 2n ** 63n) continue;
      const { value, looks } = drawnFrom(sigma, number);
      const below = table.filter((each) => each <= number).length;
      const open = below === table.length || (below > 0 && number - table[below - 1] < 2n);
      equal(value, fine.filter((each) => each <= number << 137n).length, `the draw of ${number}`);
      equal(looks > 1, open, `a second look at ${number}`);
    }
  }
}

/** @param {import("../../../src/crowdml/web/device/fractions.js").Fraction} sigma @param {bigint} number 63 bits */
function drawnFrom(sigma, number) {
  const word = new Uint8Array(8);
  new DataView(word.buffer).setBigUint64(0, number << 1n, true);
  let looks = 0;
  const [value] = noiseFrom((size) => (looks++ ? new Uint8Array(size) : word)).discreteGaussian(sigma, 1);
  return { value, looks };
}

function exponential() {
  for (const [top, bottom] of [[1n, 7n], [3n, 1n], [0n, 1n], [99n, 2n], [1n, 10n ** 9n]]) {
    const x = fraction(top, bottom);
    const [coarse, fine] = [expMinus(x, 128n), expMinus(x, 300n)];
    holds(coarse <= fine >> 172n && fine >> 172n <= coarse + 2n, "two precisions agree");
    const off = Math.abs(Number(fine >> 240n) / 2 ** 60 - Math.exp(-toNumber(x)));
    holds(off < 1e-15, `exp is off by ${off}`);
  }
}
