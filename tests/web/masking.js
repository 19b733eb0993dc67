/** Terms and masks for tests in Python. */

import { toHex, toUtf8 } from "../../src/crowdml/web/device/bytes.js";
import { neighboursOf, planGraph } from "../../src/crowdml/web/device/graph.js";
import { systemEntropy } from "../../src/crowdml/web/device/noise.js";
import { termsOf } from "../../src/crowdml/web/device/roster.js";
import { maskVectors } from "../../src/crowdml/web/device/secagg.js";
import { readTask } from "../../src/crowdml/web/device/tasks.js";
import { planOf } from "../../src/crowdml/web/device/turn.js";

/** @param {string} text a masked task */
export async function masked(text) {
  const task = await readTask(toUtf8(text));
  const { fields, smallest, largest, survivors, colluders } = termsOf(task, await planOf(task));
  return {
    fields: fields.map(({ tag, length, bits }) => [tag, length, bits]),
    smallest,
    largest,
    survivors,
    colluders,
  };
}

/** @param {[devices: number, colluders: number, survivors: number][]} cases */
export function plans(cases) {
  return cases.map((each) => planGraph(...each));
}

/** The neighbours of each device on a circle. @param {string[]} ids @param {number} neighbours */
export function circle(ids, neighbours) {
  const plan = { neighbours, threshold: 1, quorum: 1, survivors: 1, complete: false };
  return Promise.all(ids.map((_, own) => neighboursOf(ids, new Uint8Array(32).fill(9), own, plan)));
}

function fresh() {
  return new Uint8Array(systemEntropy(32));
}

/** Milliseconds to mask one vector among so many devices. @param {number} length @param {32 | 64} bits
 * @param {number} devices */
export async function maskTime(length, bits, devices) {
  const ids = Array.from({ length: devices }, () => toHex(fresh()).slice(0, 32));
  const peers = ids.slice(1).map((id) => ({ id, secret: fresh() }));
  const terms = {
    task: fresh(),
    fields: [{ tag: "v", length, bits }],
    smallest: 3,
    largest: 3,
    survivors: 3,
    colluders: 0,
  };
  const values = Int32Array.from({ length }, (_, at) => at - 7);
  const begin = performance.now();
  await maskVectors(terms, { v: values }, fresh(), ids[0], fresh(), peers);
  return performance.now() - begin;
}
