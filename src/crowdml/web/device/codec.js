/**
 * Canonical msgpack: maps with sorted keys, lists, texts, bytes, whole numbers and nil, each in its shortest form.
 *
 * A value has one encoding. `decode` refuses every other one, so bytes that were read and packed again are the same
 * bytes. A whole number is a `number` where that is exact, and a `bigint` beyond 2^53.
 * Mirrors src/crowdml/wire/packing.py.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {null | number | bigint | string | Uint8Array | PlainList | PlainMap} Plain
 * @typedef {ReadonlyArray<Plain>} PlainList
 * @typedef {{ readonly [key: string]: Plain }} PlainMap
 */

import { concat, fromUtf8, toUtf8 } from "./bytes.js";
import { malformed } from "./problems.js";

const DEEPEST = 16;

/** @param {Plain} value @returns {Bytes} */
export function encode(value) {
  /** @type {Uint8Array[]} */
  const parts = [];
  write(value, parts);
  return concat(...parts);
}

/** @param {Uint8Array} bytes @returns {Plain} */
export function decode(bytes) {
  const reader = new Reader(bytes);
  const value = reader.value(0);
  if (reader.at !== bytes.length) malformed(`${bytes.length - reader.at} bytes follow after the end.`);
  return value;
}

/** @param {Plain} value @param {Uint8Array[]} parts */
function write(value, parts) {
  if (value === null) parts.push(Uint8Array.of(0xc0));
  else if (typeof value === "number" || typeof value === "bigint") parts.push(whole(value));
  else if (typeof value === "string") writeText(value, parts);
  else if (value instanceof Uint8Array) parts.push(head(value.length, 0xc4, 0), value);
  else if (isList(value)) writeList(value, parts);
  else writeMap(value, parts);
}

/** @param {string} text @param {Uint8Array[]} parts */
function writeText(text, parts) {
  const bytes = toUtf8(text);
  parts.push(bytes.length < 32 ? Uint8Array.of(0xa0 | bytes.length) : head(bytes.length, 0xd9, 0), bytes);
}

/** @param {PlainList} list @param {Uint8Array[]} parts */
function writeList(list, parts) {
  parts.push(list.length < 16 ? Uint8Array.of(0x90 | list.length) : head(list.length, 0xdc, 1));
  for (const item of list) write(item, parts);
}

/** @param {PlainMap} map @param {Uint8Array[]} parts */
function writeMap(map, parts) {
  const keys = Object.keys(map).toSorted(byCodePoint);
  parts.push(keys.length < 16 ? Uint8Array.of(0x80 | keys.length) : head(keys.length, 0xde, 1));
  for (const key of keys) {
    writeText(key, parts);
    write(map[key], parts);
  }
}

/** The head of a text, bytes, list or map: `first` names the narrowest of its widths, 2^`least` bytes.
 * @param {number} size @param {number} first @param {number} least */
function head(size, first, least) {
  const wide = size < 256 ? 0 : size < 65536 ? 1 : 2;
  const width = Math.max(wide, least);
  return bigEndian(first + width - least, 1 << width, BigInt(size));
}

/** @param {number | bigint} value */
function whole(value) {
  if (typeof value === "number" && !Number.isSafeInteger(value)) malformed(`${value} is not a whole number.`);
  const number = BigInt(value);
  if (number >= -32n && number < 128n) return Uint8Array.of(Number(number) & 0xff);
  const width = number < 0n ? widthOf(-number - 1n, 1n) : widthOf(number, 0n);
  return bigEndian((number < 0n ? 0xd0 : 0xcc) + width, 1 << width, number);
}

/** The least w such that 2^w bytes hold the number beside `sign` bits. @param {bigint} number @param {bigint} sign */
function widthOf(number, sign) {
  const width = [0, 1, 2, 3].find((each) => number >> (8n * BigInt(1 << each) - sign) === 0n);
  return width ?? malformed(`${number} has more than 64 bits.`);
}

/** @param {number} first @param {number} width @param {bigint} value */
function bigEndian(first, width, value) {
  const bytes = new Uint8Array(1 + width);
  bytes[0] = first;
  let rest = BigInt.asUintN(8 * width, value);
  for (let at = width; at > 0; at--, rest >>= 8n) bytes[at] = Number(rest & 0xffn);
  return bytes;
}

/** The least length in 1, 2 and 4 bytes: a shorter one has a shorter form. */
const BYTES = [0, 256, 65536];
const TEXTS = [32, 256, 65536];
const LISTS = [0, 16, 65536]; // and maps

