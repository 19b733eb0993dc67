/**
 * Crowd-ML's asynchronous SGD: a device answers the published weights with the noisy sum of its batch's gradients.
 * Hamm et al., ICDCS 2015, Device Routines 1 to 3. Mirrors the device of src/crowdml/protocols/sgd.py.
 *
 * @typedef {import("./door.js").Private<import("./models.js").Samples>} Batch
 * @typedef {import("./mechanisms.js").Mechanism} Mechanism
 * @typedef {import("./models.js").Model} Model
 * @typedef {import("./tasks.js").Task} Task
 * @typedef {import("./turn.js").Plan} Plan
 */

import { asCount, asMap, decode, readFloats } from "./codec.js";
import { split } from "./door.js";
import { toNumber, whole } from "./fractions.js";
import { labelCells, makeModel, mistakeCells, sampleGradients } from "./models.js";
import { countRow, noiseNorm, sumRow } from "./rows.js";
import { count, nullable, numberBetween, oneOf, optional, positive, refuseTask, table, text } from "./sections.js";
import { modelTable, penaltyOf } from "./tasks.js";

const LARGEST_VERSION = 2 ** 31 - 1;
const ROWS = new Set(["errors", "gradient", "labels"]);
const CHANGE = "how the model should change";
const LABELS = "how often each label occurred";
const WRONG = "how often the model was wrong";

/** The `[protocol]` table; what only the server needs is read and left alone. */
const readSettings = table({
  batch: count(1, 100_000),
  buffer: optional(count(0, 10_000_000), 0),
  clip: nullable(positive),
  held_out: optional(count(0, 100_000), 0),
  kind: oneOf("sgd"),
  momentum: optional(numberBetween(whole(0), whole(1)), null),
  radius: optional(positive, null),
  step: table({ c: positive, schedule: optional(text, "") }),
  update: optional(oneOf("sgd", "adagrad", "rmsprop", "momentum", "average"), "sgd"),
});

/** What this task has a device do. @param {Task} task @returns {Plan} */
export function sgdPlan(task) {
  const settings = readSettings(task.protocol, "protocol");
  const model = makeModel(modelTable(task), task.features.dimension, task.classes);
  if (settings.held_out >= settings.batch) refuseTask("protocol.held_out is not below protocol.batch");
  if (task.privacy.unit !== "sample") refuseTask('sgd protects a "sample", and privacy.unit is another');
  penaltyOf(task); // the server adds it: it is public
  const unknown = Object.keys(task.privacy.epsilon).find((name) => !ROWS.has(name));
  if (unknown !== undefined) refuseTask(`sgd lets out no ${unknown}`);
  const rows = tableOf(task, settings, model);
  return {
    kind: task.masking ? "sgd/masked/1" : "sgd/gradient/1",
    batch: settings.batch,
    buffer: settings.buffer || 10 * settings.batch,
    table: rows,
    published: "sgd/params/1",
    read: (body) => readParams(body, model),
    contribute: (batch, { weights, version }) => ({
      rows: contribute(settings.held_out, rows, model, weights, batch),
      fields: { errors: null, gradient: null, labels: null, version },
    }),
    shape: (name) => (name === "gradient" ? model.shape : [rows[name].length]),
  };
}

/** @param {Task} task @param {ReturnType<typeof readSettings>} settings @param {Model} model
 * @returns {{ [row: string]: Mechanism }} */
function tableOf(task, { batch, clip, held_out: held }, model) {
  const norm = noiseNorm(task);
  const { bound, kind } = task.features.norm;
  if (norm === "l1" && kind !== "l1") refuseTask('"discrete-laplace" noise needs features.norm.kind = "l1"');
  const [tested, everything] = [{ start: 0, stop: held || batch }, { start: 0, stop: batch }];
  const longest = longestGradient(model, norm, toNumber(bound), clip && toNumber(clip));
  const used = { start: held, stop: batch };
  const { errors, labels } = task.privacy.epsilon;
  /** @type {{ [row: string]: Mechanism }} */
  const rows = Object.create(null);
  rows.gradient = sumRow(task, { name: "gradient", length: model.size, covers: used, promise: CHANGE, bound: longest });
  if (errors) rows.errors = countRow(task, { name: "errors", length: 1, covers: tested, promise: WRONG });
  if (labels) {
    rows.labels = countRow(task, { name: "labels", length: model.cells, covers: everything, promise: LABELS });
  }
  return rows;
}

/** How long a sample's gradient may be: the model's own bound, or the task's clip where that is less.
 * @param {Model} model @param {"l1" | "l2"} norm @param {number} radius @param {number | null} clip */
export function longestGradient(model, norm, radius, clip) {
  if (clip !== null && !model.bounded) return clip;
  return Math.min(model.bound(norm, radius), clip ?? Infinity);
}

/** @param {Uint8Array} body @param {Model} model */
function readParams(body, model) {
  const found = asMap(decode(body), ["version", "weights"], "The publication");
  const version = asCount(found.version, "version", 0, LARGEST_VERSION);
  return { version, taken: 0, weights: readFloats(found.weights, model.shape, "weights") };
}

/** What each row is given: one gradient a sample, and the cells of mistakes and labels (Device Routines 2 and 3).
 * @param {number} held rows of the batch that are held out @param {{ [row: string]: Mechanism }} table_
 * @param {Model} model @param {Float32Array} weights @param {Batch} batch @returns {import("./turn.js").Rows} */
function contribute(held, table_, model, weights, batch) {
  const [heldOut, used] = split(batch, held);
  const tested = held ? heldOut : used;
  return {
    gradient: used.map((samples) => sampleGradients(model, weights, samples)),
    ...(table_.errors ? { errors: tested.map((samples) => mistakeCells(model, weights, samples)) } : {}),
    ...(table_.labels ? { labels: batch.map((samples) => labelCells(model, samples)) } : {}),
  };
}
