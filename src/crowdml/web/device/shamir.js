/**
 * Secrets of 32 bytes cut into shares: any `threshold` of them give the secret back, fewer say nothing at all.
 *
 * Shamir 1979 over the field of p = 2^31 - 1: a secret is nine limbs of 29 bits, each the constant term of a polynomial
 * of its own. A share is the nine values at the holder's point, 36 bytes. Mirrors src/crowdml/secagg/shamir.py.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 */

import { toHex } from "./bytes.js";
import { elementBytes } from "./ring.js";

const P = 2n ** 31n - 1n;
const LIMBS = 9;
const LIMB_BITS = 29n;
const SECRET_SIZE = 32;
export const SHARE_SIZE = 4 * LIMBS;

/** The shares of several secrets, for each holder all of them in a row. Points are whole numbers, each once, none zero.
 * @param {readonly Bytes[]} secrets @param {number} threshold @param {readonly number[]} points
 * @param {(size: number) => Uint8Array} entropy @returns {Bytes[]} */
export function splitSecrets(secrets, threshold, points, entropy) {
  if (!(threshold >= 1 && threshold <= points.length)) throw new RangeError("More shares are needed than there are.");
  if (new Set(points).size !== points.length || points.includes(0)) {
    throw new RangeError("A holder has a point of its own.");
  }
  const limbs = secrets.flatMap(limbsOf);
  const drawn = uniform((threshold - 1) * limbs.length, entropy);
  const higher = Array.from(
    { length: threshold - 1 },
    (_, at) => drawn.slice(at * limbs.length, (at + 1) * limbs.length),
  );
  return points.map((point) => elementBytes(Uint32Array.from(valuesAt(BigInt(point), [limbs, ...higher]), Number)));
}

/** The values of polynomials at a point, by Horner's rule. @param {bigint} point
 * @param {readonly bigint[][]} coefficients the constants first @returns {bigint[]} */
function valuesAt(point, coefficients) {
  const none = coefficients[0].map(() => 0n);
  return coefficients.reduceRight((values, row) => values.map((value, at) => (value * point + row[at]) % P), none);
}

/** The secret of a threshold of shares; null where its limbs are no secret of 32 bytes. @param {readonly number[]}
 * points
 * @param {readonly Uint8Array[]} shares @returns {Bytes | null} */
export function joinShares(points, shares) {
  const places = points.map(BigInt);
  const weights = places.map((point, own) => weightAtZero(point, places.filter((_, at) => at !== own)));
  const limbs = Array.from({ length: LIMBS }, (_, limb) => {
    const terms = shares.map((share, holder) => weights[holder] * limbAt(share, limb));
    return terms.reduce((sum, term) => (sum + term) % P, 0n);
  });
  return secretOf(limbs);
}

/** Lagrange's weight at zero. @param {bigint} point @param {readonly bigint[]} others @returns {bigint} */
function weightAtZero(point, others) {
  const above = others.reduce((product, other) => (product * other) % P, 1n);
  const below = others.reduce((product, other) => (product * (other - point + P)) % P, 1n);
  return (above * inverse(below)) % P;
}

/** 1 / value by Fermat. @param {bigint} value @returns {bigint} */
function inverse(value) {
  let [power, base] = [1n, value];
  for (let exponent = P - 2n; exponent; exponent >>= 1n) {
    if (exponent & 1n) power = (power * base) % P;
    base = (base * base) % P;
  }
  return power;
}

/** @param {Uint8Array} share @param {number} limb @returns {bigint} */
function limbAt(share, limb) {
  return BigInt(new DataView(share.buffer, share.byteOffset, share.length).getUint32(4 * limb, true)) % P;
}

/** @param {Bytes} secret @returns {bigint[]} */
function limbsOf(secret) {
  if (secret.length !== SECRET_SIZE) throw new RangeError(`A secret has ${SECRET_SIZE} bytes.`);
  const number = BigInt(`0x${toHex(secret.toReversed())}`);
  return Array.from({ length: LIMBS }, (_, limb) => (number >> (LIMB_BITS * BigInt(limb))) & (2n ** LIMB_BITS - 1n));
}

/** @param {readonly bigint[]} limbs @returns {Bytes | null} */
function secretOf(limbs) {
  if (limbs.some((limb) => limb >> LIMB_BITS)) return null;
  const number = limbs.reduceRight((sum, limb) => (sum << LIMB_BITS) | limb, 0n);
  if (number >> BigInt(8 * SECRET_SIZE)) return null;
  return Uint8Array.from({ length: SECRET_SIZE }, (_, at) => Number((number >> BigInt(8 * at)) & 0xffn));
}

/** Uniform elements of the field: 31 bits each, and the one value that is none of it is thrown away.
 * @param {number} count @param {(size: number) => Uint8Array} entropy @returns {bigint[]} */
function uniform(count, entropy) {
  /** @type {bigint[]} */
  const found = [];
  while (found.length < count) {
    const bytes = entropy(4 * (count - found.length));
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
    for (let at = 0; at < bytes.length; at += 4) {
      const word = BigInt(view.getUint32(at, true)) & P;
      if (word !== P) found.push(word);
    }
  }
  return found;
}
