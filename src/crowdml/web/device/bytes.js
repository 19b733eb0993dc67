/**
 * Bytes: hex, base64url without padding, UTF-8, and SHA-256 through WebCrypto.
 * @typedef {Uint8Array<ArrayBuffer>} Bytes
 */

import { malformed } from "./problems.js";

const DIGITS = Array.from({ length: 256 }, (_, byte) => byte.toString(16).padStart(2, "0"));

/** @param {Uint8Array} bytes @returns {string} two digits a byte, in lower case */
export function toHex(bytes) {
  return Array.from(bytes, (byte) => DIGITS[byte]).join("");
}

/** @param {string} text hex digits in lower case @returns {Bytes} */
export function fromHex(text) {
  if (text.length % 2 || !/^[0-9a-f]*$/.test(text)) malformed("Hex has two digits for each byte, in lower case.");
  return Uint8Array.from({ length: text.length / 2 }, (_, place) => parseInt(text.slice(2 * place, 2 * place + 2), 16));
}

/** @param {Uint8Array} bytes @returns {string} base64url without padding */
export function toBase64url(bytes) {
  const text = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** Reads base64url in its one form: without padding, unused bits zero. @param {string} text @returns {Bytes} */
export function fromBase64url(text) {
  if (!/^[A-Za-z0-9_-]*$/.test(text) || text.length % 4 === 1) malformed("This is not base64url without padding.");
  const found = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(found, (letter) => letter.charCodeAt(0));
  return toBase64url(bytes) === text ? bytes : malformed("This is not base64url in its one form.");
}

/** @param {string} text @returns {Bytes} */
export function toUtf8(text) {
  return new TextEncoder().encode(text);
}

/** @param {Uint8Array} bytes @returns {string} */
export function fromUtf8(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return malformed("This text is not UTF-8.");
  }
}

/** @param {...Uint8Array} parts @returns {Bytes} all parts, one after another */
export function concat(...parts) {
  const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** @param {Uint8Array} one @param {Uint8Array} other @returns {boolean} */
export function equalBytes(one, other) {
  return one.length === other.length && one.every((byte, place) => byte === other[place]);
}

/** @param {Bytes} bytes @returns {Promise<Bytes>} */
export async function sha256(bytes) {
  return new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
}

/** A whole number as 8 bytes, the most significant first. @param {number | bigint} number @returns {Bytes} */
export function bigEndian64(number) {
  const bytes = new Uint8Array(8);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(number));
  return bytes;
}
