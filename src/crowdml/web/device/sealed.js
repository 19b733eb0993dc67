/**
 * Shares on their way to a holder: the server carries them and cannot open them. AES-256-GCM under a key from X25519
 * and HKDF, bound to task, round, cohort, sender and holder. A key seals one message, so the nonce is zero.
 *
 * src/crowdml/secagg/sealed.py still seals with ChaCha20-Poly1305, which WebCrypto lacks. Until it changes, browser and
 * Python devices cannot open each other's letters.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 */

import { derive } from "./masks.js";
import { SHARE_SIZE } from "./shamir.js";

/** A share of the pair key, then one of the self-mask's seed. */
export const CONTENT_SIZE = 2 * SHARE_SIZE;
export const SEALED_SIZE = CONTENT_SIZE + 16;
const ALGORITHM = { name: "AES-GCM", iv: new Uint8Array(12) };

/** Seals for the holder alone; `secret` is what the two agreed on. @param {Bytes} secret @param {Bytes} salt
 * @param {string} sender @param {string} holder @param {Bytes} content @returns {Promise<Bytes>} */
export async function seal(secret, salt, sender, holder, content) {
  const key = await keyOf(secret, salt, sender, holder, "encrypt");
  return new Uint8Array(await crypto.subtle.encrypt(ALGORITHM, key, content));
}

/** What the sender sealed for the holder; null if these bytes are not that. @param {Bytes} secret @param {Bytes} salt
 * @param {string} sender @param {string} holder @param {Bytes} sealed @returns {Promise<Bytes | null>} */
export async function unseal(secret, salt, sender, holder, sealed) {
  try {
    const key = await keyOf(secret, salt, sender, holder, "decrypt");
    return new Uint8Array(await crypto.subtle.decrypt(ALGORITHM, key, sealed));
  } catch {
    return null;
  }
}

/** @param {Bytes} secret @param {Bytes} salt @param {string} sender @param {string} holder
 * @param {"encrypt" | "decrypt"} use @returns {Promise<CryptoKey>} */
async function keyOf(secret, salt, sender, holder, use) {
  return crypto.subtle.importKey("raw", await derive(secret, salt, "seal", sender, holder), "AES-GCM", false, [use]);
}
