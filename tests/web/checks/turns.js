/** turns.json: whole check-ins, noise included: the same bytes and charges for the same random bytes. */

import { fromHex, toHex, toUtf8 } from "../../../src/crowdml/web/device/bytes.js";
import { lossText } from "../../../src/crowdml/web/device/losses.js";
import { noiseFrom } from "../../../src/crowdml/web/device/noise.js";
import { History } from "../../../src/crowdml/web/device/spending.js";
import { readTask } from "../../../src/crowdml/web/device/tasks.js";
import { chargesAhead, deviceTurn, planOf } from "../../../src/crowdml/web/device/turn.js";
import { check, equal } from "./expect.js";

/**
 * @typedef {{ row: string, first: number, last: number, loss: string, device_loss: string }} Charged
 * @typedef {{ trip: number, first: number, bytes: string, kind: string, body?: string,
 *   masked?: { [row: string]: number[] }, charges: Charged[],
 *   statement: unknown }} Run
 * @typedef {{ name: string, task: string, hash: string, x: number[][], y: number[], publication: string, runs: Run[]
 * }} Case
 */

/** @param {Case[]} vectors */
export function checks(vectors) {
  return vectors.map((row) => check(row.name, () => turned(row)));
}

/** @param {Case} row */
async function turned(row) {
  const task = await readTask(toUtf8(row.task), fromHex(row.hash));
  const plan = await planOf(task);
  const publication = plan.read(fromHex(row.publication));
  const samples = { x: row.x.map((each) => Float64Array.from(each)), y: row.y };
  for (const run of row.runs) {
    const data = fromHex(run.bytes);
    let used = 0;
    const noise = noiseFrom((size) => data.subarray(used, used += size));
    const turn = deviceTurn(task, plan, { samples, publication, first: run.first, trip: run.trip }, noise);
    equal([turn.kind, turn.body ? toHex(turn.body) : undefined], [run.kind, run.body], `check-in ${run.trip}`);
    for (const [name, masked] of Object.entries(turn.masked ?? {})) {
      equal(masked.under((steps) => Array.from(steps)), run.masked?.[name], `${name}, before its masks`);
    }
    equal(used, data.length, "the random bytes that were used");
    equal(sorted(turn.charges.map(shown)), sorted(run.charges), `the charges of check-in ${run.trip}`);
    equal(ledgerAfter(task, plan, run.trip).statement(turn.charges), run.statement, "the statement");
    equal(sorted(chargesAhead(task, plan, run.first, run.trip).map(shown)), sorted(run.charges), "the charges ahead");
  }
}

/** The ledger of a device that made so many check-ins, each on a batch of its own.
 * @param {import("../../../src/crowdml/web/device/tasks.js").Task} task
 * @param {import("../../../src/crowdml/web/device/turn.js").Plan} plan @param {number} trips */
function ledgerAfter(task, plan, trips) {
  const history = new History();
  for (let trip = 0; trip < trips; trip++) history.add(chargesAhead(task, plan, trip * plan.batch, trip));
  return history;
}

/** @param {import("../../../src/crowdml/web/device/spending.js").Charge} charge @returns {Charged} */
function shown({ row, first, last, loss, deviceLoss }) {
  return { row, first, last, loss: lossText(loss), device_loss: lossText(deviceLoss) };
}

/** @param {Charged[]} charges */
function sorted(charges) {
  return charges.toSorted((one, other) => (one.row < other.row ? -1 : 1));
}
