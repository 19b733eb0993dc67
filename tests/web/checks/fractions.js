/** Fractions: exact, in lowest terms, and rounded to a float once. */

import * as fractions from "../../../src/crowdml/web/device/fractions.js";
import { check, equal, refused } from "./expect.js";

const { fraction, parse, toNumber, toText } = fractions;

export function checks() {
  return [
    check("numbers are read as they are written", () => {
      const cases = { "0.1": "1/10", "1e-6": "1/1000000", "1E+2": "100", "-2.50": "-5/2", "6/4": "3/2", "007": "7" };
      for (const [text, value] of Object.entries(cases)) equal(toText(parse(text)), value, text);
      equal(toText(fractions.exact(1e-6)), "1/1000000", "a float as it prints");
      equal(toText(fractions.fromNumber(0.1)), "3602879701896397/36028797018963968", "a float as it is");
    }),
    check("what is no number is refused", async () => {
      for (const text of ["", "1.", ".5", "1/0", "NaN", "0x1", "1 ", "1.5/2", "1e9999", "1".repeat(1001)]) {
        equal((await refused(() => parse(text))).name, "RangeError", text);
      }
    }),
    check("rounding is down, up, or to the nearest", () => {
      const cases = [[7n, 2n, 3n, 4n, 4n], [5n, 2n, 2n, 3n, 2n], [-7n, 2n, -4n, -3n, -4n], [-1n, 3n, -1n, 0n, 0n]];
      for (const [top, bottom, low, high, near] of cases) {
        const value = fraction(top, bottom);
        equal([fractions.floor(value), fractions.ceiling(value), fractions.round(value)], [low, high, near], "rounded");
      }
      for (const n of [0n, 1n, 2n, 3n, 4n, 99n, 10n ** 40n, 10n ** 40n - 1n, (1n << 107n) + 12345n]) {
        const root = fractions.wholeRoot(n);
        equal(root * root <= n && n < (root + 1n) ** 2n, true, `the root of ${n}`);
      }
    }),
    check("a float is the nearest one, the even one of two", () => {
      const even = (1n << 53n) + 1n; // half way between two floats
      equal(toNumber(fraction(even)), 2 ** 53, "down to even");
      equal(toNumber(fraction(even + 2n)), 2 ** 53 + 4, "up to even");
      equal(toNumber(fraction(even * 10n ** 30n + 1n, 10n ** 30n)), 2 ** 53 + 2, "a little more than half");
      for (const number of [0.1, 1 / 3, 1e-280, 12345.678, 2 ** 800, -5e-7]) {
        equal(toNumber(fractions.fromNumber(number)), number, "there and back");
      }
      equal(toNumber(parse("0.3")), 0.3, "a decimal");
    }),
    check("bits are counted", () => {
      for (const n of [0, 1, 2, 7, 8, 255, 256, 2 ** 40]) {
        equal(fractions.bitLength(BigInt(n)), n.toString(2).length - (n ? 0 : 1), `${n}`);
      }
    }),
  ];
}
