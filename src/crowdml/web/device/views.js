/**
 * What a device is told of a masked round: how far it is, and what this device has to know now.
 * Mirrors src/crowdml/wire/rounds.py; what `body` says, `secagg.js` knows.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./codec.js").Plain} Plain
 * @typedef {{ readonly version: number, readonly kind: string, readonly body: Bytes }} Offered
 *
 * @typedef {object} RoundView
 * @property {number} round
 * @property {string} phase
 * @property {string} kind of the message for this device; empty where there is none
 * @property {Bytes} body that message
 * @property {number} closes milliseconds until the phase's deadline
 * @property {number} wait milliseconds after which to ask again, give or take a half
 * @property {Offered | null} publication what the whole cohort works with, while devices mask
 * @property {string} why a round was abandoned, or who is missing while devices come
 */

import { asBytes, asCount, asList, asMap, asText, decode } from "./codec.js";
import { malformed } from "./problems.js";

const PHASES = new Set(["advertise", "share", "mask", "agree", "reveal", "summed", "abandoned"]);
const KEYS = ["body", "closes", "kind", "phase", "publication", "round", "wait", "why"];
const LARGEST_VIEW = 64 * 2 ** 20;
const LONGEST_KIND = 64;
const LONGEST_TIME = 10 ** 12; // milliseconds
const LONGEST_WHY = 1024;

/** What the bytes say, if their structure is right. @param {Uint8Array} data @returns {RoundView} */
export function openView(data) {
  if (data.length > LARGEST_VIEW) malformed(`The view of a round has ${data.length} bytes.`);
  const found = asMap(decode(data), KEYS, "The view of a round");
  const phase = asText(found.phase, "phase", 16);
  if (!PHASES.has(phase)) malformed(`phase is ${phase}, which no round has.`);
  return {
    round: asCount(found.round, "round", 1),
    phase,
    kind: asText(found.kind, "kind", LONGEST_KIND),
    body: asBytes(found.body, "body", { most: LARGEST_VIEW }),
    closes: asCount(found.closes, "closes", 0, LONGEST_TIME),
    wait: asCount(found.wait, "wait", 0, LONGEST_TIME),
    publication: readOffered(found.publication),
    why: asText(found.why, "why", LONGEST_WHY),
  };
}

/** @param {Plain} value @returns {Offered | null} */
function readOffered(value) {
  const list = asList(value, "publication", 3);
  if (!list.length) return null;
  if (list.length !== 3) malformed("publication is empty, or version, kind and body.");
  const [version, kind, body] = list;
  return {
    version: asCount(version, "the publication's version", 0),
    kind: asText(kind, "the publication's kind", LONGEST_KIND),
    body: asBytes(body, "the publication's body", { most: LARGEST_VIEW }),
  };
}