class Reader {
  /** @param {Uint8Array} bytes */
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  /** @param {number} depth @returns {Plain} */
  value(depth) {
    if (depth > DEEPEST) malformed(`It lies more than ${DEEPEST} deep.`);
    const first = this.take(1)[0];
    if (first < 0x80) return first;
    if (first >= 0xe0) return first - 256;
    if (first < 0x90) return this.map(first & 15, depth);
    if (first < 0xa0) return this.list(first & 15, depth);
    if (first < 0xc0) return fromUtf8(this.take(first & 31));
    return this.long(first, depth);
  }

  /** @param {number} first @param {number} depth @returns {Plain} */
  long(first, depth) {
    if (first === 0xc0) return null;
    if (first >= 0xc4 && first <= 0xc6) return this.take(this.size(first - 0xc4, BYTES)).slice();
    if (first >= 0xcc && first <= 0xcf) return this.positive(first - 0xcc);
    if (first >= 0xd0 && first <= 0xd3) return this.negative(first - 0xd0);
    if (first >= 0xd9 && first <= 0xdb) return fromUtf8(this.take(this.size(first - 0xd9, TEXTS)));
    if (first === 0xdc || first === 0xdd) return this.list(this.size(first - 0xdb, LISTS), depth);
    if (first === 0xde || first === 0xdf) return this.map(this.size(first - 0xdd, LISTS), depth);
    return malformed(`A value begins with the byte ${first}, which no message has.`);
  }

  /** A length in 2^width bytes, which no narrower form could hold. @param {number} width @param {number[]} least */
  size(width, least) {
    const size = Number(this.integer(1 << width));
    return size < least[width] ? malformed("A length is not in its shortest form.") : size;
  }

  /** @param {number} width */
  positive(width) {
    const value = this.integer(1 << width);
    if (value < [128n, 256n, 65536n, 2n ** 32n][width]) malformed("A whole number is not in its shortest form.");
    return narrow(value);
  }

  /** @param {number} width */
  negative(width) {
    const value = BigInt.asIntN(8 << width, this.integer(1 << width));
    if (value >= [-32n, -128n, -32768n, -(2n ** 31n)][width]) malformed("A whole number is not in its shortest form.");
    return narrow(value);
  }

  /** @param {number} width @returns {bigint} */
  integer(width) {
    return this.take(width).reduce((value, byte) => (value << 8n) | BigInt(byte), 0n);
  }

  /** @param {number} size @param {number} depth @returns {Plain[]} */
  list(size, depth) {
    /** @type {Plain[]} */
    const found = [];
    for (let at = 0; at < size; at++) found.push(this.value(depth + 1));
    return found;
  }

  /** @param {number} size @param {number} depth @returns {PlainMap} */
  map(size, depth) {
    /** @type {{ [key: string]: Plain }} */
    const found = Object.create(null);
    /** @type {string | null} */
    let last = null;
    for (let at = 0; at < size; at++) {
      const key = this.value(depth + 1);
      if (typeof key !== "string") malformed("A key of a map is not a text.");
      if (last !== null && byCodePoint(last, key) >= 0) malformed("The keys of a map are not sorted, each once.");
      found[key] = this.value(depth + 1);
      last = key;
    }
    return found;
  }

  /** @param {number} size @returns {Uint8Array} */
  take(size) {
    if (this.at + size > this.bytes.length) malformed("It ends within a value.");
    this.at += size;
    return this.bytes.subarray(this.at - size, this.at);
  }
}

/** @param {bigint} value */
function narrow(value) {
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value;
}

/** @param {string} one @param {string} other @returns {number} the order of code points, which is that of UTF-8 */
function byCodePoint(one, other) {
  const [a, b] = [Array.from(one), Array.from(other)];
  const place = a.findIndex((letter, at) => letter !== b[at]);
  if (place === -1 || place >= b.length) return a.length - b.length;
  return (a[place].codePointAt(0) ?? 0) - (b[place].codePointAt(0) ?? 0);
}

/** @param {Plain} value @returns {value is PlainList} */
export function isList(value) {
  return Array.isArray(value);
}

// --- what a message is made of, read once at the edge ---

/** A map of exactly these keys. @param {Plain} value @param {readonly string[]} keys @param {string} what
 * @returns {PlainMap} */
