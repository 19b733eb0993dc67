/** spending.json: the verdicts of budgets over histories of steps, and the statement after each. */

import { parse } from "../../../src/crowdml/web/device/fractions.js";
import { lossText, parseLoss } from "../../../src/crowdml/web/device/losses.js";
import { History } from "../../../src/crowdml/web/device/spending.js";
import { check, equal, refused } from "./expect.js";

/**
 * @typedef {{ epsilon: string, delta: number, samples: number, device_epsilon: string | null, task: string | null }}
 * Cap
 * @typedef {{ first: number, last: number, loss: string, device_loss: string }} Row
 * @typedef {{ task: string, charges: Row[], cap: string | null, budget: number | null, statement: unknown }} Step
 * @typedef {{ name: string, budgets: Cap[], steps: Step[] }} Case
 */

/** @param {Case[]} vectors */
export function checks(vectors) {
  return [
    ...vectors.map((row) => check(row.name, () => history(row))),
    check("losses read back as they are written", async () => {
      for (const text of ["pure 1/10", "zcdp 3/1000", "renyi 2:1/50,3:3/50", "unbounded"]) {
        equal(lossText(parseLoss(text)), text, text);
      }
      for (const text of ["pure 2/20", "zcdp -1", "renyi 3:2,4:1", "none"]) await refused(() => parseLoss(text));
    }),
  ];
}

/** @param {Case} row */
function history(row) {
  const budgets = row.budgets.map(({ epsilon, delta, samples, device_epsilon, task }) => {
    const deviceEpsilon = device_epsilon === null ? null : parse(device_epsilon);
    return { epsilon: parse(epsilon), delta, samples, deviceEpsilon, task };
  });
  const kept = new History();
  row.steps.forEach((step, at) => {
    const charges = step.charges.map((each) => chargeOf(step.task, each));
    const refusal = kept.refusal(step.task, charges, budgets);
    const budget = refusal?.budget ? budgets.findIndex((each) => each === refusal.budget) : null;
    equal([refusal?.cap ?? null, budget], [step.cap, step.budget], `step ${at}`);
    if (refusal === null) {
      equal(kept.statement(charges), step.statement, `the statement with step ${at}`);
      kept.add(charges);
    }
    equal(kept.statement(), step.statement, `the statement after step ${at}`);
  });
  equal(new History(kept.charges).statement(), row.steps[row.steps.length - 1].statement, "of the same charges again");
}

/** @param {string} task @param {Row} row */
function chargeOf(task, { first, last, loss, device_loss }) {
  return { task, row: "row", loss: parseLoss(loss), deviceLoss: parseLoss(device_loss), first, last };
}
