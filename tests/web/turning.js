/** Plans and turns for tests in Python. */

import { fromHex, toHex, toUtf8 } from "../../src/crowdml/web/device/bytes.js";
import { toText } from "../../src/crowdml/web/device/fractions.js";
import { lossText } from "../../src/crowdml/web/device/losses.js";
import { lossesAt, widthOf } from "../../src/crowdml/web/device/mechanisms.js";
import { noiseFrom } from "../../src/crowdml/web/device/noise.js";
import { samplePrice } from "../../src/crowdml/web/device/prices.js";
import { readTask } from "../../src/crowdml/web/device/tasks.js";
import { deviceTurn, planOf } from "../../src/crowdml/web/device/turn.js";
import { lossesOf } from "../../src/crowdml/web/device/losses.js";
import { silence } from "./checks/silence.js";

/** What a task has a device do: each row of its table in words and numbers; a refusal is its sentence.
 * @param {string} text the canonical task @param {number} trip */
export async function planned(text, trip) {
  const task = await readTask(toUtf8(text));
  const plan = await planOf(task);
  const rows = Object.entries(plan.table).map(([name, row]) => {
    const { loss, deviceLoss, alone, deviceAlone } = lossesAt(row, trip);
    return [name, {
      step: toText(row.step),
      bound: row.bound,
      width: widthOf(row.law),
      losses: [loss, deviceLoss, alone, deviceAlone].map((each) => each && lossText(each)),
      covers: [row.covers.start, row.covers.stop],
      levels: row.schedule?.levels.length ?? null,
    }];
  });
  const { uses } = task.privacy;
  return { rows: Object.fromEntries(rows), sample: lossesOf(samplePrice(plan.table, uses, task.privacy.delta)) };
}

/** The message of one check-in without noise, or its masked summands.
 * @param {string} text @param {number[][]} x @param {number[]} y @param {string} publication @param {number} trip */
export async function silent(text, x, y, publication, trip) {
  const task = await readTask(toUtf8(text));
  const plan = await planOf(task);
  const samples = { x: x.map((row) => Float32Array.from(row)), y };
  const turn = deviceTurn(
    task,
    plan,
    { samples, publication: plan.read(fromHex(publication)), first: 0, trip },
    silence,
  );
  return turn.body && toHex(turn.body);
}

/** Milliseconds of a check-in, the table of its noise made before. @param {string} text @param {number[][]} x
 * @param {number[]} y @param {string} publication @param {number} turns */
export async function turnTimes(text, x, y, publication, turns) {
  const task = await readTask(toUtf8(text));
  const plan = await planOf(task);
  const samples = { x: x.map((row) => Float32Array.from(row)), y };
  const noise = noiseFrom();
  const given = { samples, publication: plan.read(fromHex(publication)), first: 0, trip: 0 };
  deviceTurn(task, plan, given, noise);
  const begin = performance.now();
  for (let turn = 0; turn < turns; turn++) deviceTurn(task, plan, given, noise);
  return (performance.now() - begin) / turns;
}