export function asMap(value, keys, what) {
  if (value === null || typeof value !== "object" || isList(value) || value instanceof Uint8Array) {
    return malformed(`${what} is not a map.`);
  }
  const found = Object.keys(value).toSorted();
  const wanted = keys.toSorted();
  if (found.length !== wanted.length || found.some((key, at) => key !== wanted[at])) {
    malformed(`${what} has the keys ${found.join(", ")}, and they must be ${wanted.join(", ")}.`);
  }
  return value;
}

/** @param {Plain} value @param {string} what @param {number} [most] bytes of UTF-8 @returns {string} */
export function asText(value, what, most = 65536) {
  if (typeof value !== "string") return malformed(`${what} is not a text.`);
  return toUtf8(value).length > most ? malformed(`${what} has more than ${most} bytes.`) : value;
}

/** @param {Plain} value @param {string} what @param {{ size?: number, most?: number }} [limits] @returns {Bytes} */
export function asBytes(value, what, { size, most = 2 ** 26 } = {}) {
  if (!(value instanceof Uint8Array)) return malformed(`${what} is not bytes.`);
  const fits = size === undefined ? value.length <= most : value.length === size;
  return fits ? new Uint8Array(value) : malformed(`${what} has ${value.length} bytes.`);
}

/** @param {Plain} value @param {string} what @param {number | bigint} low @param {number | bigint} high
 * @returns {number | bigint} */
export function asInteger(value, what, low, high) {
  if (typeof value !== "number" && typeof value !== "bigint") return malformed(`${what} is not a whole number.`);
  return value >= low && value <= high ? value : malformed(`${what} is ${value}, and lies from ${low} to ${high}.`);
}

/** A whole number that is exact as a `number`. @param {Plain} value @param {string} what @param {number} low
 * @param {number} [high] @returns {number} */
export function asCount(value, what, low, high = Number.MAX_SAFE_INTEGER) {
  return Number(asInteger(value, what, low, high));
}

/** @param {Plain} value @param {string} what @param {number} most @returns {PlainList} */
export function asList(value, what, most) {
  if (!isList(value)) return malformed(`${what} is not a list.`);
  return value.length <= most ? value : malformed(`${what} has ${value.length} entries; at most ${most} are read.`);
}

// --- arrays: [type, shape, bytes], little-endian and by rows ---

/** @param {Int32Array} values @param {readonly number[]} shape @returns {Plain} */
export function packIntegers(values, shape) {
  const bytes = new Uint8Array(4 * values.length);
  const view = new DataView(bytes.buffer);
  values.forEach((value, at) => view.setInt32(4 * at, value, true));
  return ["<i4", [...shape], bytes];
}

/** @param {Float32Array} values @param {readonly number[]} shape @returns {Plain} */
export function packFloats(values, shape) {
  const bytes = new Uint8Array(4 * values.length);
  const view = new DataView(bytes.buffer);
  values.forEach((value, at) => view.setFloat32(4 * at, value, true));
  return ["<f4", [...shape], bytes];
}

/** The numbers of a float32 array that must have this shape. @param {Plain} value @param {readonly number[]} shape
 * @param {string} what @returns {Float32Array} */
export function readFloats(value, shape, what) {
  const view = arrayBytes(value, "<f4", shape, what);
  return Float32Array.from({ length: view.byteLength / 4 }, (_, at) => view.getFloat32(4 * at, true));
}

/** The numbers of an int32 array that must have this shape. @param {Plain} value @param {readonly number[]} shape
 * @param {string} what @returns {Int32Array} */
export function readIntegers(value, shape, what) {
  const view = arrayBytes(value, "<i4", shape, what);
  return Int32Array.from({ length: view.byteLength / 4 }, (_, at) => view.getInt32(4 * at, true));
}

/** @param {Plain} value @param {string} type @param {readonly number[]} shape @param {string} what */
function arrayBytes(value, type, shape, what) {
  const list = asList(value, what, 3);
  if (list.length !== 3 || list[0] !== type) malformed(`${what} is not an array of type ${type}.`);
  const sizes = asList(list[1], `${what}'s shape`, 8);
  if (sizes.length !== shape.length || sizes.some((size, at) => size !== shape[at])) {
    malformed(`${what} has the shape ${sizes.join(" x ")}, and the task says ${shape.join(" x ")}.`);
  }
  const cells = shape.reduce((product, size) => product * size, 1);
  const bytes = asBytes(list[2], what, { size: 4 * cells });
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
}
