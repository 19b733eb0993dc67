/**
 * Masks: streams that two devices of a cohort share and add with opposite signs, and one that a device has alone.
 * Keys come from X25519 and HKDF, streams from AES-256 in counter mode. Mirrors src/crowdml/secagg/masks.py.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./ring.js").Bits} Bits
 */

import { concat, sha256, toUtf8 } from "./bytes.js";
import { encode } from "./codec.js";
import { hkdf } from "./keys.js";
import { addTo, bytesToWords, takeFrom } from "./ring.js";

const KEY_SIZE = 32;
const PREFIX = toUtf8("crowdml/secagg/1");

/** What every key of a round is bound to. @param {Bytes} task @param {number} round @param {Bytes} view
 * @returns {Promise<Bytes>} */
export function saltOf(task, round, view) {
  return sha256(concat(PREFIX, encode([task, round, view])));
}

/** 32 bytes; `info` is packed, so that no two lists of words run into one. @param {Bytes} secret @param {Bytes} salt
 * @param {...(string | Bytes)} info @returns {Promise<Bytes>} */
export function derive(secret, salt, ...info) {
  return hkdf(secret, salt, encode(info), KEY_SIZE);
}

/** The key of the mask between two devices, whichever of them asks. @param {Bytes} secret @param {Bytes} salt
 * @param {string} one @param {string} other @param {string} tag @returns {Promise<Bytes>} */
export function pairKey(secret, salt, one, other, tag) {
  const [low, high] = one < other ? [one, other] : [other, one];
  return derive(secret, salt, "pair", low, high, tag);
}

/** The key of the mask that a device has alone. @param {Bytes} seed @param {Bytes} salt @param {string} device
 * @param {string} tag @returns {Promise<Bytes>} */
export function selfKey(seed, salt, device, tag) {
  return derive(seed, salt, "self", device, tag);
}

/** The first bytes of a key's stream. A key serves one vector, so its counter begins at zero. @param {Bytes} key
 * @param {number} size @returns {Promise<Bytes>} */
export async function streamOf(key, size) {
  const own = await crypto.subtle.importKey("raw", key, "AES-CTR", false, ["encrypt"]);
  const counter = { name: "AES-CTR", counter: new Uint8Array(16), length: 64 };
  return new Uint8Array(await crypto.subtle.encrypt(counter, own, new Uint8Array(size)));
}

/** Adds the stream of a key to a vector, in place, or takes it away. @param {Uint32Array} words @param {Bits} bits
 * @param {Bytes} key @param {1 | -1} sign */
export async function addStream(words, bits, key, sign) {
  const stream = wordsOf(await streamOf(key, 4 * words.length));
  if (sign > 0) addTo(words, stream, bits);
  else takeFrom(words, stream, bits);
}

const LITTLE = new Uint8Array(Uint32Array.of(1).buffer)[0] === 1;

/** Little-endian words, without a copy where the machine has them so. @param {Bytes} bytes @returns {Uint32Array} */
function wordsOf(bytes) {
  return LITTLE ? new Uint32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4) : bytesToWords(bytes);
}
