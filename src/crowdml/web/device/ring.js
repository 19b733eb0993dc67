/**
 * The ring Z_2^32 or Z_2^64, in which masks are uniform and cancel exactly. A vector is 32-bit words, the low half of a
 * 64-bit element first: there is no BigInt in the sums. Mirrors src/crowdml/secagg/ring.py.
 *
 * @typedef {32 | 64} Bits
 * @typedef {import("./bytes.js").Bytes} Bytes
 */

/** Signed whole numbers as elements; one outside the ring's range wraps round. @param {ArrayLike<number>} values
 * @param {Bits} bits @returns {Uint32Array} */
export function toElements(values, bits) {
  if (bits === 32) return Uint32Array.from(values, (value) => value >>> 0);
  const words = new Uint32Array(2 * values.length);
  for (let at = 0; at < values.length; at++) {
    words[2 * at] = values[at] >>> 0;
    words[2 * at + 1] = Math.floor(values[at] / 2 ** 32) >>> 0;
  }
  return words;
}

/** Elements as the signed whole numbers nearest to zero. @param {Uint32Array} words @param {Bits} bits
 * @returns {bigint[]} */
export function fromElements(words, bits) {
  if (bits === 32) return Array.from(words, (word) => BigInt(word | 0));
  const found = Array.from(
    { length: words.length / 2 },
    (_, at) => (BigInt(words[2 * at + 1]) << 32n) | BigInt(words[2 * at]),
  );
  return found.map((element) => BigInt.asIntN(64, element));
}

/** Adds another vector in place. @param {Uint32Array} words @param {Uint32Array} other @param {Bits} bits */
export function addTo(words, other, bits) {
  if (bits === 32) { for (let at = 0; at < words.length; at++) words[at] += other[at]; }
  else addWide(words, other);
}

/** Takes another vector away in place. @param {Uint32Array} words @param {Uint32Array} other @param {Bits} bits */
export function takeFrom(words, other, bits) {
  if (bits === 32) { for (let at = 0; at < words.length; at++) words[at] -= other[at]; }
  else takeWide(words, other);
}

/** @param {Uint32Array} words @param {Uint32Array} other */
function addWide(words, other) {
  for (let at = 0; at < words.length; at += 2) {
    const low = words[at] + other[at];
    words[at] = low;
    words[at + 1] += other[at + 1] + (low > 0xffffffff ? 1 : 0);
  }
}

/** @param {Uint32Array} words @param {Uint32Array} other */
function takeWide(words, other) {
  for (let at = 0; at < words.length; at += 2) {
    const low = words[at] - other[at];
    words[at] = low;
    words[at + 1] -= other[at + 1] + (low < 0 ? 1 : 0);
  }
}

/** As it travels: little-endian. @param {Uint32Array} words @returns {Bytes} */
export function elementBytes(words) {
  const bytes = new Uint8Array(4 * words.length);
  const view = new DataView(bytes.buffer);
  words.forEach((word, at) => view.setUint32(4 * at, word, true));
  return bytes;
}

/** @param {Uint8Array} bytes @returns {Uint32Array} */
export function bytesToWords(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  return Uint32Array.from({ length: bytes.length / 4 }, (_, at) => view.getUint32(4 * at, true));
}
