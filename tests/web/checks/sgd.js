/** sgd.json: from a task and a batch to the sums, their noise, their price and the bytes of a check-in. */

import { fromHex, toHex, toUtf8 } from "../../../src/crowdml/web/device/bytes.js";
import { encode, packFloats, packIntegers } from "../../../src/crowdml/web/device/codec.js";
import { toText } from "../../../src/crowdml/web/device/fractions.js";
import { lossText } from "../../../src/crowdml/web/device/losses.js";
import { History } from "../../../src/crowdml/web/device/spending.js";
import { totalsFell } from "../../../src/crowdml/web/device/statements.js";
import { readTask } from "../../../src/crowdml/web/device/tasks.js";
import { chargesAhead, deviceTurn, planOf } from "../../../src/crowdml/web/device/turn.js";
import { rowsOf, silence } from "./silence.js";
import { check, equal } from "./expect.js";

/**
 * @typedef {{ law: string, sigma?: string, scale?: string }} Law
 * @typedef {{ first: number, stop: number, noise: Law, loss: string, device_loss: string, shape: number[] }} Row
 * @typedef {{ shape: number[], values: number[] }} Values
 * @typedef {import("../../../src/crowdml/web/device/statements.js").Statement} Stated
 * @typedef {{ weights: Values, version: number, without_noise: { [row: string]: Values | number | null } }} Run
 * @typedef {{ name: string, task: string, hash: string, grid: string, clip: number, norm: string, x: Values,
 * y: number[],   rows: { [row: string]: Row }, statement: { after_1: Stated, after_3: Stated }, runs: Run[] }} Case
 */

/** @param {Case[]} vectors */
export function checks(vectors) {
  return vectors.flatMap((row) => [
    check(`${row.name}: what leaves, and its price`, () => priced(row)),
    check(`${row.name}: the statement`, () => stated(row)),
    ...row.runs.map((run, at) => check(`${row.name}: sums ${at}`, () => summed(row, run))),
  ]);
}

/** @param {Case} row */
async function priced(row) {
  const { plan } = await opened(row);
  equal(Object.keys(plan.table).toSorted(), Object.keys(row.rows).toSorted(), "the rows");
  const { gradient } = plan.table;
  equal([toText(gradient.step), gradient.bound, gradient.norm], [row.grid, row.clip, row.norm], "the grid");
  for (const [name, wanted] of Object.entries(row.rows)) {
    const { covers, law, losses } = plan.table[name];
    equal([covers.start, covers.stop, plan.shape(name)], [wanted.first, wanted.stop, wanted.shape], name);
    equal(shownLaw(law), wanted.noise, `the noise of ${name}`);
    equal(
      [lossText(losses.loss), lossText(losses.deviceLoss)],
      [wanted.loss, wanted.device_loss],
      `the loss of ${name}`,
    );
  }
}

/** @param {import("../../../src/crowdml/web/device/mechanisms.js").NoiseLaw} law */
function shownLaw(law) {
  if (law.kind === "laplace") return { law: "discrete-laplace", scale: toText(law.scale) };
  return law.kind === "gaussian" ? { law: "discrete-gaussian", sigma: toText(law.sigma) } : law;
}

/** @param {Case} row */
async function stated(row) {
  const { task, plan } = await opened(row);
  const history = new History();
  for (const trip of [0, 1, 2]) {
    history.add(chargesAhead(task, plan, trip * plan.batch, trip));
    if (trip === 0) agree(history.statement(), row.statement.after_1);
  }
  agree(history.statement(), row.statement.after_3);
}

/** The vectors name the most expensive sample's total, as Python's price does. A ledger names the largest loss of each
 * kind that any sample has (docs/protocol.md, "Spending"), which is no less.
 * @param {import("../../../src/crowdml/web/device/statements.js").Statement} found @param {Stated} wanted */
function agree(found, wanted) {
  equal([found.device, found.samples], [wanted.device, wanted.samples], "the device's total");
  equal(totalsFell(wanted, found), false, "whether the most expensive sample has less");
}

/** @param {Case} row @param {Run} run */
async function summed(row, run) {
  const { task, plan } = await opened(row);
  const weights = packFloats(Float32Array.from(run.weights.values), run.weights.shape);
  const publication = plan.read(encode({ version: run.version, weights }));
  const samples = { x: rowsOf(row.x.values, row.x.shape[1]), y: row.y };
  const turn = deviceTurn(task, plan, { samples, publication, first: 0, trip: 0 }, silence);
  const fields = Object.entries(run.without_noise).map(([name, value]) => [name, packed(value)]);
  equal(toHex(turn.body ?? new Uint8Array()), toHex(encode(Object.fromEntries(fields))), "the message");
  equal(turn.charges.toSorted((a, b) => (a.row < b.row ? -1 : 1)), chargesAhead(task, plan, 0, 0), "its charges");
}

/** @param {Values | number | null} value @returns {import("../../../src/crowdml/web/device/codec.js").Plain} */
function packed(value) {
  if (value === null || typeof value === "number") return value;
  return packIntegers(Int32Array.from(value.values), value.shape);
}

/** @param {Case} row */
async function opened(row) {
  const task = await readTask(toUtf8(row.task), fromHex(row.hash));
  return { task, plan: await planOf(task) };
}
