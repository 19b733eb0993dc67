/**
 * Exact fractions in lowest terms, in BigInt. No function here rounds but `toNumber`, which says so.
 * Mirrors Python's `fractions.Fraction` and src/crowdml/exact.py.
 *
 * @typedef {{ readonly top: bigint, readonly bottom: bigint }} Fraction
 */

/** Characters of a number that people write. */
const LONGEST = 1000;

/** @param {bigint} top @param {bigint} [bottom] @returns {Fraction} */
export function fraction(top, bottom = 1n) {
  if (bottom === 0n) throw new RangeError("A fraction does not divide by zero.");
  const shared = gcd(top < 0n ? -top : top, bottom < 0n ? -bottom : bottom);
  const sign = bottom < 0n ? -1n : 1n;
  return { top: (sign * top) / shared, bottom: (sign * bottom) / shared };
}

export const ZERO = fraction(0n);
export const ONE = fraction(1n);

/** @param {bigint} a @param {bigint} b @returns {bigint} the greatest common divisor; of two zeros 1 */
function gcd(a, b) {
  while (b) [a, b] = [b, a % b];
  return a || 1n;
}

/** @param {number | bigint} number a whole number @returns {Fraction} */
export function whole(number) {
  return { top: BigInt(number), bottom: 1n };
}

/** @param {Fraction} a @param {Fraction} b @returns {Fraction} */
export function add(a, b) {
  return fraction(a.top * b.bottom + b.top * a.bottom, a.bottom * b.bottom);
}

/** @param {Fraction} a @param {Fraction} b @returns {Fraction} */
export function subtract(a, b) {
  return fraction(a.top * b.bottom - b.top * a.bottom, a.bottom * b.bottom);
}

/** @param {Fraction} a @param {Fraction} b @returns {Fraction} */
export function multiply(a, b) {
  return fraction(a.top * b.top, a.bottom * b.bottom);
}

/** @param {Fraction} a @param {Fraction} b @returns {Fraction} */
export function divide(a, b) {
  return fraction(a.top * b.bottom, a.bottom * b.top);
}

/** @param {Fraction} a @returns {Fraction} */
export function square(a) {
  return { top: a.top * a.top, bottom: a.bottom * a.bottom };
}

/** @param {Fraction} a @param {Fraction} b @returns {number} below zero, zero or above, as a is to b */
export function compare(a, b) {
  const difference = a.top * b.bottom - b.top * a.bottom;
  return difference < 0n ? -1 : difference > 0n ? 1 : 0;
}

/** @param {Fraction} a @param {Fraction} b @returns {Fraction} */
export function least(a, b) {
  return compare(a, b) <= 0 ? a : b;
}

/** @param {Fraction} a @param {Fraction} b @returns {Fraction} */
export function most(a, b) {
  return compare(a, b) >= 0 ? a : b;
}

/** @param {Fraction} a @returns {bigint} the largest whole number that is at most a */
export function floor(a) {
  return floorDivide(a.top, a.bottom);
}

/** @param {Fraction} a @returns {bigint} the least whole number that is at least a */
export function ceiling(a) {
  return -floorDivide(-a.top, a.bottom);
}

/** The nearest whole number, the even one of two: as Python's `round`. @param {Fraction} a @returns {bigint} */
export function round(a) {
  const low = floor(a);
  const twice = compare(subtract(a, whole(low)), fraction(1n, 2n));
  return twice > 0 || (twice === 0 && low & 1n) ? low + 1n : low;
}

/** @param {bigint} top @param {bigint} bottom above zero @returns {bigint} rounded down */
export function floorDivide(top, bottom) {
  const quotient = top / bottom;
  return top % bottom < 0n ? quotient - 1n : quotient;
}

/** The whole square root, rounded down. @param {bigint} n @returns {bigint} */
export function wholeRoot(n) {
  if (n < 2n) return n;
  let root = 1n << BigInt((bitLength(n) + 1) >> 1);
  for (;;) {
    const next = (root + n / root) >> 1n;
    if (next >= root) return root;
    root = next;
  }
}

/** @param {bigint} n not below zero @returns {number} how many binary digits it has; 0 has none */
export function bitLength(n) {
  return n === 0n ? 0 : n.toString(16).length * 4 - Math.clz32(parseInt(n.toString(16)[0], 16)) + 28;
}

/** The nearest float, the even one of two; infinite beyond 2^900. @param {Fraction} a @returns {number} */
export function toNumber(a) {
  if (a.top === 0n) return 0;
  const size = a.top < 0n ? -a.top : a.top;
  const shift = bitLength(size) - bitLength(a.bottom) - 64;
  if (shift > 900) return a.top < 0n ? -Infinity : Infinity;
  if (shift < -1020) throw new RangeError("A number below 2^-950 has no place here.");
  const [top, bottom] = shift < 0 ? [size << BigInt(-shift), a.bottom] : [size, a.bottom << BigInt(shift)];
  const digits = (top / bottom) | (top % bottom ? 1n : 0n); // 64 digits, and whether anything follows: rounded once
  return (a.top < 0n ? -1 : 1) * Number(digits) * 2 ** shift;
}

/** The number that a float is, exactly. @param {number} number finite @returns {Fraction} */
export function fromNumber(number) {
  if (!Number.isFinite(number)) throw new RangeError(`${number} is no fraction.`);
  let shift = 0n;
  let scaledUp = number;
  for (; !Number.isInteger(scaledUp); scaledUp *= 2) shift++;
  return fraction(BigInt(scaledUp), 1n << shift);
}

/** The number that somebody wrote: 0.1, 1e-6, 3 or 1/10. Exact. @param {string} text @returns {Fraction} */
export function parse(text) {
  const found = text.length <= LONGEST && /^(-?)([0-9]+)(?:\.([0-9]+))?(?:e([+-]?[0-9]{1,3})|\/([0-9]+))?$/i.exec(text);
  if (!found) throw new RangeError(`${text.slice(0, 40)} is not a number such as 0.1, 1e-6 or 1/10.`);
  const [, sign, digits, decimals = "", exponent = "0", bottom = "1"] = found;
  const power = Number(exponent) - decimals.length;
  const top = BigInt(`${sign}${digits}${decimals}`);
  if (decimals && found[5]) throw new RangeError(`${text} has a point and a bar.`);
  const ten = 10n ** BigInt(Math.abs(power));
  return power < 0 ? fraction(top, ten * BigInt(bottom)) : fraction(top * ten, BigInt(bottom));
}

/** A setting as the fraction that its writer meant: the float 0.1 is 1/10, not the binary number beside it.
 * @param {number} number @returns {Fraction} */
export function exact(number) {
  return parse(String(number));
}

/** `3/1000`, or a whole number without a bar. @param {Fraction} a @returns {string} */
export function toText(a) {
  return a.bottom === 1n ? `${a.top}` : `${a.top}/${a.bottom}`;
}
