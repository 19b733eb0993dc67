/**
 * A cohort as everyone must see it: its devices in order of their ids, its hash, its plan; and the terms it keeps to.
 * Mirrors src/crowdml/secagg/cohort.py and terms.py.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./graph.js").GraphPlan} GraphPlan
 * @typedef {{ readonly tag: string, readonly length: number, readonly bits: import("./ring.js").Bits }} Field
 *
 * @typedef {object} Terms what a task fixes of masking
 * @property {Bytes} task its hash
 * @property {readonly Field[]} fields the vectors of the masked message
 * @property {number} smallest devices of a cohort
 * @property {number} largest
 * @property {number} survivors the fewest whose vectors may be summed
 * @property {number} colluders
 *
 * @typedef {object} Roster
 * @property {readonly string[]} ids
 * @property {readonly Bytes[]} publics
 * @property {readonly Bytes[]} adverts hashes
 * @property {Bytes} hash
 * @property {GraphPlan} plan
 * @property {Bytes} sealing the salt under which shares are sealed
 */

import { concat, sha256, toUtf8 } from "./bytes.js";
import { encode } from "./codec.js";
import { ceiling, multiply, whole, wholeRoot } from "./fractions.js";
import { planGraph } from "./graph.js";
import { deviceId } from "./keys.js";
import { saltOf } from "./masks.js";
import { malformed } from "./problems.js";
import { refuseTask } from "./sections.js";

const ENTRY = 64; // a public key and the hash of an advert
const SIGMAS = 6; // deviations of a cohort's noise by which an entry of an honest sum may leave its bound

/** The terms of a masked task. @param {import("./tasks.js").Task} task @param {import("./turn.js").Plan} plan
 * @returns {Terms} */
export function termsOf(task, { table }) {
  const masking = task.masking ?? refuseTask("it has no [masking]");
  const fields = Object.entries(table).map(([tag, row]) => fieldOf(tag, row, masking.cohort));
  const { cohort, minimum, colluders } = masking;
  if (planGraph(cohort, colluders, minimum) === null) refuseTask("masking.minimum is too small for its cohort");
  return { task: task.hash, fields, smallest: minimum, largest: cohort, survivors: minimum, colluders };
}

/** The ring has 32 bits where the sum of the largest cohort fits with its noise, else 64. @param {string} tag
 * @param {import("./mechanisms.js").Mechanism} row @param {number} cohort @returns {Field} */
function fieldOf(tag, { form, bound, covers, law, length, whole: one }, cohort) {
  if (law.kind !== "skellam") return refuseTask(`row ${tag} has no share of a cohort's noise`);
  const samples = covers.stop - covers.start;
  const each = form === "gram" ? samples * bound * bound : samples * bound; // counts have a bound of 1
  const most = form === "stable" || one ? bound : each;
  const slack = SIGMAS * (Number(wholeRoot(ceiling(multiply(whole(cohort), law.variance)))) + 1);
  return { tag, length, bits: cohort * most + 2 * slack < 2 ** 31 ? 32 : 64 };
}

/** What a roster says. Refused if it is too small or too large for the task, or not in strictly rising order.
 * @param {Terms} terms @param {number} round @param {Bytes} data @returns {Promise<Roster>} */
export async function readRoster(terms, round, data) {
  const devices = data.length / ENTRY;
  if (!Number.isInteger(devices) || devices < terms.smallest || devices > terms.largest) {
    malformed(`A cohort of this task has ${terms.smallest} to ${terms.largest} devices; this one has ${devices}.`);
  }
  const entries = Array.from({ length: devices }, (_, at) => data.slice(at * ENTRY, (at + 1) * ENTRY));
  const publics = entries.map((entry) => entry.slice(0, 32));
  const ids = await Promise.all(publics.map(deviceId));
  if (ids.some((id, at) => at > 0 && id <= ids[at - 1])) {
    malformed("The devices of a cohort are not sorted, each once.");
  }
  const hash = await sha256(concat(toUtf8("crowdml/secagg/cohort/1"), encode([terms.task, round, data])));
  const plan = planGraph(devices, terms.colluders, terms.survivors) ?? malformed("This cohort has no safe threshold.");
  const sealing = await saltOf(terms.task, round, hash);
  return { ids, publics, adverts: entries.map((entry) => entry.slice(32)), hash, plan, sealing };
}

/** The hash of the cohort, of who delivered shares, and of the publication that all work with: masks and signatures are
 * bound to it. @param {Roster} roster @param {Bytes} sharers @param {Bytes} publication its hash */
export function viewOf(roster, sharers, publication) {
  return sha256(concat(toUtf8("crowdml/secagg/view/1"), encode([roster.hash, publication, sharers])));
}

/** The hash of a publication as a device was shown it. @param {number} version @param {string} kind @param {Bytes}
 * body */
export function publicationHash(version, kind, body) {
  return sha256(concat(toUtf8("crowdml/secagg/publication/1"), encode([version, kind, body])));
}

/** Booleans as bits, the first in the highest bit of the first byte. @param {readonly boolean[]} chosen
 * @returns {Bytes} */
export function bitmap(chosen) {
  const bytes = new Uint8Array(Math.ceil(chosen.length / 8));
  chosen.forEach((held, at) => {
    if (held) bytes[at >> 3] |= 0x80 >> (at & 7);
  });
  return bytes;
}

/** @param {Uint8Array} data @param {number} devices @returns {boolean[]} */
export function members(data, devices) {
  const bits = Array.from({ length: 8 * data.length }, (_, at) => (data[at >> 3] & (0x80 >> (at & 7))) !== 0);
  const fits = data.length === Math.ceil(devices / 8) && !bits.slice(devices).some(Boolean);
  return fits ? bits.slice(0, devices) : malformed(`This is not a bitmap of ${devices} devices.`);
}
