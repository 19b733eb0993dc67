/** messages.json: every message packs to its bytes, and reads back; other encodings are refused. */

import {
  fromBase64url,
  fromHex,
  fromUtf8,
  sha256,
  toBase64url,
  toHex,
  toUtf8,
} from "../../../src/crowdml/web/device/bytes.js";
import {
  decode,
  encode,
  packFloats,
  packIntegers,
  readFloats,
  readIntegers,
} from "../../../src/crowdml/web/device/codec.js";
import { check, equal, refused } from "./expect.js";

/** @typedef {import("../../../src/crowdml/web/device/codec.js").Plain} Plain */
/** @typedef {{ dtype: string, shape: number[], values: number[] }} Shown */
/** @typedef {{ kind: string, fields: { [name: string]: number | null | Shown }, body: string }} Case */

/** @param {Case[]} vectors */
export function checks(vectors) {
  return [...vectors.map((row, at) => check(`${at} ${row.kind}`, () => message(row))), ...own];
}

/** @param {Case} row */
function message(row) {
  const fields = Object.fromEntries(Object.entries(row.fields).map(([name, value]) => [name, packed(value)]));
  equal(toHex(encode(fields)), row.body, "the packed message");
  const found = /** @type {{ [name: string]: Plain }} */ (decode(fromHex(row.body)));
  equal(Object.keys(found), Object.keys(row.fields).toSorted(), "the keys");
  for (const [name, value] of Object.entries(row.fields)) equal(read(found[name], value), shown(value), name);
}

/** @param {number | null | Shown} value @returns {Plain} */
function packed(value) {
  if (value === null || typeof value === "number") return value;
  if (value.dtype === "<i4") return packIntegers(Int32Array.from(value.values), value.shape);
  return packFloats(Float32Array.from(value.values), value.shape);
}

/** @param {Plain} found @param {number | null | Shown} value */
function read(found, value) {
  if (value === null || typeof value === "number") return found;
  return value.dtype === "<i4" ? readIntegers(found, value.shape, "it") : readFloats(found, value.shape, "it");
}

/** @param {number | null | Shown} value */
function shown(value) {
  return value === null || typeof value === "number" ? value : value.values;
}

const LONGER = [
  "cc05",
  "cd00ff",
  "ce0000ffff",
  "cf00000000ffffffff",
  "d0e0",
  "d1ff80",
  "d2ffff8000",
  "d900",
  "da0001ff",
  "c50000",
  "c60000ffff",
  "dc0000",
  "dd00000010",
  "de0000",
]; // each has a shorter form
const WRONG = [
  "c1",
  "c2",
  "c3",
  "ca00000000",
  "cb0000000000000000",
  "d40000",
  "c70000",
  "0000",
  "a2ff",
  "a1ff",
  "92c0",
  "8201c002c0",
  "82a162c0a161c0",
  "82a161c0a161c0",
  "8101c0",
  "c405",
  "",
];

const own = [
  check("whole numbers have their shortest forms", () => {
    /** @type {[number | bigint, string][]} */
    const cases = [
      [0, "00"],
      [127, "7f"],
      [128, "cc80"],
      [255, "ccff"],
      [256, "cd0100"],
      [65536, "ce00010000"],
      [2 ** 32, "cf0000000100000000"],
      [2n ** 63n - 1n, "cf7fffffffffffffff"],
      [2n ** 64n - 1n, "cfffffffffffffffff"],
      [-1, "ff"],
      [-32, "e0"],
      [-33, "d0df"],
      [-128, "d080"],
      [-129, "d1ff7f"],
      [-32769, "d2ffff7fff"],
      [-(2n ** 31n) - 1n, "d3ffffffff7fffffff"],
      [-(2n ** 63n), "d38000000000000000"],
    ];
    for (const [value, hex] of cases) {
      equal(toHex(encode(value)), hex, `${value}`);
      equal(BigInt(/** @type {number} */ (decode(fromHex(hex)))), BigInt(value), hex);
    }
  }),
  check("any other encoding is refused", async () => {
    for (const hex of [...LONGER, ...WRONG]) equal((await refused(() => decode(fromHex(hex)))).slug, "malformed", hex);
  }),
  check("long texts, bytes, lists and maps read back", () => {
    const map = Object.fromEntries(Array.from({ length: 20 }, (_, at) => [`k${at}`, at]));
    for (const value of ["é".repeat(40), "x".repeat(70_000), new Uint8Array(300), Array(70_000).fill(7), map]) {
      equal(decode(encode(value)), value, "what was packed");
    }
    equal(toHex(encode({ "\u{10000}": 1, "\uffff": 2 })).slice(0, 10), "82a3efbfbf", "keys by code point");
  }),
  check("hex and base64url have one form", async () => {
    equal(toHex(await sha256(toUtf8("abc"))).slice(0, 16), "ba7816bf8f01cfea", "SHA-256");
    equal(fromUtf8(fromBase64url(toBase64url(toUtf8("crowd?>ü")))), "crowd?>ü", "base64url");
    for (const text of ["QQ=", "QR", "Q", "+/"]) await refused(() => fromBase64url(text));
    for (const text of ["0", "AB", "0g"]) await refused(() => fromHex(text));
  }),
];
