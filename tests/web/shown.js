/** What a page shows of tasks, for tests that hold it against Python. */

import { sha256, toHex, toUtf8 } from "../../src/crowdml/web/device/bytes.js";
import { understood } from "../../src/crowdml/web/device/machine.js";
import { priceOf } from "../../src/crowdml/web/device/view.js";

/** Both epsilons of each task over all check-ins that its budget allows. @param {string[]} tasks canonical JSON
 * @returns {Promise<{ sample: number, device: number }[]>} */
export function prices(tasks) {
  return Promise.all(tasks.map(async (text) => {
    const bytes = toUtf8(text);
    const { task, plan } = await understood(bytes, toHex(await sha256(bytes)));
    return priceOf(task, plan);
  }));
}
