/**
 * Keys: Ed25519 to sign, X25519 to agree on a secret, HKDF to derive from it; all of them WebCrypto's own.
 * A device is known by the hash of its public key. Mirrors src/crowdml/wire/keys.py.
 *
 * Some browsers sign with randomness: what was signed is kept and sent again, and signatures are never compared.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {{ readonly id: string, readonly public: Bytes, readonly private: CryptoKey }} Key
 * @typedef {{ readonly public: Bytes, readonly private: CryptoKey }} AgreementKey
 */

import { concat, equalBytes, fromBase64url, fromHex, sha256, toHex } from "./bytes.js";
import { malformed, Problem } from "./problems.js";

export const PUBLIC_SIZE = 32;
export const SIGNATURE_SIZE = 64;

const FIELD = 2n ** 255n - 19n;
const SMALL_ORDER = new Set([
  0n, // order 4
  1n, // the neutral element
  FIELD - 1n, // order 2
  0x05fc536d880238b13933c6d305acdfd5f098eff289f4c345b027b2c28f95e826n, // order 8
  0x7a03ac9277fdc74ec6cc392cfa53202a0f67100d760b3cba4fd84d3d706a17c7n, // order 8
]);
const PKCS8_ED25519 = fromHex("302e020100300506032b657004220420");
const PKCS8_X25519 = fromHex("302e020100300506032b656e04220420");

/** Refuse a browser that has no Ed25519 or no X25519, by a sentence for its owner. @returns {Promise<void>} */
export async function checkBrowser() {
  if (!crypto.subtle) {
    throw new Problem("unsupported", "A browser gives keys to secure pages alone. Open this one by https.");
  }
  try {
    await crypto.subtle.generateKey({ name: "Ed25519" }, false, ["sign", "verify"]);
    await crypto.subtle.generateKey({ name: "X25519" }, false, ["deriveBits"]);
  } catch {
    throw new Problem(
      "unsupported",
      "This browser has no Ed25519 or no X25519, which a device signs and masks with. Update it, or use another one.",
    );
  }
}

/** The address of whoever has this key: the first 32 hex digits of its SHA-256. @param {Bytes} publicKey */
export async function deviceId(publicKey) {
  if (publicKey.length !== PUBLIC_SIZE) {
    malformed(`A public key has ${PUBLIC_SIZE} bytes; this has ${publicKey.length}.`);
  }
  return toHex(await sha256(publicKey)).slice(0, 32);
}

/** Whether these bytes are a key that one party alone can sign for: in its one encoding, and of no small order.
 * @param {Uint8Array} publicKey */
export function isSound(publicKey) {
  if (publicKey.length !== PUBLIC_SIZE) return false;
  const y = littleEndian(publicKey) & (2n ** 255n - 1n);
  return y < FIELD && !SMALL_ORDER.has(y);
}

/** @param {Uint8Array} bytes @returns {bigint} */
function littleEndian(bytes) {
  return BigInt(`0x${toHex(bytes.toReversed())}`);
}

/** A new key. Its private half cannot be read out of the browser. @returns {Promise<Key>} */
export async function generateKey() {
  const pair = /** @type {CryptoKeyPair} */ (
    await crypto.subtle.generateKey({ name: "Ed25519" }, false, ["sign", "verify"])
  );
  return keyOf(new Uint8Array(await crypto.subtle.exportKey("raw", pair.publicKey)), pair.privateKey);
}

/** The key of 32 secret bytes: for test vectors. @param {Bytes} secret @returns {Promise<Key>} */
export async function keyFromSecret(secret) {
  const packed = concat(PKCS8_ED25519, secret);
  const open = await crypto.subtle.importKey("pkcs8", packed, { name: "Ed25519" }, true, ["sign"]);
  const { x } = await crypto.subtle.exportKey("jwk", open);
  return keyOf(fromBase64url(x ?? ""), open);
}

/** @param {Bytes} publicKey @param {CryptoKey} privateKey @returns {Promise<Key>} */
async function keyOf(publicKey, privateKey) {
  return { id: await deviceId(publicKey), public: publicKey, private: privateKey };
}

/** @param {Key} key @param {Bytes} data @returns {Promise<Bytes>} 64 bytes */
export async function sign(key, data) {
  return new Uint8Array(await crypto.subtle.sign({ name: "Ed25519" }, key.private, data));
}

/** Whether `signature` over `data` was made with the private half of `publicKey`. No input raises.
 * @param {Bytes} publicKey @param {Bytes} signature @param {Bytes} data @returns {Promise<boolean>} */
export async function verify(publicKey, signature, data) {
  if (publicKey.length !== PUBLIC_SIZE || signature.length !== SIGNATURE_SIZE) return false;
  try {
    const key = await crypto.subtle.importKey("raw", publicKey, { name: "Ed25519" }, false, ["verify"]);
    return await crypto.subtle.verify({ name: "Ed25519" }, key, signature, data);
  } catch {
    return false;
  }
}

// --- agreeing on a secret ---

/** A new X25519 key, for one round. @returns {Promise<AgreementKey>} */
export async function generateAgreementKey() {
  const pair = /** @type {CryptoKeyPair} */ (await crypto.subtle.generateKey({ name: "X25519" }, true, ["deriveBits"]));
  return { public: new Uint8Array(await crypto.subtle.exportKey("raw", pair.publicKey)), private: pair.privateKey };
}

/** The X25519 key of 32 secret bytes. @param {Bytes} secret @returns {Promise<AgreementKey>} */
export async function agreementKeyFromSecret(secret) {
  const packed = concat(PKCS8_X25519, secret);
  const open = await crypto.subtle.importKey("pkcs8", packed, { name: "X25519" }, true, ["deriveBits"]);
  const { x } = await crypto.subtle.exportKey("jwk", open);
  return { public: fromBase64url(x ?? ""), private: open };
}

/** The 32 secret bytes of an X25519 key, which a device shares out among its cohort. @param {AgreementKey} key */
export async function agreementSecret(key) {
  const { d } = await crypto.subtle.exportKey("jwk", key.private);
  return fromBase64url(d ?? "");
}

/** The 32 bytes that the two keys agree on. A point of small order, or in another than its one encoding, is refused.
 * @param {AgreementKey} own @param {Bytes} other @returns {Promise<Bytes>} */
export async function agree(own, other) {
  if (other.length !== PUBLIC_SIZE || littleEndian(other) >= FIELD) malformed("A peer's X25519 key is not canonical.");
  try {
    const key = await crypto.subtle.importKey("raw", other, { name: "X25519" }, false, []);
    const found = await crypto.subtle.deriveBits({ name: "X25519", public: key }, own.private, 256);
    const shared = new Uint8Array(found);
    if (!equalBytes(shared, new Uint8Array(32))) return shared;
  } catch {
    // below: WebCrypto refuses a point of small order by an error without a sentence
  }
  return malformed("A peer's X25519 key is of low order or no key at all.");
}

/** HKDF with SHA-256 (RFC 5869). @param {Bytes} secret @param {Bytes} salt @param {Bytes} info @param {number} size
 * @returns {Promise<Bytes>} */
export async function hkdf(secret, salt, info, size) {
  const key = await crypto.subtle.importKey("raw", secret, "HKDF", false, ["deriveBits"]);
  return new Uint8Array(await crypto.subtle.deriveBits({ name: "HKDF", hash: "SHA-256", salt, info }, key, 8 * size));
}
