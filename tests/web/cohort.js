/** Devices of a masked round, kept between calls: a page answers one message after another. */

import { fromHex, toHex } from "../../src/crowdml/web/device/bytes.js";
import { keyFromSecret } from "../../src/crowdml/web/device/keys.js";
import * as secagg from "../../src/crowdml/web/device/secagg.js";

/**
 * @typedef {import("../../src/crowdml/web/device/roster.js").Terms} Terms
 * @typedef {{ key: import("../../src/crowdml/web/device/keys.js").Key, state: secagg.Round }} Member
 */

/** @type {Map<string, Member>} */
const members = new Map();
/** @type {Terms | null} */
let terms = null;

/** A device with this key begins a round; its id and its advert. @param {Omit<Terms, "task"> & { task: string }} given
 * @param {number} round @param {string} secret */
export async function begin(given, round, secret) {
  terms = { ...given, task: fromHex(given.task) };
  const key = await keyFromSecret(fromHex(secret));
  const state = await secagg.advertise(terms, round, key, round - 1);
  members.set(key.id, { key, state });
  return [key.id, toHex(state.sent)];
}

/** What a device says to a message of the server. @param {string} id @param {string} kind @param {string} body
 * @param {string} publication its hash @param {{ [tag: string]: number[] }} vectors @returns {Promise<string>} */
export async function hear(id, kind, body, publication, vectors) {
  const member = members.get(id);
  if (!member || !terms) throw new Error("This device has not begun.");
  member.state = await next(terms, member, kind, fromHex(body), fromHex(publication), vectors);
  return toHex(member.state.sent);
}

/** @param {Terms} rules @param {Member} member @param {string} kind @param {Uint8Array<ArrayBuffer>} message
 * @param {Uint8Array<ArrayBuffer>} publication @param {{ [tag: string]: number[] }} vectors */
async function next(rules, { key, state }, kind, message, publication, vectors) {
  if (kind === "secagg/cohort/1") return secagg.share(rules, state, message);
  if (kind === "secagg/survivors/1") return secagg.agree(rules, state, key, message);
  if (kind === "secagg/agreements/1") return secagg.reveal(rules, state, message);
  return secagg.mask(rules, await secagg.hold(rules, state, message, publication), vectors);
}
