/**
 * A device's turn: a batch and the publication become one message and the charges for it.
 * The charges are known before anything is drawn: `chargesAhead` is asked about, then the door opens.
 * Mirrors src/crowdml/turn.py for the protocols that a browser takes part in.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./codec.js").Plain} Plain
 * @typedef {import("./door.js").Masked} Masked
 * @typedef {import("./mechanisms.js").Contributions} Contributions
 * @typedef {import("./mechanisms.js").Mechanism} Mechanism
 * @typedef {import("./models.js").Samples} Samples
 * @typedef {import("./noise.js").Source} Source
 * @typedef {import("./spending.js").Charge} Charge
 * @typedef {import("./tasks.js").Task} Task
 *
 * @typedef {{ readonly version: number, readonly taken: number, readonly weights: Float32Array }} Publication
 * @typedef {{ readonly [row: string]: import("./door.js").Private<Contributions> }} Rows what each row is given
 *
 * @typedef {object} Plan what a task has a device do
 * @property {string} kind of the message that leaves
 * @property {string} published the kind of the publication
 * @property {number} batch samples of a check-in
 * @property {number} buffer samples that wait on a device at most
 * @property {{ readonly [row: string]: Mechanism }} table everything that may leave, and at what price
 * @property {(body: Uint8Array) => Publication} read
 * @property {(batch: import("./door.js").Private<Samples>, publication: Publication, trip: number) =>
 *   { rows: Rows, fields: { [name: string]: Plain } }} contribute
 * @property {(row: string) => readonly number[]} shape of a row in the message
 *
 * @typedef {object} Turn
 * @property {string} kind
 * @property {Bytes | null} body the message; null under masks
 * @property {{ readonly [row: string]: Masked } | null} masked the summands that masks go on; null without masks
 * @property {Charge[]} charges they are on disk before the message is sent
 * @property {boolean} ends whether the device has made the last check-in of its schedule
 */

import { encode, packIntegers } from "./codec.js";
import { Door, sensed } from "./door.js";
import { gramPlan } from "./gram.js";
import { localPlan } from "./local_updates.js";
import { isDrawable, lossesAt } from "./mechanisms.js";
import { noiseFrom } from "./noise.js";
import { refuseTask } from "./sections.js";
import { sgdPlan } from "./sgd.js";

/** What this task has a device do; a task that a browser cannot take part in is refused by a sentence.
 * @param {Task} task @returns {Promise<Plan>} */
export async function planOf(task) {
  const { kind } = task.protocol;
  if (kind !== "sgd" && kind !== "local_updates" && kind !== "gram") {
    return refuseTask(`protocol.kind is ${JSON.stringify(kind)}, and it knows sgd, local_updates and gram`);
  }
  const plan = await { sgd: sgdPlan, local_updates: localPlan, gram: gramPlan }[kind](task);
  const wide = Object.keys(plan.table).find((row) => !isDrawable(plan.table[row].law));
  if (wide !== undefined) refuseTask(`privacy.epsilon.${wide} asks for more noise than a device draws`);
  return plan;
}

/** What check-in number `trip` will be charged on the samples from serial `first` on, whatever they are.
 * @param {Task} task @param {Plan} plan @param {number} first @param {number} trip @returns {Charge[]} */
export function chargesAhead(task, { table }, first, trip) {
  const rows = Object.keys(table).toSorted();
  return rows.map((row) => chargeOf(task, { row, part: table[row].covers, losses: lossesAt(table[row], trip) }, first));
}

/** @param {Task} task @param {import("./door.js").Passage} passage @param {number} first @returns {Charge} */
function chargeOf(task, { row, part, losses }, first) {
  return { task: task.id, row, ...losses, first: first + part.start, last: first + part.stop - 1 };
}

/**
 * One check-in: the samples and the publication become a message. `first` is the serial of the first sample, `trip` how
 * many check-ins of this task the device made before. The caller has asked its budgets about `chargesAhead`.
 * @param {Task} task @param {Plan} plan @param {{ samples: Samples, publication: Publication, first: number,
 * trip: number }} given
 * @param {Source} [noise] @returns {Turn}
 */
export function deviceTurn(task, plan, { samples, publication, first, trip }, noise = noiseFrom()) {
  if (samples.y.length !== plan.batch) throw new RangeError(`A check-in has ${plan.batch} samples.`);
  const door = new Door(plan.table, noise, trip);
  const { rows, fields } = plan.contribute(sensed(samples), publication, trip);
  const masked = task.masking ? maskedRows(door, plan, rows) : null;
  const body = masked ? null : encode({ ...fields, ...packedRows(door, plan, rows) });
  const charges = door.passages.map((passage) => chargeOf(task, passage, first));
  return { kind: plan.kind, body, masked, charges, ends: isLast(plan, trip) };
}

/** Whether no check-in follows this one. @param {Plan} plan @param {number} trip @returns {boolean} */
function isLast({ table }, trip) {
  return Object.values(table).some(({ schedule }) => schedule !== null && trip + 1 >= schedule.levels.length);
}

/** The rows in the order of the table, let out for anyone to see. @param {Door} door @param {Plan} plan
 * @param {Rows} rows @returns {{ [row: string]: Plain }} */
function packedRows(door, plan, rows) {
  const found = Object.keys(plan.table).map((
    row,
  ) => [row, packIntegers(door.release(row, rows[row]).value, plan.shape(row))]);
  return Object.fromEntries(found);
}

/** @param {Door} door @param {Plan} plan @param {Rows} rows @returns {{ [row: string]: Masked }} */
function maskedRows(door, plan, rows) {
  return Object.fromEntries(Object.keys(plan.table).map((row) => [row, door.masked(row, rows[row])]));
}
