/**
 * Gram: one masked release of second moments; any linear model after that is free. Mirrors the device of
 * src/crowdml/protocols/gram.py, for the maps "identity" and "cosine".
 *
 * @typedef {import("./models.js").Samples} Samples
 * @typedef {import("./tasks.js").Task} Task
 * @typedef {import("./turn.js").Plan} Plan
 */

import { asCount, asMap, decode, readFloats } from "./codec.js";
import { whole } from "./fractions.js";
import { makeMap, readMap } from "./maps.js";
import { momentsRow } from "./moments.js";
import { isClass } from "./scores.js";
import { count, numberBetween, oneOf, optional, refuseTask, table } from "./sections.js";

const MOST_FEATURES = 4096;
const SAID = "how features and labels go together, summed over a crowd and blurred with noise";

const readSettings = table({
  batch: count(1, 100_000),
  kind: oneOf("gram"),
  map: optional(readMap, null),
});

const readRidge = table({ c: optional(numberBetween(whole(0), whole(1000)), null), kind: oneOf("ridge") });

/** What this task has a device do. @param {Task} task @returns {Promise<Plan>} */
export async function gramPlan(task) {
  const settings = readSettings(task.protocol, "protocol");
  readRidge(task.model, "model");
  const { masking, privacy, features, classes } = task;
  if (!masking) return refuseTask("gram lets a sum over a crowd out and no device's own moments: it needs [masking]");
  if (Object.keys(privacy.epsilon).join() !== "moments") refuseTask("privacy.epsilon names moments, and nothing else");
  if (privacy.uses !== 1) refuseTask("gram takes each sample's moments once, and privacy.uses is another number");
  const map = await makeMap(settings.map ?? readMap({}, "protocol.map"), features.dimension);
  if (map.length > MOST_FEATURES) refuseTask(`its map makes ${map.length} features`);
  const asked = { features: map.length, labels: classes, batch: settings.batch, honest: masking.honest, promise: SAID };
  const row = momentsRow(task, asked);
  return {
    kind: "gram/masked/1",
    published: "gram/model/1",
    batch: settings.batch,
    buffer: settings.batch,
    table: { moments: row },
    read: (body) => readModel(body, map.length, classes),
    contribute: (batch, { version }) => ({
      rows: { moments: batch.map((samples) => rowsOf(samples, map, classes)) },
      fields: { version },
    }),
    shape: () => [row.length],
  };
}

/** One row a sample: its features, then a 1 in the place of its class. @param {Samples} samples
 * @param {import("./maps.js").FeatureMap} map @param {number} classes @returns {Float32Array[]} */
function rowsOf({ x, y }, map, classes) {
  return x.map((row, at) => {
    const found = new Float32Array(map.length + classes);
    found.set(map.of(row));
    if (isClass(y[at], classes)) found[map.length + y[at]] = 1;
    return found;
  });
}

/** @param {Uint8Array} body @param {number} features @param {number} classes */
function readModel(body, features, classes) {
  const found = asMap(decode(body), ["version", "weights"], "The publication");
  const version = asCount(found.version, "version", 0, 2 ** 31 - 1);
  return { version, taken: 0, weights: readFloats(found.weights, [features, classes], "weights") };
}
