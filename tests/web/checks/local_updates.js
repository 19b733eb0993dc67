/** local_updates.json: from a task and a batch to the update, its noise, its price and the bytes of a check-in. */

import { fromHex, toHex, toUtf8 } from "../../../src/crowdml/web/device/bytes.js";
import { toText } from "../../../src/crowdml/web/device/fractions.js";
import { lossText } from "../../../src/crowdml/web/device/losses.js";
import { lossesAt } from "../../../src/crowdml/web/device/mechanisms.js";
import { readTask } from "../../../src/crowdml/web/device/tasks.js";
import { chargesAhead, deviceTurn, planOf } from "../../../src/crowdml/web/device/turn.js";
import { check, equal } from "./expect.js";
import { silence } from "./silence.js";

/**
 * @typedef {{ trip: number, loss: string, device_loss: string, kind: string, body: string }} Run
 * @typedef {{ name: string, task: string, hash: string, grid: string, most: number, rounding: string, sigma: string,
 *   x: number[][], y: number[], publication: string, runs: Run[] }} Case
 */

/** @param {Case[]} vectors */
export function checks(vectors) {
  return vectors.map((row) =>
    check(row.name, async () => {
      const task = await readTask(toUtf8(row.task), fromHex(row.hash));
      const plan = await planOf(task);
      const { update } = plan.table;
      const rounding = update.form === "stable" ? "to the nearest" : "toward zero";
      equal([toText(update.step), update.bound, rounding], [row.grid, row.most, row.rounding], "the grid");
      equal(update.law.kind === "gaussian" ? toText(update.law.sigma) : "", row.sigma, "sigma");
      const publication = plan.read(fromHex(row.publication));
      const samples = { x: row.x.map((each) => Float64Array.from(each)), y: row.y };
      for (const run of row.runs) {
        const { loss, deviceLoss } = lossesAt(update, run.trip);
        equal([lossText(loss), lossText(deviceLoss)], [run.loss, run.device_loss], `the price of check-in ${run.trip}`);
        const turn = deviceTurn(task, plan, { samples, publication, first: 8, trip: run.trip }, silence);
        equal([turn.kind, toHex(turn.body ?? new Uint8Array())], [run.kind, run.body], `check-in ${run.trip}`);
        equal(turn.charges, chargesAhead(task, plan, 8, run.trip), `the charges of check-in ${run.trip}`);
      }
    })
  );
}
