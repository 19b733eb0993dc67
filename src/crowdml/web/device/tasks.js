/**
 * A task as its published bytes say it. A device computes what will leave, and what it costs, from these bytes and from
 * nothing that a server says besides. A key or a word that this device does not know is refused by one sentence.
 * Mirrors src/crowdml/task.py, for what a browser can do.
 *
 * @typedef {import("./bytes.js").Bytes} Bytes
 * @typedef {import("./fractions.js").Fraction} Fraction
 * @typedef {import("./json.js").Json} Json
 * @typedef {import("./spending.js").Budget} Budget
 * @typedef {ReturnType<typeof readTable>} Table
 * @typedef {ReturnType<typeof withHash>} Task
 */

import { equalBytes, sha256, toHex } from "./bytes.js";
import { toNumber, whole } from "./fractions.js";
import { isJsonMap, readJson } from "./json.js";
import { Problem } from "./problems.js";
import * as sections from "./sections.js";

const { count, flag, list, named, nullable, number, oneOf, optional, positive, refuseTask, table, text } = sections;

/** A promise may fail with this probability: the most that it may be. */
const LARGEST_DELTA = 1e-5;
/** Numbers in an accelerometer's spectrum. */
const SPECTRUM = 64;

const norm = table({ bound: positive, kind: oneOf("l1", "l2") });

/** One public bound for all columns, or one for each. @type {sections.Read<Fraction[] | null>} */
function bounds(value, where) {
  if (value === undefined || value === null) return null;
  return Array.isArray(value) ? list(number)(value, where) : [number(value, where)];
}

const features = table({
  dimension: count(1, 1_000_000),
  high: bounds,
  kind: oneOf("vector", "accelerometer-spectrum"),
  low: bounds,
  norm,
});

const labels = table({
  bound: optional(number, whole(1)), // of labels that are numbers
  classes: list(text),
  kind: oneOf("class"),
});

const masking = table({
  cohort: count(3, 2 ** 20),
  colluders: count(0, 2 ** 20),
  floor: nullable(positive),
  lease: positive,
  minimum: count(3, 2 ** 20),
  window: positive,
});

const privacy = table({
  budget: nullable(table({ epsilon: positive, samples: count(1, 10 ** 12) })),
  delta: number,
  epsilon: named(positive),
  grid: nullable(positive),
  mechanism: oneOf("discrete-gaussian", "discrete-laplace", "skellam"),
  uses: optional(count(1, 100_000), 1),
  unit: oneOf("sample", "device"),
});

/** @type {sections.Read<{ [key: string]: Json }>} */
function plain(value, where) {
  if (value === undefined || !isJsonMap(value)) return refuseTask(`${where} is not a table`);
  return { ...value };
}

const readTable = table({
  as_published: flag,
  collects: text,
  features,
  labels,
  masking: nullable(masking),
  model: plain,
  name: text,
  privacy,
  protocol: plain,
  purpose: text,
  stop: table({ error: nullable(number), steps: nullable(count(1, 2 ** 31 - 1)) }),
  title: text,
});

/** The task behind its published bytes. @param {Bytes} data @param {Bytes} [hash] of the task that was joined
 * @returns {Promise<Task>} */
export async function readTask(data, hash) {
  const digest = await sha256(data);
  if (hash && !equalBytes(hash, digest)) throw new Problem("wrong-task", "The task is not the one that was joined.");
  const found = readTable(readJson(data), "");
  check(found);
  return withHash(found, digest);
}

/** @param {Table} found @param {Bytes} digest */
function withHash(found, digest) {
  const honest = found.masking ? found.masking.minimum - found.masking.colluders : 0;
  return {
    ...found,
    masking: found.masking && { ...found.masking, honest },
    privacy: { ...found.privacy, delta: toNumber(found.privacy.delta) },
    hash: digest,
    id: toHex(digest),
    classes: found.labels.classes.length,
  };
}

/** @param {Table} found */
function check(found) {
  const { as_published: published, features: given, labels: { classes }, masking: masks, privacy: price } = found;
  if (published) refuseTask("as_published = true runs in the simulator alone");
  if (classes.length < 2 || new Set(classes).size < classes.length) {
    refuseTask("labels.classes are not two or more names");
  }
  if (given.kind === "accelerometer-spectrum" && given.dimension !== SPECTRUM) {
    refuseTask("its spectrum has 64 numbers");
  }
  if ((given.low === null) !== (given.high === null)) refuseTask("features.low and features.high go together");
  for (const each of [given.low, given.high]) {
    if (each && each.length !== 1 && each.length !== given.dimension) {
      refuseTask("its bounds are not one for each column");
    }
  }
  if ((price.mechanism === "skellam") !== (masks !== null)) refuseTask('"skellam" and [masking] go together');
  if (masks && (masks.minimum > masks.cohort || masks.colluders > masks.minimum - 2)) {
    refuseTask("masking.minimum is wrong");
  }
  checkDelta(found);
}

/** @param {Table} found */
function checkDelta({ masking: masks, privacy: price }) {
  const delta = toNumber(price.delta);
  const samples = price.unit === "device" ? 1 : (price.budget?.samples ?? 0);
  const protectedOnes = masks ? masks.cohort * samples : 0;
  const most = protectedOnes ? Math.min(LARGEST_DELTA, 1 / (10 * protectedOnes)) : LARGEST_DELTA;
  if (delta < 0 || delta > most) refuseTask(`privacy.delta = ${delta}, and it may be at most ${most}`);
  if (delta === 0 && price.mechanism !== "discrete-laplace") refuseTask("its noise has no guarantee without a delta");
}

/** The `[model]` table without its penalty, for `makeModel`. @param {Task} task @returns {{ [key: string]: unknown }}
 */
export function modelTable(task) {
  const { l2: _, ...others } = task.model;
  return Object.fromEntries(Object.entries(others).map(([key, value]) => [key, sections.anything(value, key)]));
}

/** lambda of the penalty lambda |w|^2 / 2. @param {Task} task @returns {Fraction} */
export function penaltyOf(task) {
  const found = optional(number, whole(0))(task.model.l2, "model.l2");
  return found.top < 0n ? refuseTask("model.l2 is below 0") : found;
}

/** The budget that the task itself sets, on its own charges. @param {Task} task
 * @param {import("./losses.js").Total} plan what one sample pays in all @returns {Budget[]} */
export function budgetsOf({ id, privacy: { budget, delta } }, plan) {
  return budget ? [{ ...budget, delta, deviceEpsilon: null, task: id, plan }] : [];
}
