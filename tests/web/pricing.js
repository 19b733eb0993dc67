/** Noise and prices for tests in Python. Fractions travel as texts. */

import * as calibration from "../../src/crowdml/web/device/calibration.js";
import { parse, toText } from "../../src/crowdml/web/device/fractions.js";
import * as losses from "../../src/crowdml/web/device/losses.js";

/** @param {[epsilon: string, delta: number][]} cases */
export function rhos(cases) {
  return cases.map(([epsilon, delta]) => toText(calibration.rhoFor(parse(epsilon), delta)));
}

/** @param {[sensitivity: string, rho: string][]} cases */
export function sigmas(cases) {
  return cases.map(([sensitivity, rho]) => toText(calibration.gaussianSigma(parse(sensitivity), parse(rho))));
}

/** @param {[l2: string, l1: string, epsilon: string, delta: number, uses: number][]} cases */
export function skellams(cases) {
  return cases.map(([l2, l1, epsilon, delta, uses]) => {
    const variance = calibration.skellamVariance(parse(l2), parse(l1), parse(epsilon), delta, uses);
    return [toText(variance), losses.lossText(calibration.skellamLoss(parse(l2), parse(l1), variance))];
  });
}

/** The epsilon of the losses together, and whether a filter of a budget allows them.
 * @param {[texts: string[], delta: number, budget: string][]} cases */
export function verdicts(cases) {
  return cases.map(([texts, delta, budget]) => {
    const total = losses.addTotals(texts.map((text) => losses.totalOf(losses.parseLoss(text))));
    const epsilon = losses.epsilonOf(total, delta);
    const { order } = losses.filterOf(parse(budget), delta, total);
    return {
      epsilon: epsilon === Infinity ? null : epsilon,
      allowed: losses.allows(losses.filterOf(parse(budget), delta), total),
      planned: losses.allows({ epsilon: parse(budget), delta, order }, total),
      losses: losses.lossesOf(total),
    };
  });
}
